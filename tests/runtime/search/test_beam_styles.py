"""What sets the beam searches of four libraries apart, each rule on a script whose answer is worked out by hand.

The rules of fairseq are those of fairseq/sequence_generator.py and search.py, Marian's those of beam_search.cpp and
history.h in src/translator, CTranslate2's those of src/decoding.cc.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_step import SEEDED, Prefix, Script, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import ConfigError
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.beam_styles import PROFILES
from seq2engine.runtime.search.option_checks import SEMANTICS
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, Special

START, END, A, B = range(4)
SPECIAL = Special(START, END)


def decode(*scripts: Script, **options: Any) -> tuple[list[list[Hypothesis]], int]:
    """n-best of every source, and the steps it took."""
    step = ScriptedStep(scripts, START)
    hypotheses, emitted = run(beam_search(step, len(scripts), SPECIAL, SearchOptions(**options)))
    return hypotheses, len(emitted)


def check(script: Script, expected: list[tuple[Prefix, float]], steps: int, **options: Any) -> None:
    """`expected` are the n-best tokens and scores."""
    (found,), taken = decode(script, nbest=len(expected), **options)
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
    assert [hypothesis.score for hypothesis in found] == [by_hand(score, len(tokens)) for tokens, score in expected]
    assert taken == steps


def test_every_name_has_a_profile() -> None:
    assert tuple(PROFILES) == SEMANTICS


# [END] ends with log(.4) = -.92, then [A END] with log(.3)/2 = -.60, and [A B] runs at log(.18)/2 = -.86. Two have
# ended: fairseq, CTranslate2 and Marian are done. Hugging Face sees that [A B] is better than [END], and goes on to
# [A B END] log(.18)/3 = -.57.
ONE_MORE = from_table(
    {(): [0, 0.4, 0.6, 0], (A,): [0, 0.5, 0.2, 0.3], (A, B): [0, 1, 0, 0]}, otherwise=[0, 0, 0.5, 0.5]
)


@pytest.mark.parametrize(
    ("semantics", "tokens", "score", "steps"),
    [
        ("huggingface", (A, B, END), math.log(0.18) / 3, 3),
        ("fairseq", (A, END), math.log(0.3) / 2, 2),
        ("ctranslate2", (A, END), math.log(0.3) / 2, 2),
        ("marian", (A, END), math.log(0.3) / 2, 2),
    ],
)
def test_only_hugging_face_looks_at_what_still_runs(semantics: str, tokens: Prefix, score: float, steps: int) -> None:
    check(ONE_MORE, [(tokens, score)], steps, beam=2, semantics=semantics)


# Step 1: END .4, A .35, B .25, so [END] log(.4) = -.92 ends. Step 2: [A END] .315 and [B END] .2 are the first two
# candidates. With penalty 1 they are worth -.58 and -.80.
# fairseq has room for one more, which is [A END]; [B END] comes too late, though it is better than [END].
# Marian has one beam left, A, and one candidate, [A END].
# Hugging Face keeps the best two of the three, CTranslate2 keeps them all and returns the best two.
LATE = from_table(
    {(): [0, 0.4, 0.35, 0.25], (A,): [0, 0.9, 0.1, 0], (B,): [0, 0.8, 0, 0.2]}, otherwise=[0, 0.1, 0.5, 0.4]
)


@pytest.mark.parametrize(
    ("semantics", "second"),
    [
        ("huggingface", ((B, END), math.log(0.2) / 2)),
        ("fairseq", ((END,), math.log(0.4))),
        ("ctranslate2", ((B, END), math.log(0.2) / 2)),
        ("marian", ((END,), math.log(0.4))),
    ],
)
def test_who_comes_too_late(semantics: str, second: tuple[Prefix, float]) -> None:
    check(LATE, [((A, END), math.log(0.315) / 2), second], 2, beam=2, semantics=semantics, early_stopping=True)


# Step 1: END .4, A .35, B .25, and [END] ends. fairseq and the others run on with A and B, and [B END] .225 is the
# best candidate of step 2: worth log(.225)/2 = -.75, it is second and last. Marian runs on with A alone: [A A] .21,
# then [A A END] log(.21)/3 = -.52.
SHRINKING = from_table(
    {(): [0, 0.4, 0.35, 0.25], (A,): [0, 0, 0.6, 0.4], (B,): [0, 0.9, 0, 0.1]}, otherwise=[0, 1, 0, 0]
)


@pytest.mark.parametrize(
    ("semantics", "tokens", "score", "steps"),
    [
        ("fairseq", (B, END), math.log(0.225) / 2, 2),
        ("ctranslate2", (B, END), math.log(0.225) / 2, 2),
        ("marian", (A, A, END), math.log(0.21) / 3, 3),
    ],
)
def test_in_marian_an_ended_hypothesis_takes_its_beam_along(
    semantics: str, tokens: Prefix, score: float, steps: int
) -> None:
    check(SHRINKING, [(tokens, score)], steps, beam=2, semantics=semantics)


# A .8, B .1, END .1 at every step, three steps. The three that cut say A A A, .8 ** 3; fairseq must end, at its price.
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_fairseq_ends_at_the_maximum_length_and_the_others_cut(semantics: str) -> None:
    script = from_table({}, otherwise=[0, 0.1, 0.8, 0.1])
    cut = ((A, A, A), math.log(0.8**3) / 3)
    forced = ((A, A, END), math.log(0.8**2 * 0.1) / 3)
    check(script, [forced if semantics == "fairseq" else cut], 3, beam=1, max_length=3, semantics=semantics)


# [END] log(.4) = -.92 ends at step 1, and step 2 is the last: [A A] log(.42)/2 = -.43, [A B] log(.18)/2 = -.86. Marian
# has one beam left and so one candidate; the other two see both, and the best two of three count.
@pytest.mark.parametrize(
    ("semantics", "second"),
    [
        ("huggingface", ((A, B), math.log(0.18) / 2)),
        ("ctranslate2", ((A, B), math.log(0.18) / 2)),
        ("marian", ((END,), math.log(0.4))),
    ],
)
def test_at_the_maximum_length_marian_cuts_the_beams_it_has_left(semantics: str, second: tuple[Prefix, float]) -> None:
    script = from_table({(): [0, 0.4, 0.6, 0], (A,): [0, 0, 0.7, 0.3]}, otherwise=[0, 1, 0, 0])
    check(script, [((A, A), math.log(0.42) / 2), second], 2, beam=2, max_length=2, semantics=semantics)


# END .5, A .3, B .2 at every step, two beams. Hypotheses that have ended after step 1: [END]; after step 2 also [A END]
# .15 and [B END] .1, three; after step 3 also [A A END] .045 and one of .03, five.
@pytest.mark.parametrize(("patience", "steps"), [(0.5, 1), (1.0, 2), (1.5, 2), (2.0, 3), (2.5, 3)])
def test_patience_is_how_many_must_end(patience: float, steps: int) -> None:
    script = from_table({}, otherwise=[0, 0.5, 0.3, 0.2])
    options: dict[str, Any] = {"beam": 2, "semantics": "ctranslate2", "patience": patience}
    assert decode(script, **options)[1] == steps
    assert decode(script, **{**options, "beam": 1})[1] == 1  # one beam has none


# A .6, END .4: [END] ends, but as second candidate. [A A] .306 and [A B] .294 run on. Step 3: [A B B] .294 is the best
# candidate, [A A END] .2754 the second, which ends. Step 4: [A B B END] .294 is the best, and ends: done, with three.
STUBBORN = from_table(
    {(): [0, 0.4, 0.6, 0], (A,): [0, 0, 0.51, 0.49], (A, A): [0, 0.9, 0.1, 0], (A, B): [0, 0, 0, 1]},
    otherwise=[0, 1, 0, 0],
)


def test_without_a_penalty_ctranslate2_waits_for_the_best_candidate_to_end() -> None:
    options: dict[str, Any] = {"beam": 2, "length_penalty": 0.0, "semantics": "ctranslate2"}
    check(STUBBORN, [((END,), math.log(0.4))], 4, **options)
    at_once = from_table({(): [0, 0.6, 0.4, 0]}, otherwise=[0, 0.1, 0.5, 0.4])
    check(at_once, [((END,), math.log(0.6))], 1, **options)  # not even two need to have ended
    # Two are asked for: [A A] .2 and [A B] .16 run on; at step 3 [A A END] .02 is not among the first two.
    assert decode(at_once, nbest=2, max_length=9, **options)[1] > 1


@pytest.mark.parametrize(
    ("semantics", "first"), [("huggingface", 0.3), ("fairseq", 0.3), ("marian", 0.3), ("ctranslate2", 0.6)]
)
def test_in_ctranslate2_rules_leave_a_distribution(semantics: str, first: float) -> None:
    # At step 1 END .5 is forbidden; A .3 and B .2 are left, or .6 and .4 of what is left.
    script = from_table({(): [0, 0.5, 0.3, 0.2]}, otherwise=[0, 0.9, 0.1, 0])
    check(script, [((A, END), math.log(first * 0.9) / 2)], 2, beam=1, min_length=2, semantics=semantics)


def fairseq_by_hand(script: Script, options: SearchOptions) -> list[tuple[Prefix, float]]:
    """SequenceGenerator for one source, one candidate at a time."""
    beams: list[tuple[Prefix, float]] = [((), 0.0)]
    finalized: list[tuple[Prefix, float]] = []
    for length in range(1, options.max_length + 1):
        candidates = extended(script, beams)
        if length == options.max_length:
            candidates = [candidate for candidate in candidates if candidate[0][-1] == END]
        candidates = candidates[: 2 * options.beam]
        for tokens, score in candidates[: options.beam]:
            if tokens[-1] == END and len(finalized) < options.beam:
                finalized.append((tokens, score / length**options.length_penalty))
        if len(finalized) == options.beam:
            break
        beams = [candidate for candidate in candidates if candidate[0][-1] != END][: options.beam]
    return sorted(finalized, key=lambda hypothesis: -hypothesis[1])


def marian_by_hand(script: Script, options: SearchOptions) -> list[tuple[Prefix, float]]:
    """Marian's BeamSearch and History for one source: the beam is as wide as what is left of it."""
    beams: list[tuple[Prefix, float]] = [((), 0.0)]
    width = options.beam
    history: list[tuple[Prefix, float]] = []
    for length in range(1, options.max_length + 1):
        candidates = extended(script, beams)[:width]
        last = length == options.max_length
        history += [(t, score / length**options.length_penalty) for t, score in candidates if t[-1] == END or last]
        beams = [candidate for candidate in candidates if candidate[0][-1] != END]
        width = len(beams)
        if not beams:
            break
    return sorted(history, key=lambda hypothesis: -hypothesis[1])


