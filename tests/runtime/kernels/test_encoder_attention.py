"""Attention of a source's places over each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_bounds import attention_error
from support.kernel_sessions import run_node, same_bits

from seq2engine.export.kernel_forms import ops

pytestmark = pytest.mark.usefixtures("vectors")
SCALE = float(np.float32(0.3))
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 97, 130]))
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), LENGTHS, st.integers(1, 70))
MASKS = ["none", "all seen", "padding", "holes", "nothing seen"]


def arrays(seed: int, sources: int, heads: int, length: int, width: int, masked: str = "none") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(sources, length, 3 * heads * width)).astype(np.float32)
    masks = {
        "all seen": np.ones((sources, length), bool),
        "padding": np.arange(length) < rng.integers(1, length + 1, sources)[:, None],
        "holes": rng.random((sources, length)) < 0.5,
        "nothing seen": np.zeros((sources, length), bool),
    }
    return {"qkv": qkv} | ({"source_mask": masks[masked]} if masked in masks else {})


def attended(found: dict[str, np.ndarray], heads: int, threads: int = 1) -> np.ndarray:
    node = ops.node("EncoderAttention", list(found), ["context"], "attention", heads=heads, scale=0.3)
    return run_node(node, found, threads)["context"]


@given(st.integers(0, 99), SIZES, st.sampled_from(MASKS), st.integers(1, 2))
@settings(max_examples=15)
@example(0, (3, 3, 97, 64), "holes", 2)
@example(1, (1, 1, 530, 5), "none", 1)
@example(2, (2, 2, 33, 17), "nothing seen", 1)
def test_is_exact_but_for_rounding(seed, sizes, masked, threads):
    sources, heads, length, width = sizes
    found = arrays(seed, *sizes, masked)
    context = attended(found, heads, threads).reshape(sources, length, heads, width)
    q, k, v = found["qkv"].reshape(sources, length, 3, heads, width).transpose(2, 0, 3, 1, 4)
    for source, head in np.ndindex(sources, heads):
        mask = found["source_mask"][source] if "source_mask" in found else np.ones(length, bool)
        seen = np.flatnonzero(mask if mask.any() else ~mask)
        for place in {0, length // 2, length - 1}:
            query = q[source, head, place].astype(np.float64) * (SCALE if mask.any() else 0)
            scores = k[source, head][seen].astype(np.float64) @ query
            weights = np.exp(scores - scores.max())
            exact = weights / weights.sum() @ v[source, head][seen].astype(np.float64)
            allowed = attention_error(query, k[source, head], v[source, head], 1.0, seen)[1]
            assert (np.abs(context[source, place, head] - exact) <= allowed).all(), (source, head, place)


@pytest.mark.parametrize("padding", [1, 31, 60])
def test_padding_and_other_sources_change_no_bit(padding):
    found = arrays(0, 3, 2, 45, 24, "holes")
    together = attended(found, 2)
    padded = {name: np.pad(array, ((0, 0), (0, padding), (0, 0))[: array.ndim]) for name, array in found.items()}
    assert same_bits(np.ascontiguousarray(attended(padded, 2, threads=2)[:, :45]), together)
    alone = {name: array[1:2] for name, array in found.items()}
    assert same_bits(attended(alone, 2), together[1:2])


def test_masked_places_may_hold_anything():
    found = arrays(0, 2, 2, 45, 24, "holes")
    before, mask = attended(found, 2), found["source_mask"]
    found["qkv"][~mask] = np.nan
    assert same_bits(attended(found, 2)[mask], before[mask])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_shows_and_stays_in_its_place(wrong):
    found = arrays(0, 2, 2, 45, 24)
    before = attended(found, 2)
    found["qkv"][1, 7, 3] = wrong  # of the query of head 0
    after = attended(found, 2)
    assert not np.isfinite(after[1, 7, :24]).any()
    others = np.ones((2, 45), bool)
    others[1, 7] = False
    assert same_bits(after[others], before[others])


def test_shapes_that_do_not_fit_are_an_error():
    found = arrays(0, 2, 2, 45, 24, "padding")
    with pytest.raises(Exception, match=r"EncoderAttention: .* do not fit"):
        attended({**found, "source_mask": found["source_mask"][:, 1:]}, 2)
    with pytest.raises(Exception, match=r"EncoderAttention: .* do not fit"):
        attended({**found, "qkv": found["qkv"][..., 1:]}, 2)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12)])
def test_an_empty_batch_is_empty(shape):
    assert attended({"qkv": np.zeros(shape, np.float32)}, 2).shape == (*shape[:2], 4)
