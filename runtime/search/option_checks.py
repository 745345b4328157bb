"""Checks of search options: lists all problems before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .constraints.phrases import MOST, contains, phrase_table
from .option_fields import OptionFields

MOST_BEAMS = 4096  # every beam is a row of every step; more is a typing error or a damaged file
BEAM_STYLES = ("huggingface", "ctranslate2")  # beam search as in this library; beam_styles.py has the differences


def problems_of(options: OptionFields) -> list[str]:
    """Problems that do not depend on a model."""
    start = options.forced_start
    return [
        *problems_of_numbers(options),
        *problems_of_sampling(options),
        *problems_of_combinations(options),
        *problems_of_tokens(options),
        *problems_of_phrases(options),
        *problems_of_start(options, start, "prefix" if options.prefix else "forced bos"),
    ]


def problems_of_numbers(options: OptionFields) -> Iterator[str]:
    if options.max_length < 1:
        yield f"max length {options.max_length}, expected at least 1"
    if options.beam < 1:
        yield f"beam {options.beam}, expected at least 1"
    for name in ("beam", "nbest"):
        if getattr(options, name) > MOST_BEAMS:
            yield f"{name} {getattr(options, name)}, expected at most {MOST_BEAMS}"
    counts = "sample" if options.sample else "alternative" if options.alternatives else ""
    if not counts and not 1 <= options.nbest <= max(options.beam, 1):
        yield f"nbest {options.nbest}, expected 1 to the beam size {options.beam}"
    if counts and options.nbest < 1:
        yield f"nbest {options.nbest}, expected at least 1 {counts}"
    if options.early_stopping not in (True, False, "never"):
        yield f"early stopping {options.early_stopping!r}, expected true, false or never"
    if not 0 <= options.min_length <= max(options.max_length, 1):
        yield f"min length {options.min_length}, expected 0 to the max length {options.max_length}"
    for name in ("no_repeat_ngram", "source_no_repeat_ngram", "top_k"):
        if getattr(options, name) < 0:
            yield f"{name.replace('_', ' ')} {getattr(options, name)}, expected 0 (none) or more"
    if not math.isfinite(options.length_penalty):
        yield f"length penalty {options.length_penalty}, expected a number"
    if not 0 < options.repetition_penalty < math.inf:
        yield f"repetition penalty {options.repetition_penalty}, expected more than 0"
    if options.beam_style not in BEAM_STYLES:
        yield f"beam style {options.beam_style!r}, expected one of {', '.join(BEAM_STYLES)}"
    if options.patience != 1.0 and options.beam_style != "ctranslate2":
        yield f"patience {options.patience}, expected 1, or another with beam style ctranslate2"
    elif options.patience != 1.0 and not options.beam * options.patience + 0.5 >= options.kept:
        yield f"patience {options.patience}, expected at least nbest {options.kept} / beam {options.beam}"
    if not 0 <= options.coverage_penalty < math.inf:
        yield f"coverage penalty {options.coverage_penalty}, expected 0 (none) or more"
    if not 0 <= options.min_alternative_expansion_prob <= 1:
        yield f"min alternative expansion prob {options.min_alternative_expansion_prob}, expected 0 to 1"


def problems_of_sampling(options: OptionFields) -> Iterator[str]:
    if not 0 < options.temperature < math.inf:
        yield f"temperature {options.temperature}, expected more than 0"
    if not 0 < options.top_p <= 1:
        yield f"top p {options.top_p}, expected more than 0 and at most 1"
    if options.seed is not None and options.seed < 0:
        yield f"seed {options.seed}, expected 0 or more"
    if options.sample and options.beam > 1:
        yield f"beam {options.beam} together with sample, expected beam 1 (nbest counts samples)"
    idle = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": None}
    if not options.sample and (set_ := [name for name, value in idle.items() if getattr(options, name) != value]):
        yield f"{', '.join(set_).replace('_', ' ')} without sample, expected it with sample only"


def problems_of_combinations(options: OptionFields) -> Iterator[str]:
    """Options that exclude each other."""
    if options.coverage_penalty != 0 and options.beam <= 1:
        yield f"coverage penalty together with {'sample' if options.sample else 'beam 1'}, expected a beam of 2 or more"
    if options.coverage_penalty != 0 and options.alternatives:
        yield "coverage penalty together with alternatives, expected one of them"
    if options.alternatives and options.sample:
        yield "alternatives together with sample, expected one of them"
    if options.min_alternative_expansion_prob != 0 and not options.alternatives:
        yield "min alternative expansion prob without alternatives, expected it with alternatives only"
    if options.phrases and options.sample:
        yield "phrases together with sample, expected greedy or beam search"
    if options.ignore_eos and (options.phrases or options.trie is not None):
        limit = "phrases" if options.phrases else "a trie"
        yield f"ignore eos together with {limit}, which decides where an output may end; expected one of them"
    if options.phrases and options.trie is not None:
        yield "phrases together with a trie, expected one of them"


def problems_of_tokens(options: OptionFields) -> Iterator[str]:
    """Token lists that contradict one another."""
    if not all(options.banned):
        yield "a banned sequence is empty, expected at least one token"
    lists = lists_of(options)
    if lists and not frozenset.intersection(*lists.values()) - options.always_banned:
        yield "no token is allowed, expected one at least that is not banned"
    if options.prefix and options.forced_bos not in (None, options.prefix[0]):
        head, bos = options.prefix[0], options.forced_bos
        yield f"prefix begins with {head}, but forced bos is {bos}; begin the prefix with it"
    if options.trie is not None and not options.trie.ends.any():
        yield "the trie is empty, expected at least one sequence"
    elif options.trie is not None and options.min_length > options.trie.longest + offset_of(options) + 1:
        yield f"min length {options.min_length}, but the longest sequence of the trie has {options.trie.longest} tokens"


def problems_of_phrases(options: OptionFields) -> Iterator[str]:
    if not all(options.phrases):
        yield "a phrase is empty, expected at least one token"
    if len(options.phrases) > MOST:
        yield f"{len(options.phrases)} phrases, expected at most {MOST}"
    for phrase in options.phrases:
        yield from barred_in(options, phrase, f"phrase {' '.join(map(str, phrase))}")


def barred_in(options: OptionFields, tokens: tuple[int, ...], name: str) -> Iterator[str]:
    """Which of these tokens other options forbid."""
    for sequence in options.banned:
        if sequence and contains(tokens, sequence):
            yield f"{name} has {' '.join(map(str, sequence))}, which is banned"
    for what, listed in lists_of(options).items():
        if barred := [token for token in tokens if token not in listed]:
            yield f"{name} has {' '.join(map(str, barred))}, which is not {what}"


def problems_of_start(options: OptionFields, start: tuple[int, ...], name: str) -> Iterator[str]:
    """Problems of forced beginnings: of all outputs, or of one source's."""
    room = room_of(options) - len(start)
    if len(start) > options.max_length:
        yield f"a {name} of {len(start)} tokens, expected at most the max length {options.max_length}"
    elif options.forced_eos is not None and name == "prefix" and len(start) == options.max_length:
        yield f"a {name} of {len(start)} tokens leaves no room for forced eos, expected fewer"
    elif options.alternatives and room < 1:
        yield f"a {name} of {len(start)} tokens leaves no room for alternatives, expected fewer"
    yield from barred_in(options, start, name)
    if options.phrases and all(options.phrases) and len(options.phrases) <= MOST:
        needed = phrase_table(options.phrases).needed_after(start)
        if needed > room:
            yield f"phrases of {needed} tokens, but the max length leaves room for {max(room, 0)}; raise it"
    if options.trie is not None and options.trie.ends.any():
        yield from problems_of_trie(options, start, name, room)


