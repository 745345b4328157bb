"""Parity on small models: good exports pass, and nothing is compared that should not be."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from support.parity_cases import SMALL, bundle_of, changed, parity_with

from seq2engine.errors import ConfigError, RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.numerics.budgets import FEWEST_ROWS
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import FEWEST_SOURCES, random_sources, sample_of

SCHEMES = [(p, n) for p in ("sinusoidal", "learned", "rotary") for n in ("post", "pre")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(SMALL, tmp_path_factory.mktemp("parity"))


class TestGoodExports:
    @pytest.mark.slow
    @pytest.mark.parametrize(("positions", "norm"), SCHEMES)
    def test_pass_in_every_scheme_and_precision(self, tmp_path, positions, norm):
        bundle = bundle_of(dataclasses.replace(SMALL, positions=positions, norm=norm), tmp_path)
        for precision in ("fp32", "fp16"):
            result = parity_of(
                bundle, precision=precision, options=ParityOptions(count=24, max_length=16, batch=8, threads=1)
            )
            assert result, result.reason
            assert result.precision == precision
            if precision == "fp32":
                assert [decode.equal for decode in result.decodes] == [24, 24]

    def test_pass_with_a_growing_cache(self, tmp_path):
        result = parity_of(
            bundle_of(SMALL, tmp_path, "growing"), options=ParityOptions(count=16, max_length=20, batch=8, threads=1)
        )
        assert result, result.reason
        assert result.cache_form == "growing"

    def test_compare_every_tensor_of_the_contract(self, bundle):
        result = parity_of(bundle, options=ParityOptions(count=20, max_length=6, threads=1))
        pooled = [tensor.tensor for tensor in result.tensors if tensor.step is None and tensor.level != "coverage"]
        assert pooled[:5] == ["encoder_states", "cross_k.0", "cross_v.0", "cross_k.1", "cross_v.1"]
        assert pooled[5:10] == ["self_k.0", "self_v.0", "self_k.1", "self_v.1", "logits"]
        assert pooled[10:] == ["logits, staggered rows", "logits, beams", "logits, to the last step"]
        assert [tensor.step for tensor in result.tensors if tensor.step is not None][:3] == [0, 1, 2]
        assert [decode.search for decode in result.decodes] == ["greedy", "beam 4"]
        assert json.loads(result.to_json())["verdict"] is True

    def test_torch_is_as_good_as_torch(self, bundle):
        result = parity_of(bundle, backend="torch", options=ParityOptions(count=16, max_length=6, threads=1))
        assert {tensor.worst_ratio for tensor in result.tensors} == {1.0}

    def test_pass_on_a_single_given_source(self, bundle):
        """One row of errors is a matter of luck, so the tensors are compared on random sources besides."""
        result = parity_of(bundle, options=ParityOptions(sources=[[5]], max_length=8, threads=1))
        assert result, result.reason
        assert result.sources == result.decodes[0].sources == 1
        assert result.tensors[0].elements >= FEWEST_SOURCES * SMALL.d_model

    def test_progress_is_reported_and_ends(self, bundle):
        seen = []
        parity_of(
            bundle,
            progress=lambda *report: seen.append(report),
            options=ParityOptions(count=16, max_length=4, batch=8, threads=1),
        )
        assert [stage for stage, fraction, *_ in seen if fraction == 1.0] == [
            "parity: weights",
            "parity: tensors",
            "parity: greedy",
            "parity: beam 4",
        ]

    def test_greedy_only_when_the_beam_is_one(self, bundle):
        assert [
            d.search for d in parity_of(bundle, options=ParityOptions(count=4, beam=1, max_length=4, threads=1)).decodes
        ] == ["greedy"]


class TestWhatIsCompared:
    def test_padding_is_not(self, bundle):
        def garbage(state, mask):
            state["encoder_states"][~mask] = 1e9
            for name in [name for name in state if name.startswith("cross_")]:
                source = 3 if name.startswith("cross_k.") else 2  # the axis: keys are turned
                np.moveaxis(state[name], source, 1)[~mask] = 1e9
            return state

        assert parity_with(bundle, changed(bundle, encoded=garbage))

    def test_a_single_real_position_is(self, bundle):
        def spoil(state, mask):
            state["encoder_states"][0, 0, 0] += 0.1
            return state

        result = parity_with(bundle, changed(bundle, encoded=spoil))
        assert result.reason.startswith("encoder: encoder_states")
        assert all(result.decodes)  # the states are not used again, so nothing else is wrong

    def test_slots_that_were_never_written_are_not(self, bundle):
        """An engine's cache has one size, whatever is asked of it."""

        def fill(state):
            for name in [name for name in state if name.startswith("self_")]:
                state[name][:] = 7.0

        with changed(bundle, reserved=fill) as candidate:
            candidate.limits = dataclasses.replace(candidate.limits, slots=40)
            assert parity_with(bundle, candidate, max_length=5)

    @pytest.mark.slow
    def test_a_single_late_step_is(self, bundle):
        """In fp16, where the worst element has so much room that only the step's own median tells."""

        def shift(logits, position):
            logits[position == 5] += np.float32(0.3)

        result = parity_with(bundle, changed(bundle, "fp16", answered=shift), count=32, max_length=24)
        assert not result
        assert [t.step for t in result.tensors if not t and t.step is not None] == [5]

    def test_a_step_is_judged_by_the_sources_that_reach_it_if_they_are_not_too_few(self, tmp_path):
        bundle = bundle_of(dataclasses.replace(SMALL, norm="pre", positions="learned"), tmp_path)
        sources = random_sources(SMALL, 16)
        with open_session(bundle, "torch", "fp64", threads=1) as oracle:
            lengths = [len(nbest[0].tokens) for nbest in generate(oracle, sources, SearchOptions(max_length=24))]
        reached = [sum(length > step for length in lengths) for step in range(24)]
        assert any(0 < count < FEWEST_ROWS for count in reached)
        result = parity_of(bundle, options=ParityOptions(sources=sources, max_length=24, threads=1))
        judged = {tensor.step: tensor.elements for tensor in result.tensors if tensor.step is not None}
        assert judged == {step: n * SMALL.target_vocab for step, n in enumerate(reached) if n >= FEWEST_ROWS}

    def test_no_batch_is_larger_than_asked_or_than_the_session_takes(self, bundle):
        with changed(bundle) as candidate:
            assert parity_with(bundle, candidate, count=20, max_length=3, batch=6)
            assert candidate.largest == 6  # 20 sources in 4 batches of 5, of which 16 in 3 batches of up to 6
            candidate.limits = dataclasses.replace(candidate.limits, batch=3)
            candidate.largest = 0
            assert parity_with(bundle, candidate, count=20, max_length=3, batch=6)
            assert candidate.largest == 3


