"""The arithmetic of parity, on numbers whose answer can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from support.rounding import FP64

from seq2engine.runtime.numerics.budgets import (
    BINS,
    DIVERGENCE_FACTOR,
    MEDIAN_FACTOR,
    WORST_FACTOR,
    DecodeResult,
    Divergence,
    Errors,
    ErrorTally,
    TensorResult,
    bins_of,
    times,
)
from seq2engine.runtime.numerics.error_scale import normalised, row_scales
from seq2engine.runtime.numerics.teacher_forcing import Scored
from seq2engine.runtime.parity.levels.divergence import (
    Gap,
    Traced,
    beams_of,
    first_difference,
    fork_of,
    gap_of_scores,
    gap_since_fork,
)
from seq2engine.runtime.parity.levels.result import ParityResult

ULP32 = 2.0**-23


def tensor(reference=(1e-6, 1e-5), candidate=(1e-6, 1e-5), scale=1.0, level="steps", name="logits", step=None):
    return TensorResult(level, name, step, 100, scale, scale * ULP32, Errors(*reference), Errors(*candidate))


def divergence(verdict="bug", margin=1.0, budget=0.1, source=3):
    return Divergence(source, 2, verdict, "tokens", margin, budget, (5, 6, 7), (5, 6, 8))


def parity(tensors=None, decodes=None):
    tensors, decodes = tensors or [tensor()], decodes or [DecodeResult("greedy", 8)]
    return ParityResult("onnxruntime", "fp32", "static", 8, 16, tuple(tensors), tuple(decodes))


class TestErrorTally:
    def test_is_the_median_nine_tenths_and_the_worst_of_all_batches(self):
        rng = np.random.default_rng(0)
        exact = rng.normal(size=(40, 50))
        reference, candidate = exact + rng.normal(size=exact.shape) * 1e-6, exact + rng.normal(size=exact.shape) * 3e-6
        units = np.maximum(np.abs(exact), row_scales(exact)[:, None])
        tally = ErrorTally("fp32")
        for rows in np.split(np.arange(40), [1, 7, 30]):
            tally.add(exact[rows], reference[rows], candidate[rows])
        result = tally.result("steps", "logits")
        for errors, array in ((result.reference, reference), (result.candidate, candidate)):
            wanted = np.abs(array - exact) / units
            assert errors.median == pytest.approx(np.median(wanted), rel=0.03)
            assert errors.most == pytest.approx(np.quantile(wanted, 0.9), rel=0.03)
            # A quotient of each array is rounded before they are subtracted; here one is after it.
            assert errors.worst == pytest.approx(wanted.max(), rel=0, abs=4 * FP64 * np.abs(array / units).max())
        assert result.scale == pytest.approx(np.exp(np.log(row_scales(exact)).mean()))
        assert result.elements == exact.size
        assert tally.rows == 40

    @pytest.mark.parametrize(("rows", "width", "judged"), [(2, 4, False), (8, 4, False), (16, 4, True), (7, 64, False)])
    def test_repeated_rows_are_no_evidence_of_their_own(self, rows, width, judged):
        # A model with relative positions that repeats two tokens has two rows of keys in its first layer.
        rng = np.random.default_rng(0)
        exact = rng.normal(size=(rows, width))
        errors = rng.normal(size=exact.shape) * 1e-6
        arrays = [np.tile(array, (12, 1)) for array in (exact, exact + errors, exact + 6 * errors)]
        tally, parts = ErrorTally("fp32"), ErrorTally("fp32")
        tally.add(*arrays)
        for first in range(0, len(arrays[0]), 5):
            part = ErrorTally("fp32")
            part.add(*(array[first : first + 5] for array in arrays))
            parts.merge(part)
        for result in (tally.result("steps", "self_k.0"), parts.result("steps", "self_k.0")):
            assert result.elements == 12 * exact.size
            assert bool(result) is not judged, result.reason
            assert result.allowed.median == (MEDIAN_FACTOR if judged else WORST_FACTOR)

    def test_few_rows_are_still_judged_by_the_factor_of_the_maximum(self):
        exact = np.random.default_rng(0).normal(size=(2, 4))
        tally = ErrorTally("fp32")
        tally.add(exact, exact + 1e-6, exact + 1.1 * WORST_FACTOR * 1e-6)
        assert not tally.result("steps", "self_k.0")

    def test_also_tells_the_relative_l2_and_the_cosine(self):
        rng = np.random.default_rng(0)
        exact, rounded, given = (rng.normal(size=(40, 50)) for _ in range(3))
        whole, apart, other = (ErrorTally("fp32") for _ in range(3))
        whole.add(exact, rounded, given)
        apart.add(exact[:9], rounded[:9], given[:9])
        other.add(exact[9:], rounded[9:], given[9:])
        apart.merge(other)
        truth, _, found = normalised(exact, (rounded, given), "fp32")
        for tally in (whole, apart):
            errors = tally.result("steps", "logits").candidate
            norms = np.linalg.norm(truth), np.linalg.norm(found)
            assert errors.relative == pytest.approx(np.linalg.norm(found - truth) / norms[0])
            assert errors.cosine == pytest.approx((truth * found).sum() / (norms[0] * norms[1]))
            assert errors.worst == np.abs(found - truth).max()
        assert (apart.counts == whole.counts).all()
        assert apart.rows == 40
        assert apart.result("steps", "logits").scale == pytest.approx(whole.result("steps", "logits").scale)

    def test_counts_exact_zeros_as_zero(self):
        tally = ErrorTally("fp32")
        tally.add(np.ones((3, 3)), np.ones((3, 3)), np.ones((3, 3)))
        result = tally.result("encoder", "encoder_states")
        assert (result.reference, result.candidate) == (Errors(0.0, 0.0), Errors(0.0, 0.0))
        assert result

    def test_reads_fp16_in_full(self):
        """Errors are taken in fp64: in fp16 they would round to nothing or overflow."""
        exact = np.full((1, 4), 1000.0)
        half = (exact + 0.5).astype(np.float16)
        tally = ErrorTally("fp16")
        tally.add(exact, half, half)
        assert tally.result("encoder", "cross_k.0").reference.worst == pytest.approx(0.5 / 1000.0)

    @pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_infinitely_wrong(self, broken):
        exact = np.ones((2, 8))
        candidate = exact.copy()
        candidate[1, 3] = broken
        tally = ErrorTally("fp32")
        tally.add(exact, exact, candidate)
        result = tally.result("steps", "logits")
        assert result.candidate.worst == math.inf
        assert result.candidate.median == 0.0
        assert result.reason == "logits: not finite"

    def test_nothing_compared_is_nothing_wrong(self):
        tally = ErrorTally("fp32")
        tally.add(np.ones((0, 4)), np.ones((0, 4)), np.ones((0, 4)))
        tally.add_logits(np.ones((0, 4)), np.ones((0, 4)), np.ones((0, 4)))
        assert tally.result("steps", "logits").elements == 0

    def test_what_does_not_count_is_not_counted(self):
        """Masked scores are zeros by then: they are in no median."""
        exact, counts = np.array([[1.0, 2.0, 0.0, 0.0, 0.0]]), np.array([[True, True, False, False, False]])
        tally = ErrorTally("fp32")
        tally.add(exact, exact + 0.1 * counts, exact + 0.1 * counts, counts)
        assert tally.elements == 2
        assert tally.result("locate", "scores").candidate.median > 0.0

    def test_a_tensor_of_zeros_must_be_zeros(self):
        zeros = np.zeros((4, 8))
        right, wrong = ErrorTally("fp32"), ErrorTally("fp32")
        right.add(zeros, zeros, zeros)
        wrong.add(zeros, zeros, zeros + 1e-9)
        assert right.result("steps", "self_k.0")
        assert not wrong.result("steps", "self_k.0")

    def test_bins_cover_what_floats_can_hold(self):
        places = bins_of(np.array([0.0, 1e-40, 1e-7, 1.0, 1e6, np.inf]))
        assert places[0] == places[1] == 0
        assert places[-1] == BINS - 1
        assert (np.diff(places[1:]) > 0).all()


class TestTensorResult:
    def test_may_err_as_much_as_allowed_and_no_more(self):
        assert tensor(candidate=(MEDIAN_FACTOR * 1e-6, WORST_FACTOR * 1e-5))
        assert not tensor(candidate=(MEDIAN_FACTOR * 1.01e-6, 1e-5))
        assert not tensor(candidate=(1e-6, WORST_FACTOR * 1.01e-5))

    def test_the_reason_names_tensor_and_ratio(self):
        assert tensor(candidate=(9e-6, 1e-5)).reason == "logits: 9.00x PyTorch's own error at the median, allowed 4x"
        late = tensor(candidate=(1e-6, 1e-2), step=7)
        assert late.reason == "logits, step 7: 1000x PyTorch's own error at the maximum, allowed 16x"

    def test_a_part_of_the_elements_that_the_median_does_not_see_is_seen_at_nine_tenths(self):
        third = tensor(reference=(1e-6, 1e-5, 0.0, 1.0, 2e-6), candidate=(1e-6, 1e-5, 0.0, 1.0, 9e-6))
        assert third.reason == "logits: 4.50x PyTorch's own error at the 90th percentile, allowed 4x"
        assert third.strain == pytest.approx(9 / 8)

    def test_one_rounding_is_free_where_pytorch_is_exact(self):
        exact = tensor(reference=(0.0, 0.0), candidate=(ULP32, ULP32))
        assert exact
        assert exact.median_ratio == MEDIAN_FACTOR
        assert not tensor(reference=(0.0, 0.0), candidate=(1.1 * ULP32, 1.1 * ULP32))
        assert tensor(reference=(0.0, 0.0), candidate=(8 * ULP32, 8 * ULP32), scale=8.0)

    def test_a_tensor_of_zeros_must_be_zeros(self):
        assert tensor((0.0, 0.0), (0.0, 0.0), scale=0.0)
        assert not tensor((0.0, 0.0), (0.0, 1e-30), scale=0.0)

    def test_a_reference_that_is_not_finite_settles_nothing(self):
        broken = tensor(reference=(1e-3, math.inf), candidate=(1e-3, 1e-2))
        assert not broken
        assert "PyTorch's own values are not finite" in broken.reason

    def test_times(self):
        assert [times(value) for value in (0.5, 1.044, 12.3, 3e5)] == ["0.50x", "1.04x", "12x", "3e+05x"]


class TestParityResult:
    def test_is_true_when_all_is_well(self):
        result = parity()
        assert result
        assert result.reason == (
            "errors at most 1.00x PyTorch's own at the median, 1.00x at the maximum; greedy: 8 of 8 equal"
        )

    def test_names_the_first_failure_in_the_order_of_the_data(self):
        bad = {"candidate": (1e-3, 1e-2)}
        result = parity(
            [tensor(level="encoder"), tensor(**bad, name="self_k.1"), tensor(**bad)],
            [DecodeResult("greedy", 8, (divergence(),))],
        )
        assert not result
        assert result.first_failure[0] == "steps"
        assert result.first_failure[1].name == "self_k.1"
        assert result.reason.startswith("steps: self_k.1: 1000x")

    def test_a_tie_is_not_a_failure_but_is_reported(self):
        result = parity(decodes=[DecodeResult("beam 4", 8, (divergence("tie", 1e-7, 1e-6),))])
        assert result
        assert "beam 4: 7 of 8 equal" in result.reason

    def test_the_largest_difference_is_named(self):
        found = (divergence("tie", 1e-7, 1e-6, 1), divergence(source=4), divergence(margin=9.0))
        decode = DecodeResult("greedy", 8, found)
        assert decode.reason == (
            "greedy: 2 of 8 outputs differ beyond rounding, worst source 3 at step 2, margin 9, budget 0.1"
        )
        assert decode.equal == 5

    def test_a_decode_that_stopped_is_a_failure(self):
        decode = DecodeResult("greedy", 8, failure="onnxruntime stopped in batch 0: not finite")
        assert not decode
        assert decode.equal == 0
        assert parity(decodes=[decode]).reason == "decodes: greedy: onnxruntime stopped in batch 0: not finite"

    def test_json_holds_everything_and_is_json(self):
        result = parity([tensor(candidate=(1e-6, math.inf))], [DecodeResult("greedy", 8, (divergence(),))])
        values = json.loads(result.to_json())
        assert values["verdict"] is False
        assert values["reason"] == "steps: logits: not finite"
        assert values["tensors"][0]["candidate"] == {
            "median": 1e-6,
            "worst": None,
            "relative": 0.0,
            "cosine": 1.0,
            "most": 0.0,
        }
        assert values["tensors"][0]["verdict"] is False
        assert values["decodes"][0]["equal"] == 7
        assert values["decodes"][0]["divergences"][0]["candidate"] == [5, 6, 8]

    def test_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            parity().precision = "fp16"


def spoken(tokens, log_probs, spread=0.01):
    return Scored(tuple(tokens), np.array(log_probs), np.full(len(tokens), spread), np.ones(len(tokens)))


class TestGaps:
    def test_within_pytorchs_own_error_it_is_a_tie_within_the_budget_drift_beyond_it_a_bug(self):
        spread = 0.1
        cases = {0.0: "tie", 0.1: "tie", 0.11: "drift", 0.39: "drift", 0.41: "bug", math.nan: "bug"}
        for margin, verdict in cases.items():
            assert Gap(margin, DIVERGENCE_FACTOR * spread).verdict == verdict
        assert Gap(0.0, math.nan).verdict == "bug"

    def test_a_gap_is_closed_within_its_budget(self):
        assert Gap(0.0, 0.0)
        assert Gap(0.1, 0.1)
        assert not Gap(0.11, 0.1)
        assert not Gap(0.1, math.nan)

    def test_the_common_prefix_does_not_count(self):
        gap = gap_since_fork(spoken([5, 6, 7], [-9.0, -1.0, -2.0]), spoken([5, 6, 8], [-9.0, -1.0, -2.5]))
        assert gap.margin == 0.5
        assert gap.budget == pytest.approx(DIVERGENCE_FACTOR * 0.01)

    def test_after_the_fork_errors_add_up(self):
        gap = gap_since_fork(spoken([5, 6, 7], [-1, -1, -1], 0.01), spoken([4, 6, 7], [-1, -2, -1], 0.02))
        assert gap.margin == 1.0
        assert gap.budget == pytest.approx(DIVERGENCE_FACTOR * 3 * 0.02)

    def test_outputs_are_scored_as_beam_search_does(self):
        short, long = spoken([5, 2], [-1.0, -1.0]), spoken([6, 7, 8, 2], [-1.0, -1.0, -1.0, -3.0])
        gap = gap_of_scores(short, long, length_penalty=1.0)
        assert gap.margin == pytest.approx(0.5)
        assert gap.budget == pytest.approx(DIVERGENCE_FACTOR * 0.01)
        assert gap_of_scores(short, long, length_penalty=0.0).margin == pytest.approx(4.0)

    def test_first_difference(self):
        assert first_difference((1, 2, 3), (1, 5, 3)) == 1
        assert first_difference((1, 2), (1, 2, 3)) == 2


class TestForks:
    END = 2

    def traced(self, *steps):
        """Steps of (tokens, parents) of the beams of source 0."""
        return Traced([], [(np.array([0]), np.array([tokens]), np.array([parents])) for tokens, parents in steps])

    def test_prefixes_follow_their_parents(self):
        run = self.traced(([5, 6], [0, 1]), ([7, 8], [1, 1]), ([9, 9], [1, 0]))
        assert list(beams_of(run, 0, self.END)) == [{(5,), (6,)}, {(6, 7), (6, 8)}, {(6, 8, 9), (6, 7, 9)}]

    def test_a_finished_source_has_no_beams(self):
        run = self.traced(([5, 6], [0, 1]), ([self.END, self.END], [0, 1]))
        assert len(list(beams_of(run, 0, self.END))) == 1
        assert list(beams_of(run, 1, self.END)) == []

    def test_a_fork_is_the_first_step_with_other_prefixes(self):
        ours = self.traced(([5, 6], [0, 1]), ([7, 8], [0, 0]))
        theirs = self.traced(([6, 5], [0, 1]), ([7, 9], [1, 1]))
        assert fork_of(ours, theirs, 0, self.END) == ([(5, 8)], [(5, 9)])

    def test_order_among_beams_is_no_fork(self):
        ours, theirs = self.traced(([5, 6], [0, 1])), self.traced(([6, 5], [0, 1]))
        assert fork_of(ours, theirs, 0, self.END) is None