def problems_of_trie(options: OptionFields, start: tuple[int, ...], name: str, room: int) -> Iterator[str]:
    assert options.trie is not None
    node = options.trie.walked(start[offset_of(options) :])
    if node < 0:
        yield f"{name} leaves the trie, expected the beginning of one of its sequences"
    elif (left := int(options.trie.least(barred_of(options))[node])) > room:
        if int(options.trie.least(frozenset())[node]) > room:
            yield f"the trie needs {left} tokens at least, but the max length leaves room for {max(room, 0)}; raise it"
        else:
            yield "every sequence of the trie that there is room for has a token that is banned or not allowed"


def problems_with_model(options: OptionFields, vocab: int, end: int) -> list[str]:
    problems = []
    if unknown := unknown_tokens(options, vocab):
        problems.append(f"token {', '.join(map(str, unknown))} asked for, but the vocabulary has 0 to {vocab - 1}")
    if end in options.prefix:
        problems.append(f"the prefix has the end token {end}, expected it nowhere in a prefix")
    if any(end in phrase for phrase in options.phrases):
        problems.append(f"a phrase has the end token {end}, expected it nowhere in a phrase")
    if options.trie is not None and (options.trie.tokens == end).any():
        problems.append(f"the trie has the end token {end}, expected sequences without it")
    last = options.forced_eos
    if last not in (None, end):
        if last in options.always_banned:
            problems.append(f"forced eos is {last}, which is banned")
        barred = [what for what, tokens in lists_of(options).items() if last not in tokens]
        problems += [f"forced eos is {last}, which is not {what}" for what in barred]
    return problems


