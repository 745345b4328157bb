"""Models at several precisions over one copy of the weights: the same numbers as models of their own."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.rounded import BLOCK, model_at, rounded

IDS = torch.tensor([[5, 9, 11], [7, 2, 0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
TARGETS = torch.tensor([[1, 8, 9], [1, 4, 7]])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_in_fp64_it_is_the_model_widened(positions, tied):
    model = random_model(
        dataclasses.replace(PRESETS["tiny"], positions=positions, share_embeddings=tied, tie_output=tied)
    )
    own = copy.deepcopy(model).double()
    with torch.inference_mode():
        shared, alone = (made(IDS, MASK, TARGETS) for made in (model_at(model, torch.float64), own))
    assert shared.dtype == torch.float64
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_is_summed_in_fp32_and_rounded_once(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    narrow = rounded(linear, dtype)
    narrow.bias = nn.Parameter(linear.bias.to(dtype))
    x = torch.randn(5, 64).to(dtype)
    exact = x.double() @ linear.weight.to(dtype).double().T + linear.bias.to(dtype).double()
    found = narrow(x)
    assert found.dtype == dtype
    # Half a unit in the last place for the one rounding; the sum in fp32 is exact beside it, but may cross a middle.
    spacing = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(exact.abs()))
    in_fp32 = 64 * torch.finfo(torch.float32).eps * (x.abs().double() @ linear.weight.abs().double().T + 1)
    assert ((found.double() - exact).abs() <= spacing / 2 + in_fp32).all()


def test_a_table_of_many_blocks_gives_what_one_block_gives():
    torch.manual_seed(0)
    width = 128
    linear = nn.Linear(width, 2 * BLOCK // width + 3)
    blocks = rounded(linear, torch.float64)
    blocks.bias = nn.Parameter(linear.bias.double())
    x = torch.randn(2, 3, width, dtype=torch.float64)
    own = copy.deepcopy(linear).double()
    bound = width * torch.finfo(torch.float64).eps * (x.abs() @ own.weight.abs().T + own.bias.abs())
    assert ((blocks(x) - own(x)).abs() <= bound).all()


def test_the_tables_are_shared_and_stay_as_they_are():
    model = random_model("tiny")
    before = copy.deepcopy(model.state_dict())
    made = [model_at(model, dtype) for dtype in (torch.float64, torch.float16)]
    assert all(one.output.weight is model.output.weight for one in made)
    assert all(one.source_embedding.tokens.weight is model.source_embedding.tokens.weight for one in made)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_what_fp16_cannot_hold_is_computed_in_fp32():
    model = random_model("tiny")
    with torch.no_grad():
        model.decoder[0].feed_forward.up.weight[0] = 70000.0  # infinity in fp16
    plain = model_at(model, torch.float16)
    kept = model_at(model, torch.float16, {"decoder.0.feed_forward.up/MatMul", "decoder.0.feed_forward.down/MatMul"})
    with torch.inference_mode():
        assert not plain(IDS, MASK, TARGETS).isfinite().all()
        assert kept(IDS, MASK, TARGETS).isfinite().all()


def test_a_bias_that_fp16_cannot_hold_is_added_in_fp32_and_the_product_stays_fp16():
    model = random_model(dataclasses.replace(PRESETS["tiny"], output_bias=True))
    with torch.no_grad():
        model.output.bias[-1] = -1e9
    narrow = model_at(model, torch.float16, {"output/Add"})
    with torch.inference_mode():
        logits = narrow(IDS, MASK, TARGETS)
        plain = model_at(model, torch.float16)(IDS, MASK, TARGETS)
    assert logits.dtype == torch.float32
    assert (logits[..., -1] + 1e9).abs().max() < 64 * 10  # units in the last place of 1e9, for logits below ten
    assert (plain[..., -1] == -torch.inf).all()


def test_a_table_that_fp16_reads_too_is_rounded_for_all():
    model = random_model(dataclasses.replace(PRESETS["tiny"], tie_output=True, share_embeddings=True))
    both = {"target_embedding.tokens/Gather", "source_embedding.tokens/Gather"}
    table = model.output.weight
    one = model_at(model, torch.float16, both).target_embedding.tokens(IDS)
    assert torch.equal(one, table[IDS].half().float())
    all_readers = model_at(model, torch.float16, {*both, "output/MatMul"}).target_embedding.tokens(IDS)
    assert torch.equal(all_readers, table[IDS])


def test_nothing_is_filled_that_has_its_weight_already(monkeypatch):
    """PyTorch imports its compiler to fill a table without memory: two seconds of every first parity."""
    model = random_model(PRESETS["tiny"])

    def refuse(tensor, *rest, **named):
        raise AssertionError("a weight is filled")

    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(nn.init, name, refuse)
    model_at(model, torch.float64)
