"""The flags of the search options: one for every field of SearchOptions, by the same name."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.errors import RequestError

if TYPE_CHECKING:
    from seq2engine.runtime.search.constraints.trie import Trie
    from seq2engine.runtime.search.options import SearchOptions
    from seq2engine.runtime.translator import Translator

OWN = "(default: the model's own, else {})"  # of generation.json in the bundle

UNKNOWN = frozenset(("<unk>", "[UNK]"))  # what tokenizers call the unknown token
SHOWN = 5  # texts that an error lists


def add_output_flags(sub: argparse.ArgumentParser, alignments: str) -> None:
    """What is printed after each output; `alignments` says what those are of."""
    scores = "print each output's score and its tokens' log-probabilities after it"
    sub.add_argument("--scores", action="store_true", help=scores)
    sub.add_argument("--alignments", action="store_true", default=None, help=f"print {alignments}")


def add_search_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--beam", type=int, help=f"beams; 1 is greedy {OWN.format(1)}")
    sub.add_argument(
        "--beam-style",
        metavar="NAME",
        help=f"beam search as in this library: huggingface, ctranslate2 {OWN.format('huggingface')}",
    )
    sub.add_argument(
        "--patience",
        type=float,
        help=f"stop at this many times --beam finished hypotheses, as in CTranslate2 {OWN.format(1.0)}",
    )
    sub.add_argument("--length-penalty", type=float, help=f"length penalty {OWN.format(1.0)}")
    sub.add_argument(
        "--coverage-penalty",
        type=float,
        metavar="BETA",
        help=f"coverage penalty (Wu et al. 2016) {OWN.format(0.0)}",
    )
    sub.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        help=f"when beam search stops, as in Hugging Face {OWN.format('false')}",
    )
    sub.add_argument("--nbest", type=int, help=f"hypotheses per line, one line each {OWN.format(1)}")
    sub.add_argument("--max-length", type=int, help=f"maximum output tokens {OWN.format('all it can')}")
    sub.add_argument("--min-length", type=int, help=f"minimum output tokens {OWN.format(0)}")
    sub.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="do not stop at the end token: every output has --max-length tokens, for timing",
    )
    add_rules(sub)
    add_alternatives(sub)
    add_sampling(sub)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Constrained decoding. Tokens are given as ids, as `run --json` shows them; whole texts are like the lines."""
    rules = parser.add_argument_group("constrained decoding (IDS: token ids such as 17, 17,4,250 or '17 4 250')")
    rules.add_argument("--prefix", metavar="TEXT", help="every output begins with this (ids, where the lines are ids)")
    rules.add_argument(
        "--prefixes", type=Path, metavar="FILE", help="the beginning of each line's output, line by line"
    )
    rules.add_argument(
        "--phrases",
        action="append",
        metavar="TEXT",
        help="every output contains this (ids, where the lines are ids); may be repeated",
    )
    rules.add_argument(
        "--trie",
        type=Path,
        metavar="FILE",
        help="every output is a line of this file (of ids, where the lines are ids)",
    )
    rules.add_argument(
        "--banned",
        type=token_ids,
        action="append",
        metavar="IDS",
        help="never output this token, or this sequence; may be repeated, adds to the model's own",
    )
    for flag, text in (
        ("--first-banned", "tokens that are not allowed first"),
        ("--allowed", "output only these tokens and the end token"),
        ("--shortlist", "compute logits of these tokens and the end token only: faster"),
    ):
        rules.add_argument(flag, type=token_ids, action="extend", metavar="IDS", help=f"{text}; may be repeated")
    rules.add_argument("--forced-bos", type=int, metavar="ID", help=f"first token {OWN.format('any')}")
    rules.add_argument("--forced-eos", type=int, metavar="ID", help=f"last token at the maximum {OWN.format('any')}")
    rules.add_argument("--start", type=int, metavar="ID", help="first token of the decoder's input (default: its own)")
    never = OWN.format("0, which allows it")
    rules.add_argument("--no-repeat-ngram", type=int, metavar="N", help=f"no n-gram of N tokens twice {never}")
    rules.add_argument(
        "--source-no-repeat-ngram", type=int, metavar="N", help=f"no n-gram of N tokens of the source {never}"
    )
    rules.add_argument(
        "--repetition-penalty", type=float, help=f"penalty on tokens already in the output {OWN.format(1.0)}"
    )


def add_alternatives(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("alternatives")
    group.add_argument(
        "--alternatives",
        action="store_true",
        default=None,
        help="one output for each of the --nbest likeliest tokens after the prefix",
    )
    group.add_argument(
        "--min-alternative-expansion-prob",
        type=float,
        metavar="P",
        help="leave out tokens less likely than P (default: 0)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--sample", action="store_true", default=None, help="sample tokens; --nbest is the number of samples"
    )
    sampling.add_argument("--temperature", type=float, help="sampling temperature (default: 1)")
    sampling.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens (default: all)")
    sampling.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the smallest set of tokens with total probability P (default: 1)",
    )
    sampling.add_argument("--seed", type=int, help="random seed (default: different every time)")


