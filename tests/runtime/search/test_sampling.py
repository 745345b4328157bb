"""Sampling: what is drawn, how often, and that only the seed and the source decide it."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import FP64, apart, exp_sum_error
from support.scripted_step import Script, ScriptedStep, by_hand, from_seed, from_table, run
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.sampling import drawn, draws_for, probabilities, sampling_search
from seq2engine.runtime.search.step import Emitted, Hypothesis, Special

SPECIAL = Special(start=0, end=1)
SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)


def sampled(
    scripts: list[Script], texts: list[list[int]], **options: Any
) -> tuple[list[list[Hypothesis]], list[Emitted], ScriptedStep]:
    step = ScriptedStep(scripts)
    search = SearchOptions(sample=True, **{"max_length": 8, "seed": 1, **options})
    hypotheses, emitted = run(sampling_search(step, len(scripts), SPECIAL, search, texts))
    return hypotheses, emitted, step


def counts(table: list[float], samples: int = 1500, **options: Any) -> np.ndarray:
    """How often each token comes first in `count` samples of one source."""
    ((*found,),), _, _ = sampled([from_table({}, table)], [[3]], max_length=1, nbest=samples, **options)
    return np.bincount([best.tokens[0] for best in found], minlength=len(table))


def assert_drawn_like(found: np.ndarray, expected: list[float]) -> None:
    """No count is five deviations away from what it should be; what is impossible never comes."""
    shares = np.array(expected) / sum(expected)
    deviations = np.sqrt(found.sum() * shares * (1 - shares))
    assert (np.abs(found - found.sum() * shares) <= 5 * deviations).all(), found


def test_tokens_come_as_often_as_they_are_likely() -> None:
    assert_drawn_like(counts([0.0, 0.1, 0.2, 0.3, 0.4]), [0.0, 0.1, 0.2, 0.3, 0.4])


def test_temperature() -> None:
    table = [0.1, 0.2, 0.3, 0.4]
    assert_drawn_like(counts(table, temperature=0.5), [p**2 for p in table])
    assert_drawn_like(counts(table, temperature=2.0), [p**0.5 for p in table])


def test_top_k_and_top_p() -> None:
    table = [0.1, 0.2, 0.3, 0.4]
    assert_drawn_like(counts(table, top_k=2), [0, 0, 0.3, 0.4])
    assert_drawn_like(counts(table, top_p=0.6), [0, 0, 0.3, 0.4])
    assert_drawn_like(counts(table, top_p=0.75), [0, 0.2, 0.3, 0.4])
    assert_drawn_like(counts(table, top_k=3, top_p=0.5), [0, 0, 0.3, 0.4])  # of what is left 0.4 of 0.9 is too little
    assert_drawn_like(counts(table, top_p=1e-9), [0, 0, 0, 1])


def test_later_tokens_depend_on_those_before() -> None:
    script = from_table({(): [0, 0, 0.5, 0.5], (2,): [0, 1, 0, 0], (3,): [0, 0.5, 0.5, 0]}, [0, 1, 0, 0])
    ((*found,),), _, _ = sampled([script], [[3]], nbest=1500)
    kinds = [(2, 1), (3, 1), (3, 2, 1)]
    assert {best.tokens for best in found} == set(kinds)
    assert_drawn_like(np.array([sum(best.tokens == kind for best in found) for kind in kinds]), [0.5, 0.25, 0.25])
    scores = {best.tokens: best.score for best in found}
    assert [scores[kind] for kind in kinds] == by_hand([math.log(0.5), math.log(0.25), math.log(0.25)], 3)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
)
def test_what_is_cut_off_is_what_the_library_cuts_off(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(2, 3, 10)).astype(np.float32)
    scores = torch.from_numpy(logits.reshape(6, 10)).double()
    nothing = torch.zeros(6, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(nothing, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(nothing, scores)
    scores = TopPLogitsWarper(top_p)(nothing, scores)
    ours = probabilities(logits, SearchOptions(sample=True, temperature=temperature, top_k=top_k, top_p=top_p))
    ours = (ours / ours.sum(axis=-1, keepdims=True)).reshape(6, 10)
    # Both in fp64: an exponent's rounding is relative to the probability, and so is that of the sum.
    largest = np.abs(logits).max() / temperature
    near = apart([(3, FP64)]) * 2 * largest + exp_sum_error(10, FP64)
    np.testing.assert_allclose(ours, scores.softmax(-1).numpy(), rtol=near, atol=0)


def test_a_number_falls_to_the_token_whose_part_of_the_line_it_hits() -> None:
    likely = np.array([[[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]])
    below = 1 - 2.0**-53
    for number, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (below, 4)):
        assert drawn(likely, np.array([[number]])).tolist() == [[token]]
    assert drawn(likely * 0.1, np.array([[below]])).tolist() == [[4]]
    assert drawn(likely * 0, np.array([[0.5]])).shape == (1, 1)  # a sample that has ended: any token will do


def test_draws_are_the_beginning_of_endless_rows() -> None:
    texts = [[3, 4], [34], [3, 4], [3]]
    few = draws_for(texts, SearchOptions(sample=True, seed=5, nbest=2, max_length=3))
    many = draws_for(texts, SearchOptions(sample=True, seed=5, nbest=4, max_length=9))
    assert (many[:, :2, :3] == few).all()
    assert (few[0] == few[2]).all()
    assert len(np.unique(few[[0, 1, 3]])) == 3 * 2 * 3
    assert (few != draws_for(texts, SearchOptions(sample=True, seed=6, nbest=2, max_length=3))).all()
    # Written down: what a seed says must not change with a new numpy.
    assert few[0, :, 0].tolist() == [0.8736790122120943, 0.10920031550980935]
    unseeded = [draws_for(texts, SearchOptions(sample=True, max_length=3)) for _ in range(2)]
    assert len(np.unique(unseeded)) == 2 * 4 * 3  # equal sources, too, draw by themselves
    assert many.min() >= 0
    assert many.max() < 1


def test_samples_end_by_themselves_and_sources_leave_with_their_last() -> None:
    ends_soon = from_table({}, [0, 0.9, 0.1])
    never = from_table({}, [0, 0, 1])
    hypotheses, emitted, step = sampled([ends_soon, never], [[3], [4]], nbest=3, max_length=30)
    assert [len(best.tokens) for best in hypotheses[1]] == [30] * 3
    longest = max(len(best.tokens) for best in hypotheses[0])
    assert longest < 30
    assert step.kept == [[1]]
    assert step.batches == [2] * longest + [1] * (30 - longest)
    for best in hypotheses[0]:
        assert best.tokens == (2,) * (len(best.tokens) - 1) + (1,)
        assert best.score == by_hand((len(best.tokens) - 1) * math.log(0.1) + math.log(0.9), len(best.tokens))
    assert all((one.parents == np.arange(3)).all() for one in emitted)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.randoms(), st.integers(0, 10**20))
def test_neighbours_and_order_do_not_matter(seeds: list[int], random: Random, seed: int) -> None:
    def outputs(names: list[int], nbest: int) -> list[list[Hypothesis]]:
        return sampled(
            [from_seed(name, vocab=4) for name in names], [[name] for name in names], seed=seed, nbest=nbest
        )[0]

    alone = {name: outputs([name], 3)[0] for name in seeds}
    random.shuffle(seeds)
    assert outputs(seeds, 3) == [alone[name] for name in seeds]
    assert outputs(seeds, 1) == [alone[name][:1] for name in seeds]  # nor do more samples


def test_rules_hold_for_every_sample() -> None:
    script = from_seed(3, vocab=8, spread=0.5)
    options = {"prefix": (3, 4), "allowed": (3, 4, 5, 6), "banned": ((5, 6),), "min_length": 4, "nbest": 200}
    ((*found,),), _, _ = sampled([script], [[3]], **options)
    assert len({best.tokens for best in found}) > 20
    for best in found:
        assert best.tokens[:2] == (3, 4)
        assert set(best.tokens) <= {1, 3, 4, 5, 6}
        assert (5, 6) not in zip(best.tokens, best.tokens[1:], strict=False)
        assert len(best.tokens) >= 4


def test_one_sample_that_cannot_go_on_is_refused() -> None:
    script = from_table({}, [0, 0.5, 0.25, 0.25])
    with pytest.raises(RequestError, match="forbid every token of the vocabulary; allow some"):
        sampled([script], [[3]], nbest=50, no_repeat_ngram=1, min_length=8, banned=((0,),))
    # One that has ended only waits: that nothing is left to say after its end is nobody's business.
    ((*found,),), _, _ = sampled([script], [[3]], nbest=50, no_repeat_ngram=1)
    assert {len(best.tokens) for best in found} == {1, 2, 3}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("sampling") / "b", ("fp32",))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 10, "top_p": 0.9, "no_repeat_ngram": 2}])
def test_a_seed_gives_the_same_outputs_on_every_backend(bundle: Bundle, options: dict[str, Any]) -> None:
    random = np.random.default_rng(4)
    sources = [random.integers(3, 40, length).tolist() for length in (1, 9, 4, 20, 7, 2, 13, 5)]
    search = SearchOptions(max_length=24, min_length=6, sample=True, nbest=3, seed=11, **options)
    with open_session(bundle, "torch") as reference, open_session(bundle, "onnxruntime", threads=1) as session:
        expected = [[best.tokens for best in samples] for samples in generate(reference, sources, search)]
        found = generate(session, sources, search)
        assert [[best.tokens for best in samples] for samples in found] == expected
        backwards = generate(session, sources[::-1], search)[::-1]
        assert [[best.tokens for best in samples] for samples in backwards] == expected
        alone = [generate(session, [source], search)[0] for source in sources]
        assert [[best.tokens for best in samples] for samples in alone] == expected
        others = generate(session, sources, dataclasses.replace(search, seed=12))
        assert [[best.tokens for best in samples] for samples in others] != expected
    assert len({tokens for samples in expected for tokens in samples}) > 18  # of 24