class TestSources:
    def test_random_ones_hold_the_extremes(self):
        sources = random_sources(SMALL, 40, seed=1)
        assert len(sources) == 40
        assert len(sources[0]) == 1
        assert len(sources[1]) == SMALL.max_source
        assert len(set(sources[2])) == 1
        assert len(sources[2]) >= SMALL.max_source // 2
        assert {len(source) for source in sources} <= set(range(1, SMALL.max_source + 1))
        assert len({len(source) for source in sources}) > 8
        assert all(0 < token < SMALL.source_vocab for source in sources for token in source)

    def test_random_ones_depend_on_the_seed_alone(self):
        assert random_sources(SMALL, 9, seed=1) == random_sources(SMALL, 9, seed=1)
        assert random_sources(SMALL, 9, seed=1) != random_sources(SMALL, 9, seed=2)

    def test_random_ones_keep_to_a_session_that_takes_less(self):
        assert max(map(len, random_sources(SMALL, 30, longest=7))) == 7

    @pytest.mark.parametrize("count", [0, 1, 2, 3])
    def test_there_may_be_few(self, count):
        assert len(random_sources(SMALL, count)) == count

    def test_a_sample_has_all_lengths(self):
        sources = [[3] * length for length in (5, *range(1, 101), 2)]
        sample = sample_of(sources, 10)
        assert len(sample) == 10
        assert {1, 100} <= {len(source) for source in sample}
        assert sample_of(sources[:4], 10) == sources[:4]


class TestRefusals:
    def test_a_batch_of_none(self, bundle):
        with pytest.raises(ConfigError, match="batch 0, expected at least 1"):
            parity_of(bundle, options=ParityOptions(batch=0, threads=1))

    def test_no_random_sources(self, bundle):
        with pytest.raises(ConfigError, match="0 random sources, expected at least 1"):
            parity_of(bundle, options=ParityOptions(count=0, threads=1))

    @pytest.mark.parametrize("options", [{"beam": 0}, {"max_length": 0}])
    def test_searches_that_cannot_be(self, bundle, options):
        with pytest.raises(ConfigError, match="0, expected at least 1"):
            parity_of(bundle, options=ParityOptions(threads=1, **options))

    def test_sources_that_cannot_be_run(self, bundle):
        with pytest.raises(RequestError, match=r"source 1 is empty; source 2 has 99 tokens, at most 20"):
            parity_of(bundle, options=ParityOptions(sources=[[5], [], [5] * 99], threads=1))

    def test_no_sources(self, bundle):
        with pytest.raises(RequestError, match="the batch is empty"):
            parity_of(bundle, options=ParityOptions(sources=[], threads=1))

    def test_more_tokens_than_the_model_has_positions(self, bundle):
        with pytest.raises(RequestError, match="max length 25, at most 24"):
            parity_of(bundle, options=ParityOptions(max_length=25, threads=1))


@pytest.mark.parametrize(
    ("own", "asked", "searches"), [({"beam": 3}, None, 3), ({"beam": 1}, None, 4), ({"beam": 3}, 2, 2)]
)
def test_beam_decodes_have_the_model_s_own_beams(tmp_path, own, asked, searches):
    (tmp_path / "generation.json").write_text(json.dumps(own))
    model = random_model(SMALL, 3)
    bundle = onnx_from_model(model, tmp_path / "bundle", ("fp32",), companions=tmp_path)
    result = parity_of(bundle, options=ParityOptions(count=2, beam=asked, max_length=4, threads=1))
    assert [decode.search for decode in result.decodes] == ["greedy", f"beam {searches}"]
