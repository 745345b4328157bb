"""Beam search in CTranslate2's style is CTranslate2's: same tokens, same scores, on the same random models.

Its rules are those of src/decoding.cc (v4.8). The more sources the surer: SEQ2ENGINE_PROOF=1500 pytest <this file>.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ctranslate2_models import END, MODELS, PAD, PENALTIES, TOKENS, pair
from support.rounding import rounding_from_session

from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis

PROOF = int(os.environ.get("SEQ2ENGINE_PROOF", "120"))  # sources to compare
BATCH = 5
BEAMS = (1, 2, 4, 8)


def their_answer(name: str, sources: list[list[int]], options: SearchOptions) -> list[list[Hypothesis]]:
    """The result of `translate_batch`, in our types. Its lengths do not count the end token, as ours do."""
    answers = pair(name).theirs.translate_batch(
        [[TOKENS[token] for token in source] for source in sources],
        beam_size=options.beam,
        num_hypotheses=options.nbest,
        length_penalty=options.length_penalty,
        coverage_penalty=options.coverage_penalty,
        max_batch_size=1 if options.coverage_penalty else 0,  # in a batch its attention includes padding
        patience=options.patience,
        max_decoding_length=options.max_length,
        min_decoding_length=max(options.min_length - 1, 0),
        no_repeat_ngram_size=options.no_repeat_ngram,
        repetition_penalty=options.repetition_penalty,
        suppress_sequences=[[TOKENS[token] for token in words] for words in options.banned if words != (PAD,)],
        return_scores=True,
        return_end_token=True,
    )
    return [
        [
            Hypothesis(tuple(TOKENS.index(token) for token in tokens), score)
            for tokens, score in zip(answer.hypotheses, answer.scores, strict=True)
        ]
        for answer in answers
    ]


def options_from_seed(random: np.random.Generator) -> SearchOptions:
    """Random options; every other one has rules besides."""
    beam = int(random.choice(BEAMS))
    patience = float(random.choice([0.5, 1.0, 1.0, 1.0, 2.0]))
    values: dict[str, Any] = {"min_length": int(random.choice([0, 2]))}
    banned: list[tuple[int, ...]] = [(PAD,)]
    if random.random() < 0.5:
        values["min_length"] = int(random.integers(0, 6))
        values["no_repeat_ngram"] = int(random.integers(0, 4))
        values["repetition_penalty"] = float(random.choice([1.0, 1.3]))
        banned += [(int(random.integers(1, PAD)),), tuple(random.integers(1, PAD, 2).tolist())]
    return SearchOptions(
        max_length=int(random.integers(6, 16)),
        beam=beam,
        length_penalty=float(random.choice(PENALTIES)),
        patience=patience,
        coverage_penalty=float(random.choice([0.0, 0.2, 1.0])) if beam > 1 else 0.0,
        nbest=int(random.integers(1, min(beam, max(1, int(beam * patience))) + 1)),
        banned=tuple(banned),
        beam_style="ctranslate2",
        **values,
    )


def sampled(name: str, case: int) -> tuple[list[list[int]], SearchOptions]:
    random = np.random.default_rng([list(MODELS).index(name), case])
    options = options_from_seed(random)
    return [random.integers(1, PAD, random.integers(1, 13)).tolist() for _ in range(BATCH)], options


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_scores_are_ctranslate2_s(name: str) -> None:
    """No excuse for ties: among 3,000 sources there was none."""
    for case in range(max(PROOF // BATCH // len(MODELS), 1)):
        sources, options = sampled(name, case)
        ours, theirs = generate(pair(name).ours, sources, options), their_answer(name, sources, options)
        near = rounding_from_session(pair(name).ours, sources, options.max_length, stretch=options.repetition_penalty)
        for source, our_nbest, their_nbest in zip(sources, ours, theirs, strict=True):
            outputs = [found.tokens for found in our_nbest], [found.tokens for found in their_nbest]
            assert outputs[0] == outputs[1], (case, source, options)
            penalty = options.length_penalty if options.beam > 1 else 0.0
            for our, their in zip(our_nbest, their_nbest, strict=True):
                limit = near.score(len(our.tokens), penalty) + options.coverage_penalty * len(source) * near.attention
                assert our.score == pytest.approx(their.score, rel=0, abs=limit), (case, source, options)


def test_the_cases_are_about_what_they_claim() -> None:
    """Some end early, some are cut, and with Hugging Face's style many outputs would differ."""
    early = cut = other = 0
    for name in MODELS:
        for case in range(3):
            sources, options = sampled(name, case)
            theirs = their_answer(name, sources, options)
            hugging_face = replace(options, beam_style="huggingface", patience=1.0)
            ours = generate(pair(name).ours, sources, hugging_face)
            for our_nbest, (best, *others) in zip(ours, theirs, strict=True):
                cut += best.tokens[-1] != END
                early += len(best.tokens) <= 2 and best.tokens[-1] == END
                other += [found.tokens for found in our_nbest] != [found.tokens for found in (best, *others)]
    assert min(early, cut, other) >= 10