def problems_with_prefix(options: OptionFields, prefix: Sequence[int], vocab: int, end: int) -> list[str]:
    """Problems of one source's own prefix; an empty one means the options' prefix."""
    start = tuple(prefix)
    if not start:
        return []
    problems = []
    if unknown := sorted({token for token in start if not 0 <= token < vocab}):
        problems.append(f"prefix has token {unknown[0]}, but the vocabulary has 0 to {vocab - 1}")
    if end in start:
        problems.append(f"the prefix has the end token {end}, expected it nowhere in a prefix")
    if options.forced_bos not in (None, start[0]):
        problems.append(f"prefix begins with {start[0]}, but forced bos is {options.forced_bos}")
    return [*problems, *problems_of_start(options, start, "prefix")]


def unknown_tokens(options: OptionFields, vocab: int) -> list[int]:
    """Token ids asked for that a vocabulary of this size does not have."""
    named = [token for token in (options.start, options.forced_bos, options.forced_eos) if token is not None]
    named += [token for sequence in (*options.banned, *options.phrases) for token in sequence]
    named += [
        *options.prompt,
        *options.prefix,
        *options.first_banned,
        *(options.allowed or ()),
        *(options.shortlist or ()),
    ]
    if options.trie is not None:
        known = options.trie.tokens
        named += np.unique(known[known >= vocab]).tolist()
    return sorted({token for token in named if not 0 <= token < vocab})


def room_of(options: OptionFields) -> int:
    """Tokens that an output may have before a forced last one."""
    return options.max_length - (options.forced_eos is not None)


def offset_of(options: OptionFields) -> int:
    """Tokens before the trie begins."""
    return 0 if options.forced_bos is None else 1


def barred_of(options: OptionFields) -> frozenset[int]:
    """Tokens of the trie that are never allowed."""
    assert options.trie is not None
    known = frozenset(np.unique(options.trie.tokens).tolist())
    return options.always_banned.union(*(known - listed for listed in lists_of(options).values()))


def lists_of(options: OptionFields) -> dict[str, frozenset[int]]:
    """Options that list the only tokens allowed besides the end token."""
    lists = {"allowed": options.allowed, "in the shortlist": options.shortlist}
    return {what: frozenset(tokens) for what, tokens in lists.items() if tokens is not None}
