"""Alternatives at a position are CTranslate2's, one by one and in batches; and what they are without it.

CTranslate2 cannot be asked where none is likely enough: it divides by their number.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support.ctranslate2_models import END, MODELS, PAD, PENALTIES, TOKENS, pair
from support.fast_cases import rest_slow
from support.rounding import rounding_from_session
from support.scripted_step import SEEDED, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.alternatives import alternatives_search
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Special, Start
from seq2engine.runtime.text.continuous_batching import translate_many

PROOF = int(os.environ.get("SEQ2ENGINE_PROOF", "120"))  # sources to compare
BATCH = 4
SPECIAL = Special(start=0, end=1)


def sampled(name: str, case: int) -> tuple[list[list[int]], list[list[int]], SearchOptions]:
    random = np.random.default_rng([list(MODELS).index(name), case, 7])
    length = int(random.integers(5, 13))
    options = SearchOptions(
        start=END,
        max_length=length,
        min_length=int(random.choice([0, 0, min(6, length)])),
        beam=int(random.choice([1, 1, 2, 4])),
        nbest=int(random.integers(1, 6)),
        length_penalty=float(random.choice(PENALTIES)),
        alternatives=True,
        min_alternative_expansion_prob=float(random.choice([0.0, 0.02, 0.1])),
        beam_style="ctranslate2",
        banned=((PAD,), (int(random.integers(1, PAD)),)),
    )
    sources = [random.integers(1, PAD, random.integers(1, 13)).tolist() for _ in range(BATCH)]
    words = [token for token in range(1, PAD) if (token,) not in options.banned]
    return sources, [random.choice(words, random.integers(0, 5)).tolist() for _ in range(BATCH)], options


def their_answer(
    name: str, sources: list[list[int]], prefixes: list[list[int]], options: SearchOptions
) -> list[list[tuple[tuple[int, ...], float]]]:
    answers = pair(name, zero_start=False).theirs.translate_batch(
        [[TOKENS[token] for token in source] for source in sources],
        target_prefix=[[TOKENS[token] for token in prefix] for prefix in prefixes],
        beam_size=options.beam,
        num_hypotheses=options.nbest,
        length_penalty=options.length_penalty,
        max_decoding_length=options.max_length,
        min_decoding_length=max(options.min_length - 1, 0),
        suppress_sequences=[[TOKENS[token] for token in words] for words in options.banned if words != (PAD,)],
        return_alternatives=True,
        min_alternative_expansion_prob=options.min_alternative_expansion_prob,
        return_scores=True,
        return_end_token=True,
    )
    return [
        [(tuple(map(TOKENS.index, output)), score) for output, score in zip(one.hypotheses, one.scores, strict=True)]
        for one in answers
    ]


@pytest.mark.parametrize("name", rest_slow(MODELS, list(MODELS)[::3]))
def test_tokens_and_scores_are_ctranslate2_s(name: str) -> None:
    seen = 0
    for case in range(max(PROOF // BATCH // len(MODELS), 1)):
        sources, prefixes, options = sampled(name, case)
        session = pair(name, zero_start=False).ours
        ours = generate(session, sources, options, prefixes=prefixes)
        fed = dict(translate_many(session, sources, options, batch=2, prefixes=prefixes))
        for row in range(BATCH):
            assert [found.tokens for found in fed[row]] == [found.tokens for found in ours[row]]
        likely = [row for row in range(BATCH) if ours[row]]
        if not likely:
            continue
        theirs = their_answer(name, [sources[i] for i in likely], [prefixes[i] for i in likely], options)
        near = rounding_from_session(session, sources, options.max_length)
        for row, their_nbest in zip(likely, theirs, strict=True):
            assert [found.tokens for found in ours[row]] == [output for output, _ in their_nbest], (
                case,
                row,
                options,
            )
            assert [score for _, score in their_nbest] == near.scores(ours[row], options), (case, row, options)
            seen += len(their_nbest)
    assert seen >= 4


def test_the_likeliest_tokens_each_begin_one_output_by_hand() -> None:
    script = from_table(
        {
            (2,): [0, 0.5, 0.1, 0.25, 0.15],
            (2, 3): [0, 0.4, 0.6, 0, 0],
            (2, 4): [0, 0.9, 0.1, 0, 0],
            (2, 2): [0, 1, 0, 0, 0],
        },
        otherwise=[0, 1, 0, 0, 0],
    )
    options = SearchOptions(max_length=5, nbest=3, alternatives=True, prefix=(2,))
    (found,), _ = run(alternatives_search(ScriptedStep([script]), 1, SPECIAL, options, [[7]]))
    assert [one.tokens for one in found] == [(2, 3, 2, 1), (2, 4, 1), (2, 2, 1)]
    assert found[0].log_probs[1:] == by_hand(np.log([0.25, 0.6, 1.0]))
    options = SearchOptions(
        max_length=5, nbest=9, alternatives=True, prefix=(2,), min_alternative_expansion_prob=0.12, beam=2
    )
    (found,), _ = run(alternatives_search(ScriptedStep([script]), 1, SPECIAL, options, [[7]]))
    assert [one.tokens[:2] for one in found] == [(2, 3), (2, 4)]
    assert found[1].score == by_hand(np.log(0.15) + np.log(0.9), 2)  # the end token alone follows


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("prefix", [(), (2,), (2, 3)])
def test_what_is_not_likely_enough_has_no_hypothesis(beam: int, prefix: tuple[int, ...]) -> None:
    scripts = [from_table({}, otherwise=[0, 0.2, 0.1, 0.4, 0.3]), from_table({}, otherwise=[0, 0.1, 0.8, 0.05, 0.05])]
    options = SearchOptions(
        max_length=4, beam=beam, nbest=6, alternatives=True, prefix=prefix, min_alternative_expansion_prob=0.5
    )
    found, _ = run(alternatives_search(ScriptedStep(scripts), 2, SPECIAL, options, [[5], [6]]))
    assert found[0] == []
    assert [one.tokens[: len(prefix) + 1] for one in found[1]] == [(*prefix, 2)]


@pytest.mark.parametrize("options", [{}, {"beam": 3, "length_penalty": 0.0}])
def test_an_alternative_goes_on_like_a_prefix(options: dict[str, Any]) -> None:
    """Some sources end early and leave; each alternative outputs what it would as the prefix of a search of its own."""
    scripts = [from_seed(seed, vocab=7) for seed in range(9)]
    starts = [Start((3,) * (seed % 3)) for seed in range(9)]
    texts = [[seed] for seed in range(9)]
    asked = SearchOptions(max_length=12, nbest=4, alternatives=True, **options)
    found, emitted = run(alternatives_search(ScriptedStep(scripts), 9, SPECIAL, asked, texts, starts))
    assert len(emitted[-1].sources) < 9
    search = beam_search if options else greedy_search
    for script, start, hypotheses in zip(scripts, starts, found, strict=True):
        before = len(start.prefix)
        logits = script(start.prefix)
        order = [token for token in np.argsort(-logits) if token != SPECIAL.end][:4]
        assert [one.tokens[before] for one in hypotheses] == order
        for one in hypotheses:
            plain = SearchOptions(max_length=12, prefix=one.tokens[: before + 1], **options)
            ((alone, *_),), _ = run(search(ScriptedStep([script]), 1, SPECIAL, plain))
            assert one.tokens == alone.tokens
            assert one.log_probs == by_hand(alone.log_probs, **SEEDED)
