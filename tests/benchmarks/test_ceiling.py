"""The ceiling: small enough to measure here, and a bound that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.ceiling import WIDTHS, Ceiling, ceiling_of, encoder_work, least_ms, step_work
from seq2engine.export.contract import PRECISIONS
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

MODEL = dataclasses.asdict(ModelConfig(encoder_layers=2, decoder_layers=3, d_model=10, heads=2, d_ff=20))
CASE = Case("case", batch=2, beam=3, source=4, target=8)


def test_it_is_measured_with_the_threads_of_an_arm_and_leaves_the_process_as_it_was() -> None:
    before = torch.get_num_threads()
    found = ceiling_of(threads=2, buffers=(1 << 18, 1 << 20), sizes=(32,))
    assert found.read_bytes_per_second > 1e6
    assert [size for size, _ in found.cached] == [1 << 18, 1 << 20]
    assert found.flops_per_second > 1e6
    assert torch.get_num_threads() == before


def test_the_work_of_a_step() -> None:
    weights = 3 * (6 * 100 + 2 * 200) + 10 * 32000
    work = step_work(CASE, MODEL, "w8a8")
    assert work.bytes == weights + 4 * 2 * 10 * 3 * 2 * (4 + 4)  # of two sources four slots each, cross and self
    assert work.flops == 2 * weights * 6 / 4 + 3 * 4 * 10 * 6 * (4 + 4)  # int8 products, attention in fp32
    half = step_work(CASE, MODEL, "fp16")
    assert half.bytes == 2 * weights + 2 * 2 * 10 * 3 * 2 * (4 + 4)
    assert half.flops == work.flops + 2 * weights * 6 / 4 - 3 * 4 * 10 * 6 * (4 + 4) / 2


def test_a_single_beam_reads_the_output_projection_in_int8() -> None:
    greedy = dataclasses.replace(CASE, beam=1)
    layers, projection = 3 * (6 * 100 + 2 * 200), 10 * 32000
    assert step_work(greedy, MODEL, "fp32").bytes == 4 * layers + projection + 4 * 2 * 10 * 3 * 2 * (4 + 4)


def test_what_fits_in_a_cache_is_read_at_its_rate() -> None:
    """The best rate from the next smaller buffer up, so that a bound is never one that a faster level breaks."""
    ceiling = Ceiling(5.0, 1.0, ((1 << 20, 40.0), (2 << 20, 50.0), (4 << 20, 6.0)))
    sizes = {1 << 10: 50.0, 1 << 20: 50.0, 3 << 20: 50.0, 4 << 20: 6.0, 7 << 20: 6.0, 8 << 20: 5.0, 1 << 30: 5.0}
    assert {size: ceiling.read_rate(size) for size in sizes} == sizes
    assert Ceiling(5.0, 1.0).read_rate(1) == 5.0  # a result from before they were measured


def test_the_weights_counted_are_those_of_the_model() -> None:
    """All matrices of the decoder but the cross K/V's, which the encoder's side has; biases and norms are small."""
    config = dataclasses.replace(PRESETS["tiny"], d_model=64)
    model = random_model(config)
    case = Case("one", 1, 1, 0, 0)  # no cache, no attention
    values = dataclasses.asdict(config)
    counted = sum(work(case, values, "w8a8").bytes for work in (encoder_work, step_work))
    tables = {"source_embedding.tokens.weight", "target_embedding.tokens.weight"}
    matrices = sum(
        tensor.numel()
        for name, tensor in model.state_dict().items()
        if tensor.ndim == 2 and name not in tables and "positions" not in name
    )
    assert counted == matrices


@pytest.mark.parametrize(("bandwidth", "flops"), [(1e6, 1e15), (1e15, 1e6)])
def test_the_slower_of_both_is_the_bound(bandwidth: float, flops: float) -> None:
    ceiling = Ceiling(bandwidth, flops)
    work = step_work(CASE, MODEL, "fp32")
    step = least_ms(CASE, MODEL, "fp32", "step", ceiling)
    assert step == pytest.approx(1000 * (work.bytes / bandwidth if bandwidth < flops else work.flops / flops))
    whole = least_ms(CASE, MODEL, "fp32", "end_to_end", ceiling)
    assert whole == pytest.approx(least_ms(CASE, MODEL, "fp32", "encoder", ceiling) + 8 * step)


def test_every_precision_has_a_width() -> None:
    assert set(WIDTHS) >= set(PRECISIONS)
