"""The building blocks against cases worked out by hand, and against torch's own where it has one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import EXP, FP32, FP64, apart, sum_error
from torch import Tensor, nn

from seq2engine.model.config import ModelConfig
from seq2engine.model.layers import (
    MASKED,
    Attention,
    CrossAttention,
    FeedForward,
    KeyValue,
    SelfAttention,
    append_slots,
    merge_heads,
    rotary_table,
    rotate,
    sinusoids,
    split_heads,
    write_slots,
)

DOUBLE = sum_error(8, FP64) + apart([(EXP, FP64)])  # of a few exponentials and products
quick = settings(max_examples=40, deadline=None)
few = st.integers(1, 4)
seeds = st.integers(0, 2**31)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def config(heads: int, head_dim: int, **values: object) -> ModelConfig:
    return ModelConfig(heads=heads, d_model=heads * head_dim, d_ff=8, positions="learned", **values)


def plain_attention(heads: int, head_dim: int) -> Attention:
    """Attention whose output projection changes nothing, so that what it attends to can be read off."""
    attention = Attention(config(heads, head_dim)).double()
    with torch.no_grad():
        nn.init.eye_(attention.out.weight)
        nn.init.zeros_(attention.out.bias)
    return attention.requires_grad_(False)


# Positions


def test_sinusoids_by_hand() -> None:
    table = sinusoids(length=4, width=4)  # rates 1 and 10000 ** (-2 / 4) = 0.01
    assert table.dtype == torch.float32
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[1].tolist() == pytest.approx([0.841470985, 0.540302306, 0.009999833, 0.999950000], rel=0, abs=FP32)
    assert table[3].tolist() == pytest.approx(
        [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)], rel=0, abs=FP32
    )


@quick
@given(st.integers(0, 511), st.integers(0, 255))
def test_sinusoids_are_the_formula_of_the_paper(position: int, i: int) -> None:
    angle = position / 10000 ** (2 * i / 512)
    found = SINUSOIDS[position, 2 * i : 2 * i + 2].tolist()
    assert found == pytest.approx([math.sin(angle), math.cos(angle)], rel=0, abs=FP32)


SINUSOIDS = sinusoids(512, 512)


def test_rotary_table_by_hand() -> None:
    table = rotary_table(length=3, head_dim=4)  # rates 1 and 0.01, each for both halves
    assert table.shape == (3, 2, 4)
    assert table.dtype == torch.float32
    a, b = 2.0, 0.02
    assert table[2, 0].tolist() == pytest.approx([math.cos(a), math.cos(b), math.cos(a), math.cos(b)], rel=0, abs=FP32)
    assert table[2, 1].tolist() == pytest.approx([math.sin(a), math.sin(b), math.sin(a), math.sin(b)], rel=0, abs=FP32)


def test_rotation_by_hand() -> None:
    # Of four numbers the first and third turn together, at rate 1, and the second and fourth, at rate 0.01.
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])[None, None, None]
    turned = rotate(x, rotary_table(3, 4)[None, 2:3]).flatten().tolist()
    assert turned == pytest.approx(
        [math.cos(2), -math.sin(0.02), math.sin(2), math.cos(0.02)], rel=0, abs=apart([(4, FP32)])
    )


def rotated(x: Tensor, position: int) -> Tensor:
    """A vector [E] as a query or key at a position."""
    return rotate(x[None, None, None], ROTARY[None, position : position + 1]).flatten()


ROTARY = rotary_table(64, 8).double()


@quick
@given(seeds, st.integers(0, 63))
def test_rotation_keeps_lengths(seed: int, position: int) -> None:
    x = normal(8, seed=seed)
    assert rotated(x, position).norm().item() == pytest.approx(x.norm().item(), rel=2 * FP32)  # the table's rounding


@quick
@given(seeds, st.integers(0, 31), st.integers(0, 31), st.integers(1, 32))
def test_rotary_scores_depend_on_the_distance_only(seed: int, query: int, key: int, shift: int) -> None:
    q, k = normal(2, 8, seed=seed)
    here = (rotated(q, query) @ rotated(k, key)).item()
    there = (rotated(q, query + shift) @ rotated(k, key + shift)).item()
    near = apart([(4, FP32)]) * (q.norm() * k.norm()).item()  # the table is rounded, twice here and twice there
    assert here == pytest.approx(there, rel=0, abs=near)


def test_rotary_scores_do_depend_on_the_distance() -> None:
    q = k = torch.ones(8, dtype=torch.float64)
    scores = [(rotated(q, 0) @ rotated(k, distance)).item() for distance in range(8)]
    assert scores[0] == pytest.approx(8)
    assert len({round(score, 3) for score in scores}) == 8


def test_every_source_turns_by_its_own_positions() -> None:
    x = normal(2, 3, 2, 8)  # [B, H, Q, E]
    positions = torch.tensor([[5, 6], [0, 9]])
    found = rotate(x, ROTARY[positions])
    for b in range(2):
        for query in range(2):
            expected = torch.stack([rotated(x[b, h, query], int(positions[b, query])) for h in range(3)])
            torch.testing.assert_close(found[b, :, query], expected)


# Heads


def test_heads_are_runs_of_columns() -> None:
    x = torch.arange(6.0)[None, None]  # [B, Q, D]
    heads = split_heads(x, 3)
    assert heads.tolist() == [[[[0, 1]], [[2, 3]], [[4, 5]]]]
    assert torch.equal(merge_heads(heads), x)


@quick
@given(few, few, few, few, seeds)
def test_merging_undoes_splitting(batch: int, queries: int, heads: int, head_dim: int, seed: int) -> None:
    x = normal(batch, queries, heads * head_dim, seed=seed)
    assert split_heads(x, heads).shape == (batch, heads, queries, head_dim)
    assert torch.equal(merge_heads(split_heads(x, heads)), x)


# Attention


def test_attention_by_hand() -> None:
    q = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]]).double()
    k = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]]).double()
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [10.0, 10.0]]]]).double()
    mask = torch.tensor([[[[True, True, False], [True, True, True]]]])
    found = plain_attention(1, 2).attend(q, k, v, mask)
    # The first query scores 1 and 0, over sqrt(2), and does not see the third key.
    e = math.exp(1 / math.sqrt(2))
    assert found[0, 0].tolist() == pytest.approx([e / (e + 1), 1 / (e + 1)], rel=DOUBLE)
    # The second scores 0, 2 and 2, over sqrt(2).
    e = math.exp(2 / math.sqrt(2))
    assert found[0, 1].tolist() == pytest.approx([(1 + 10 * e) / (1 + 2 * e), 11 * e / (1 + 2 * e)], rel=DOUBLE)


@quick
@given(few, few, few, st.integers(1, 6), few, st.booleans(), seeds)
def test_attention_is_that_of_torch(
    batch: int, heads: int, queries: int, keys: int, head_dim: int, one_mask_for_all_queries: bool, seed: int
) -> None:
    q = normal(batch, heads, queries, head_dim, seed=seed)
    k, v = normal(2, batch, heads, keys, head_dim, seed=seed + 1)
    mask = normal(batch, 1, 1 if one_mask_for_all_queries else queries, keys, seed=seed + 2) > 0
    mask[..., seed % keys] = True  # torch gives NaN where there is nothing to look at
    attention = Attention(config(heads, head_dim)).double().requires_grad_(False)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attention.attend(q, k, v, mask), attention.out(merge_heads(expected)))


@quick
@given(few, st.integers(2, 6), seeds)
def test_what_is_masked_has_no_weight_at_all(queries: int, keys: int, seed: int) -> None:
    attention = plain_attention(2, 2)
    q = normal(1, 2, queries, 2, seed=seed)
    k, v = normal(2, 1, 2, keys, 2, seed=seed + 1)
    mask = normal(1, 1, 1, keys, seed=seed + 2) > 0
    mask[..., 0] = True
    before = attention.attend(q, k, v, mask)
    hidden = ~mask.transpose(-1, -2).expand_as(k)  # [B, 1, 1, L] -> [B, H, L, E]
    assert torch.equal(attention.attend(q, k.masked_fill(hidden, 1e3), v.masked_fill(hidden, 1e6), mask), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_fully_masked_row_is_the_mean_of_everything(dtype: torch.dtype) -> None:
    q, k, v = (normal(1, 2, 4, 2, seed=seed).to(dtype) for seed in range(3))
    found = plain_attention(2, 2).to(dtype).attend(q, k, v, torch.zeros(1, 1, 1, 4, dtype=torch.bool))
    expected = merge_heads(v.double().mean(dim=2, keepdim=True).expand(-1, -1, 4, -1))
    near = sum_error(4, torch.finfo(dtype).eps / 2) * v.double().abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=near)


def test_the_mask_value_is_a_number_in_fp16() -> None:
    assert torch.tensor(MASKED).half().item() == torch.finfo(torch.float16).min


def test_fp16_scores_do_not_overflow_before_they_are_scaled() -> None:
    # 64 * 40 * 40 = 102400 is beyond fp16; over sqrt(64) it is not.
    q = k = torch.full((1, 1, 2, 64), 40.0).half()
    v = torch.tensor([1.0, 3.0]).half()[None, None, :, None].expand(1, 1, 2, 64)
    found = plain_attention(1, 64).half().attend(q, k, v, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert (found == 2).all()


def test_self_attention_splits_one_product_into_queries_keys_and_values() -> None:
    attention = SelfAttention(config(2, 2)).double().requires_grad_(False)
    x = normal(3, 5, 4)
    weights, biases = attention.qkv.weight.split(4), attention.qkv.bias.split(4)
    q, k, v = (split_heads(x @ w.T + b, 2) for w, b in zip(weights, biases, strict=True))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    found, (keys, values) = attention(x, mask, None)
    torch.testing.assert_close(keys, k)
    torch.testing.assert_close(values, v)
    torch.testing.assert_close(found, attention.attend(q, k, v, mask))


def test_self_attention_turns_queries_and_keys_but_not_values() -> None:
    attention = SelfAttention(config(2, 8)).double().requires_grad_(False)
    x, positions = normal(1, 5, 16), ROTARY[None, 3:8]
    q, k, v = split_heads(attention.qkv(x), 6).chunk(3, dim=1)
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    found, (keys, values) = attention(x, mask, positions)
    torch.testing.assert_close(keys, rotate(k, positions))
    torch.testing.assert_close(values, v)
    torch.testing.assert_close(found, attention.attend(rotate(q, positions), keys, v, mask))


def test_self_attention_attends_to_the_cache_and_itself() -> None:
    attention = SelfAttention(config(2, 2)).double().requires_grad_(False)
    x = normal(2, 3, 4)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    whole, (k, v) = attention(x, causal, None)

    def remember(new_k: Tensor, new_v: Tensor) -> KeyValue:
        assert new_k.shape == new_v.shape == (2, 2, 1, 2)
        return torch.cat((k[:, :, :2], new_k), dim=2), torch.cat((v[:, :, :2], new_v), dim=2)

    last, remembered = attention(x[:, 2:], causal[:, :, 2:], None, remember)
    torch.testing.assert_close(last, whole[:, 2:])
    torch.testing.assert_close(remembered, (k, v))


def test_cross_attention_reads_the_source() -> None:
    attention = CrossAttention(config(2, 2)).double().requires_grad_(False)
    states, x = normal(3, 5, 4), normal(3, 2, 4, seed=1)
    weights, biases = attention.kv.weight.split(4), attention.kv.bias.split(4)
    k, v = (split_heads(states @ w.T + b, 2) for w, b in zip(weights, biases, strict=True))
    projected = attention.project_source(states)
    torch.testing.assert_close(projected, (k, v))
    mask = torch.tensor([[True, True, False, True, False]] * 3)[:, None, None]
    expected = attention.attend(split_heads(attention.q(x), 2), k, v, mask)
    torch.testing.assert_close(attention(x, *projected, mask), expected)


# The cache


@quick
@given(st.data(), few, few, st.integers(1, 3), few, st.integers(1, 8), seeds)
def test_write_slots_writes_there_and_nowhere_else(
    data: st.DataObject, batch: int, heads: int, beams: int, head_dim: int, room: int, seed: int
) -> None:
    slots = beams + room
    index = data.draw(st.lists(st.integers(0, room), min_size=batch, max_size=batch))
    before = normal(batch, heads, slots, head_dim, seed=seed)
    new = normal(batch, heads, beams, head_dim, seed=seed + 1)
    cache = before.clone()
    written = write_slots(cache, new, torch.tensor(index))
    assert written.data_ptr() == cache.data_ptr()
    for b in range(batch):
        for slot in range(slots):
            fresh = index[b] <= slot < index[b] + beams
            expected = new[b, :, slot - index[b]] if fresh else before[b, :, slot]
            assert torch.equal(cache[b, :, slot], expected)


@quick
@given(few, few, few, few, st.integers(0, 6), seeds)
def test_append_slots_appends(batch: int, heads: int, beams: int, head_dim: int, slots: int, seed: int) -> None:
    cache = normal(batch, heads, slots, head_dim, seed=seed)
    new = normal(batch, heads, beams, head_dim, seed=seed + 1)
    grown = append_slots(cache, new, torch.full((batch,), slots))
    assert grown.shape == (batch, heads, slots + beams, head_dim)
    assert torch.equal(grown[:, :, :slots], cache)
    assert torch.equal(grown[:, :, slots:], new)


# Feed-forward


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("silu", lambda x: x / (1 + math.exp(-x))),
    ],
)
def test_feed_forward_by_hand(activation: str, formula: object) -> None:
    layer = FeedForward(config(1, 2, activation=activation)).double().requires_grad_(False)
    nn.init.zeros_(layer.up.weight)
    layer.up.weight[0, 0] = layer.up.weight[1, 1] = 1.0
    nn.init.zeros_(layer.up.bias)
    nn.init.ones_(layer.down.weight)
    layer.down.bias[:] = torch.tensor([0.5, -0.5])
    found = layer(torch.tensor([1.3, -0.7], dtype=torch.float64))
    total = formula(1.3) + formula(-0.7)
    assert found.tolist() == pytest.approx([total + 0.5, total - 0.5], rel=DOUBLE)