def extended(script: Script, beams: list[tuple[Prefix, float]]) -> list[tuple[Prefix, float]]:
    """Every continuation of every beam, best first."""
    found = []
    for tokens, score in beams:
        logits = script(tokens).astype(np.float64)
        for token, logit in enumerate(logits - np.log(np.exp(logits).sum())):
            found.append(((*tokens, token), score + logit))
    return sorted(found, key=lambda candidate: -candidate[1])


@settings(max_examples=60, deadline=None)
@given(
    semantics=st.sampled_from(["fairseq", "marian"]),
    seed=st.integers(0, 10_000),
    vocab=st.integers(9, 20),
    beam=st.sampled_from([1, 2, 4, 8]),
    penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    max_length=st.integers(1, 7),
)
def test_fairseq_and_marian_are_what_they_do_one_candidate_at_a_time(
    semantics: str, seed: int, vocab: int, beam: int, penalty: float, max_length: int
) -> None:
    scripts = [from_seed(seed + place, vocab) for place in range(3)]
    options = SearchOptions(max_length=max_length, beam=beam, length_penalty=penalty, nbest=beam, semantics=semantics)
    worked_out = fairseq_by_hand if semantics == "fairseq" else marian_by_hand
    found, _ = run(beam_search(ScriptedStep(scripts, START), len(scripts), SPECIAL, options))
    for script, nbest in zip(scripts, found, strict=True):
        expected = worked_out(script, options)
        assert [hypothesis.tokens for hypothesis in nbest] == [tokens for tokens, _ in expected]
        assert [hypothesis.score for hypothesis in nbest] == [
            by_hand(score, len(tokens), **SEEDED) for tokens, score in expected
        ]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("beam", [1, 3])
def test_neighbours_have_no_say(semantics: str, beam: int) -> None:
    scripts = [from_seed(seed, vocab=12) for seed in range(9)]
    options: dict[str, Any] = {"beam": beam, "nbest": beam, "max_length": 8, "semantics": semantics}
    together, _ = decode(*scripts, **options)
    assert together == [decode(script, **options)[0][0] for script in scripts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"semantics": "moses"}, "semantics 'moses', expected one of huggingface, fairseq, ctranslate2, marian"),
        ({"patience": 2.0}, "patience 2.0, expected 1, unless semantics are ctranslate2"),
        (
            {"semantics": "ctranslate2", "patience": 0.5, "beam": 4, "nbest": 3},
            "patience 0.5, expected at least nbest 3 / beam 4",
        ),
        ({"semantics": "ctranslate2", "patience": 0.0}, "patience 0.0, expected at least nbest 1 / beam 1"),
        ({"semantics": "ctranslate2", "patience": math.nan}, "patience nan, expected at least nbest 1 / beam 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SearchOptions(**options)
    assert str(error.value) == f"search options: {message}"
