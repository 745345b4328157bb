"""The unit of an error: an outlier errs by its own digits, what no search can choose does not count."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.rounding import FP64

from seq2engine.runtime.numerics.budgets import ErrorTally
from seq2engine.runtime.numerics.error_scale import (
    EPSILON,
    REACH,
    UPPER,
    error_spread,
    errors_of,
    normalised,
    normalised_logits,
    row_scales,
    upper_spread,
)
from seq2engine.runtime.numerics.teacher_forcing import LARGEST_TIE, spreads_of
from seq2engine.runtime.parity.levels.batch_invariance import largest_error
from seq2engine.runtime.parity.levels.error_growth import SquaresByStep
from seq2engine.runtime.parity.levels.next_token import NextTokenTally

MASKS = (-1e9, -1e4, -math.inf)


def noise(shape, size=1.0, seed=0):
    return np.random.default_rng(seed).normal(size=shape) * size


class TestRows:
    def test_the_scale_of_a_row_is_what_is_usual_in_it(self):
        rows = noise((3, 200))
        plain = row_scales(rows)
        rows[:, :20] *= 1e6  # a tenth of the channels stands out
        assert (row_scales(rows) < 2 * plain).all()
        rows[:, 20:120] = 0.0  # and half of them are dead
        assert (row_scales(rows) < 2 * plain).all()

    def test_every_row_has_its_own(self):
        rows = noise((2, 200)) * np.array([[1.0], [1e4]])
        small, large = row_scales(rows)
        assert large / small == pytest.approx(1e4, rel=0.5)

    def test_a_constant_row_is_its_constant_and_a_row_of_zeros_is_like_the_others(self):
        assert row_scales(np.array([[3.0, 3.0], [0.0, 0.0], [5.0, -5.0]])).tolist() == [3.0, 4.0, 5.0]
        assert row_scales(np.zeros((2, 3))).tolist() == [0.0, 0.0]

    def test_what_is_not_finite_has_no_scale(self):
        assert row_scales(np.array([[1.0, -np.inf, np.inf, np.nan]])).tolist() == [1.0]


class TestElements:
    def test_an_outlier_may_err_by_its_own_digits_and_lends_nothing(self):
        exact = noise((4, 64))
        exact[:, 7] = 1e7
        step = EPSILON["fp32"]
        own, lent = exact.copy(), exact.copy()
        own[:, 7] += 1e7 * step
        lent[:, 8] += 1e7 * step
        truth, first, second = normalised(exact, (own, lent), "fp32")
        # A sum, a product and two quotients in fp64, of the size of 1.
        assert errors_of(truth, first).max() == pytest.approx(step, rel=0, abs=4 * FP64)
        assert errors_of(truth, second).max() > 1e5 * step

    def test_what_underflows_is_no_error(self):
        """A softmax in fp16: one place has nearly all of it, the rest is below what fp16 can hold."""
        exact = np.array([[1.0 - 3e-8, 1e-8, 1e-8, 1e-8, 1e-12]])
        rounded = exact.astype(np.float16)
        truth, found = normalised(exact, (rounded,), "fp16")
        assert errors_of(truth, found).max() <= EPSILON["fp16"]

    def test_equal_infinities_agree_and_nothing_else_that_is_not_finite(self):
        exact = np.array([-np.inf, np.inf, 1.0, 1.0, -np.inf])
        assert errors_of(exact, np.array([-np.inf, np.inf, np.nan, -np.inf, 0.0])).tolist() == [
            0.0,
            0.0,
            np.inf,
            np.inf,
            np.inf,
        ]


class TestLogits:
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("other", MASKS)
    @pytest.mark.parametrize("tokens", [1, 150])
    def test_a_token_that_can_never_be_chosen_agrees_and_lends_nothing(self, mask, other, tokens):
        exact = noise((8, 200), 3.0)
        rounded, wrong = exact.astype(np.float32), exact.astype(np.float32)
        exact[:, -tokens:] = mask
        rounded[:, -tokens:], wrong[:, -tokens:] = other, other
        wrong[:, :10] += 0.5
        tally = ErrorTally("fp32")
        tally.add_logits(exact, rounded, wrong)
        result = tally.result("steps", "logits")
        assert math.isfinite(result.reference.worst)
        assert result.reference.worst <= EPSILON["fp32"]
        assert result.elements == 8 * (200 - tokens)
        assert result.worst_ratio > 1e5

    @pytest.mark.parametrize("given", [0.0, np.nan, np.inf])
    def test_a_masked_token_that_becomes_possible_is_an_error(self, given):
        exact = noise((8, 200), 3.0)
        rounded = exact.astype(np.float32)
        exact[:, -1] = -1e9
        rounded[:, -1] = -1e9
        wrong = rounded.copy()
        wrong[3, -1] = given
        tally = ErrorTally("fp32")
        tally.add_logits(exact, rounded, wrong)
        assert not tally.result("steps", "logits")

    def test_a_token_that_becomes_impossible_is_an_error(self):
        exact = noise((8, 200), 3.0)
        wrong = exact.copy()
        wrong[3, 5] = -np.inf
        tally = ErrorTally("fp32")
        tally.add_logits(exact, exact, wrong)
        result = tally.result("steps", "logits")
        assert math.isfinite(result.candidate.worst)
        assert not result

    def test_only_what_is_within_reach_counts(self):
        exact = np.array([[5.0, 4.0, 5.0 - REACH + 1.0, 5.0 - REACH - 1.0]])
        assert len(normalised_logits(exact, (), "fp32")[0]) == 3

    def test_a_row_of_one_possible_token_and_a_constant_row_have_a_scale(self):
        exact = np.array([[2.0, -1e9, -1e9], [2.0, 2.0, 2.0]])
        (found,) = normalised_logits(exact, (), "fp32")
        assert found.tolist() == [1.0, 1.0, 1.0, 1.0]

    @pytest.mark.parametrize("mask", MASKS)
    def test_batch_invariance_is_measured_in_what_can_be_chosen(self, mask):
        exact = noise((4, 200), 3.0)
        moved = exact + 1e-3
        exact[:, -1], moved[:, -1] = mask, -np.inf
        assert 1e-5 < largest_error(exact, exact, moved, "fp32") < 1e-3

    @pytest.mark.parametrize("mask", MASKS)
    def test_so_is_drift(self, mask):
        exact = noise((4, 200), 3.0)
        moved = exact * 1.01
        exact[:, -1] = moved[:, -1] = mask
        sums = SquaresByStep(1)
        sums.add(0, *normalised_logits(exact, (exact, moved), "fp32"))
        assert sums.relative(0) == (0.0,)
        # An error of 0.01 is the difference of two quotients of a size near 1; the sums of its squares err by far less.
        assert sums.relative(1)[0] == pytest.approx(0.01, rel=0, abs=4 * FP64)

    @pytest.mark.parametrize("mask", MASKS)
    def test_what_is_never_next_is_in_no_divergence(self, mask):
        exact = noise((4, 200), 3.0)
        exact[:, -1] = mask
        given = exact.copy()
        given[:, -1] = -np.inf
        tally = NextTokenTally()
        tally.add(exact, given)
        assert tally.result().worst_kl == 0.0


class TestTies:
    def logits(self, size=1e-4, mask=-1e9, tokens=1):
        exact = noise((6, 300), 3.0)
        rounded = exact + noise(exact.shape, size, seed=1)
        exact[:, -tokens:] = mask
        rounded[:, -tokens:] = mask * 1.1
        return exact, rounded

    @pytest.mark.parametrize("mask", MASKS)
    def test_pytorchs_error_is_that_of_the_best_logits(self, mask):
        exact, rounded = self.logits(mask=mask, tokens=100)
        best = np.argsort(-exact, axis=1)[:, :UPPER]
        errors = np.take_along_axis(rounded, best, axis=1) - np.take_along_axis(exact, best, axis=1)
        assert error_spread(exact, rounded) == pytest.approx(np.ptp(errors, axis=1))

    @pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
    def test_pytorch_that_is_not_finite_explains_nothing(self, broken):
        exact, rounded = self.logits()
        rounded[2, exact[2].argmax()] = broken
        assert np.isnan(spreads_of(exact, rounded, "fp16")[2])

    def test_no_tie_is_more_than_a_small_part_of_the_spread_of_the_best(self):
        """However much PyTorch errs there, or usually."""
        exact, rounded = self.logits(size=5.0)
        most = LARGEST_TIE * upper_spread(exact)
        assert (spreads_of(exact, rounded, "fp16") <= most).all()
        assert (spreads_of(exact, exact, "fp16", usual=1e4) <= most).all()
        assert (upper_spread(exact) < 20.0).all()

    def test_one_rounding_is_always_possible(self):
        constant = np.full((2, 50), 3.0)
        assert spreads_of(constant, constant, "fp16") == pytest.approx([3.0 * EPSILON["fp16"]] * 2)