def token_ids(text: str) -> tuple[int, ...]:
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}, expected token ids such as 17, 17,4,250 or '17 4 250'")
    return tuple(map(int, words))


def set_of(ids: list[int] | None) -> tuple[int, ...] | None:
    """The ids of all uses of a flag; None if it was not given."""
    return None if ids is None else tuple(ids)


@dataclass
class ForcedTexts:
    """Texts that outputs must begin with or contain, as token ids. Texts that cannot be used become `problems`, so that
    all are reported at once.
    """

    model: Translator
    problems: list[str] = field(default_factory=list)

    def ids(self, text: str, flag: str) -> tuple[int, ...]:
        """Ids are used unchanged; text is encoded without its end token, because the output continues."""
        try:
            ids = self.model.tokenizer.encode_target(text)
        except RequestError as error:
            self.problems.append(f"{flag} {text[:40]!r}: {error}")
            return ()
        if self.model.takes_text:
            while ids and ids[-1] == self.model.session.config.end_id:
                ids.pop()
        if not UNKNOWN.isdisjoint(self.model.tokenizer.target_tokens(ids)):
            self.problems.append(
                f"{flag} {text[:40]!r} has something the model has no token for, expected text it can output"
            )
        return tuple(ids)

    def prefix(self, text: str, flag: str, forced_bos: int | None) -> tuple[int, ...]:
        """Text comes after the forced first token of every output."""
        first = () if forced_bos is None or not self.model.takes_text else (forced_bos,)
        return (*first, *self.ids(text, flag))

    def shown_problems(self) -> list[str]:
        """The first few problems; a file may have one per line."""
        more = len(self.problems) - SHOWN
        return self.problems if more <= 0 else [*self.problems[:SHOWN], f"and {more} more texts like that"]


def options_from_args(args: argparse.Namespace, model: Translator) -> SearchOptions:
    from seq2engine.runtime.model_options import first_token, options_from_session
    from seq2engine.runtime.requests import problems_with_limits

    session = model.session
    own = session.defaults.values
    begin = first_token(session, model.tokenizer, args.target_language) if args.forced_bos is None else args.forced_bos
    texts = ForcedTexts(model)
    prefix = None if args.prefix is None else texts.prefix(args.prefix, "--prefix", begin)
    phrases = None if args.phrases is None else tuple(texts.ids(text, "--phrases") for text in args.phrases)
    trie = trie_from_args(args, texts)
    return options_from_session(
        session,
        lambda options: [*texts.shown_problems(), *problems_with_limits(session.limits, session.config, options)],
        prefix=prefix,
        phrases=phrases,
        trie=trie,
        beam=args.beam,
        beam_style=args.beam_style,
        patience=args.patience,
        length_penalty=args.length_penalty,
        coverage_penalty=args.coverage_penalty,
        early_stopping={"true": True, "false": False}.get(args.early_stopping, args.early_stopping),
        nbest=args.nbest,
        max_length=args.max_length,
        min_length=args.min_length,
        start=args.start,
        forced_bos=begin,
        forced_eos=args.forced_eos,
        banned=None if args.banned is None else (*map(tuple, own.get("banned", ())), *args.banned),
        first_banned=set_of(args.first_banned),
        allowed=set_of(args.allowed),
        shortlist=set_of(args.shortlist),
        alternatives=args.alternatives,
        min_alternative_expansion_prob=args.min_alternative_expansion_prob,
        alignments=args.alignments,
        scores=args.scores or args.json,
        ignore_eos=args.ignore_eos,
        no_repeat_ngram=args.no_repeat_ngram,
        source_no_repeat_ngram=args.source_no_repeat_ngram,
        repetition_penalty=args.repetition_penalty,
        sample=args.sample,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )


def prefixes_from_args(
    args: argparse.Namespace, model: Translator, forced_bos: int | None
) -> list[tuple[int, ...]] | None:
    """One for every line of the input; an empty line is none."""
    if args.prefixes is None:
        return None
    texts = ForcedTexts(model)
    lines = lines_of_file(args.prefixes)
    found = [texts.prefix(line, "--prefixes", forced_bos) if line.strip() else () for line in lines]
    if texts.problems:
        raise RequestError("; ".join(texts.shown_problems()))
    return found


def trie_from_args(args: argparse.Namespace, texts: ForcedTexts) -> Trie | None:
    from seq2engine.runtime.search.constraints.trie import trie_from_sequences

    if args.trie is None:
        return None
    return trie_from_sequences(texts.ids(line, "--trie") for line in lines_of_file(args.trie) if line.strip())


def lines_of_file(path: Path) -> list[str]:
    """All lines of a file of text, without their ends."""
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8, expected lines of text") from error
