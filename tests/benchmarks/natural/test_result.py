"""Workloads as text, and ratios of all calls together."""

from __future__ import annotations

import pytest
from support.bench_results import samples

from seq2engine.benchmarks.natural.result import Workload, whole_ratio, workloads_from_text
from seq2engine.errors import UsageError


def test_workloads_are_batch_x_beam() -> None:
    assert workloads_from_text(["1x1", "32x4"]) == (Workload(1, 1), Workload(32, 4))


@pytest.mark.parametrize("text", ["8", "0x1", "8x4x2", "ax1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected batch x beam, such as 8x4"):
        workloads_from_text([text])


@pytest.mark.parametrize(("batch", "sentences", "calls"), [(1, 384, 64), (8, 384, 12), (32, 384, 12), (32, 40, 1)])
def test_calls_are_as_many_as_there_are_sentences_for(batch: int, sentences: int, calls: int) -> None:
    assert Workload(batch, 1).calls(sentences) == calls


def test_a_ratio_is_of_all_calls_and_its_interval_of_single_ones() -> None:
    ratio = whole_ratio(samples(*[2] * 7, 30), samples(*[1] * 7, 10))
    assert ratio.value == pytest.approx(44 / 17)
    assert ratio.low == 2
    assert ratio.high == 3
    assert ratio.verdict == "faster"
