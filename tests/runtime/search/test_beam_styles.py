"""What differs between the beam searches of Hugging Face and CTranslate2, each rule on a script solved by hand.

test_beam_huggingface.py and test_beam_ctranslate2.py compare both with the libraries themselves.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.scripted_step import Prefix, Script, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import ConfigError
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.beam_styles import STYLES
from seq2engine.runtime.search.option_checks import BEAM_STYLES
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


def test_every_name_has_a_style() -> None:
    assert tuple(STYLES) == BEAM_STYLES


# [END] ends with log(.4) = -.92, then [A END] with log(.3)/2 = -.60, and [A B] runs at log(.18)/2 = -.86. Two have
# ended: CTranslate2 is done. Hugging Face sees that [A B] is better than [END], and goes on to [A B END]
# log(.18)/3 = -.57.
ONE_MORE = from_table(
    {(): [0, 0.4, 0.6, 0], (A,): [0, 0.5, 0.2, 0.3], (A, B): [0, 1, 0, 0]}, otherwise=[0, 0, 0.5, 0.5]
)


@pytest.mark.parametrize(
    ("beam_style", "tokens", "score", "steps"),
    [
        ("huggingface", (A, B, END), math.log(0.18) / 3, 3),
        ("ctranslate2", (A, END), math.log(0.3) / 2, 2),
    ],
)
def test_only_hugging_face_checks_running_beams(beam_style: str, tokens: Prefix, score: float, steps: int) -> None:
    check(ONE_MORE, [(tokens, score)], steps, beam=2, beam_style=beam_style)


# Step 1: END .4, A .35, B .25, so [END] log(.4) = -.92 ends. Step 2: [A END] .315 and [B END] .2 are the first two
# candidates. With penalty 1 they are worth -.58 and -.80.
# Hugging Face keeps the best two of the three, CTranslate2 keeps them all and returns the best two: a later hypothesis
# replaces a worse one.
LATE = from_table(
    {(): [0, 0.4, 0.35, 0.25], (A,): [0, 0.9, 0.1, 0], (B,): [0, 0.8, 0, 0.2]}, otherwise=[0, 0.1, 0.5, 0.4]
)


@pytest.mark.parametrize("beam_style", BEAM_STYLES)
def test_a_later_hypothesis_replaces_a_worse_one(beam_style: str) -> None:
    expected = [((A, END), math.log(0.315) / 2), ((B, END), math.log(0.2) / 2)]
    check(LATE, expected, 2, beam=2, beam_style=beam_style, early_stopping=True)


# A .8, B .1, END .1 at every step, three steps: A A A, cut at the maximum length, .8 ** 3.
@pytest.mark.parametrize("beam_style", BEAM_STYLES)
def test_the_maximum_length_cuts(beam_style: str) -> None:
    script = from_table({}, otherwise=[0, 0.1, 0.8, 0.1])
    check(script, [((A, A, A), math.log(0.8**3) / 3)], 3, beam=1, max_length=3, beam_style=beam_style)


# [END] log(.4) = -.92 ends at step 1, and step 2 is the last: [A A] log(.42)/2 = -.43, [A B] log(.18)/2 = -.86. The
# best two of three count.
@pytest.mark.parametrize("beam_style", BEAM_STYLES)
def test_at_the_maximum_length_the_best_count_whether_they_end_or_are_cut(beam_style: str) -> None:
    script = from_table({(): [0, 0.4, 0.6, 0], (A,): [0, 0, 0.7, 0.3]}, otherwise=[0, 1, 0, 0])
    expected = [((A, A), math.log(0.42) / 2), ((A, B), math.log(0.18) / 2)]
    check(script, expected, 2, beam=2, max_length=2, beam_style=beam_style)


# END .5, A .3, B .2 at every step, two beams. Hypotheses that have ended after step 1: [END]; after step 2 also [A END]
# .15 and [B END] .1, three; after step 3 also [A A END] .045 and one of .03, five.
@pytest.mark.parametrize(("patience", "steps"), [(0.5, 1), (1.0, 2), (1.5, 2), (2.0, 3), (2.5, 3)])
def test_patience_is_how_many_must_end(patience: float, steps: int) -> None:
    script = from_table({}, otherwise=[0, 0.5, 0.3, 0.2])
    options: dict[str, Any] = {"beam": 2, "beam_style": "ctranslate2", "patience": patience}
    assert decode(script, **options)[1] == steps
    assert decode(script, **{**options, "beam": 1})[1] == 1  # one beam has none


# A .6, END .4: [END] ends, but as second candidate. [A A] .306 and [A B] .294 run on. Step 3: [A B B] .294 is the best
# candidate, [A A END] .2754 the second, which ends. Step 4: [A B B END] .294 is the best, and ends: done, with three.
STUBBORN = from_table(
    {(): [0, 0.4, 0.6, 0], (A,): [0, 0, 0.51, 0.49], (A, A): [0, 0.9, 0.1, 0], (A, B): [0, 0, 0, 1]},
    otherwise=[0, 1, 0, 0],
)


def test_without_a_penalty_ctranslate2_waits_for_the_best_candidate_to_end() -> None:
    options: dict[str, Any] = {"beam": 2, "length_penalty": 0.0, "beam_style": "ctranslate2"}
    check(STUBBORN, [((END,), math.log(0.4))], 4, **options)
    at_once = from_table({(): [0, 0.6, 0.4, 0]}, otherwise=[0, 0.1, 0.5, 0.4])
    check(at_once, [((END,), math.log(0.6))], 1, **options)  # not even two need to have ended
    # Two are asked for: [A A] .2 and [A B] .16 run on; at step 3 [A A END] .02 is not among the first two.
    assert decode(at_once, nbest=2, max_length=9, **options)[1] > 1


@pytest.mark.parametrize(("beam_style", "first"), [("huggingface", 0.3), ("ctranslate2", 0.6)])
def test_in_ctranslate2_rules_leave_a_distribution(beam_style: str, first: float) -> None:
    # At step 1 END .5 is forbidden; A .3 and B .2 are left, or .6 and .4 of what is left.
    script = from_table({(): [0, 0.5, 0.3, 0.2]}, otherwise=[0, 0.9, 0.1, 0])
    check(script, [((A, END), math.log(first * 0.9) / 2)], 2, beam=1, min_length=2, beam_style=beam_style)


@pytest.mark.parametrize("beam_style", BEAM_STYLES)
@pytest.mark.parametrize("beam", [1, 3])
def test_neighbours_have_no_influence(beam_style: str, beam: int) -> None:
    scripts = [from_seed(seed, vocab=12) for seed in range(9)]
    options: dict[str, Any] = {"beam": beam, "nbest": beam, "max_length": 8, "beam_style": beam_style}
    together, _ = decode(*scripts, **options)
    assert together == [decode(script, **options)[0][0] for script in scripts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_style": "moses"}, "beam style 'moses', expected one of huggingface, ctranslate2"),
        ({"patience": 2.0}, "patience 2.0, expected 1, or another with beam style ctranslate2"),
        (
            {"beam_style": "ctranslate2", "patience": 0.5, "beam": 4, "nbest": 3},
            "patience 0.5, expected at least nbest 3 / beam 4",
        ),
        ({"beam_style": "ctranslate2", "patience": 0.0}, "patience 0.0, expected at least nbest 1 / beam 1"),
        ({"beam_style": "ctranslate2", "patience": math.nan}, "patience nan, expected at least nbest 1 / beam 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SearchOptions(**options)
    assert str(error.value) == f"search options: {message}"
