"""Attention over the source, with padding and without."""

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
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 100), st.integers(1, 70))
MASKS = ["none", "all seen", "padding", "holes", "nothing seen"]


def arrays(seed: int, sources: int, beams: int, heads: int, length: int, width: int, masked: str = "none"):
    """Keys are [B,H,S,E] here."""
    rng = np.random.default_rng(seed)
    found = {"q": rng.normal(size=(sources, beams, heads * width)).astype(np.float32)}
    found |= {name: rng.normal(size=(sources, heads, length, width)).astype(np.float32) for name in ("k", "v")}
    lengths = rng.integers(1, length + 1, sources)
    masks = {
        "all seen": np.ones((sources, length), bool),
        "padding": np.arange(length) < lengths[:, None],
        "holes": rng.random((sources, length)) < 0.5,
        "nothing seen": np.zeros((sources, length), bool),
    }
    return found | ({"source_mask": masks[masked]} if masked in masks else {})


def attended(found: dict[str, np.ndarray], heads: int, transposed: bool, threads: int = 1, shown: bool = True) -> dict:
    if transposed:
        found = {**found, "k": np.ascontiguousarray(found["k"].swapaxes(2, 3))}
    outputs = ["context", "weights"] if shown else ["context"]
    names = {name: name for name in found}
    node = ops.cross_attention("attention", outputs, **names, heads=heads, scale=0.3, transposed=transposed)
    return run_node(node, found, threads)


def assert_right(found: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    sources, heads, length, width = found["v"].shape
    beams = found["q"].shape[1]
    queries = found["q"].reshape(sources, beams, heads, width).astype(np.float64)
    for source, beam, head in np.ndindex(sources, beams, heads):
        mask = found["source_mask"][source] if "source_mask" in found else np.ones(length, bool)
        q = queries[source, beam, head] * (SCALE if mask.any() else 0)
        seen = np.flatnonzero(mask if mask.any() else ~mask)
        k, v = found["k"][source, head], found["v"][source, head]
        scores = k[seen].astype(np.float64) @ q
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        of_weights, of_context = attention_error(q, k, v, 1.0, seen)
        context = outputs["context"][source, beam].reshape(heads, width)[head]
        assert (np.abs(context - weights @ v[seen].astype(np.float64)) <= of_context).all(), (source, beam, head)
        if "weights" in outputs:
            row = outputs["weights"][source, head, beam]
            assert (np.abs(row[seen] - weights) <= of_weights).all(), (source, beam, head)
            assert not np.delete(row, seen).any()


@given(st.integers(0, 99), SIZES, st.sampled_from(MASKS), st.integers(1, 2))
@settings(max_examples=25)
@example(0, (4, 5, 4, 100, 64), "holes", 2)
@example(1, (1, 1, 8, 90, 64), "none", 2)
@example(2, (3, 4, 2, 33, 17), "nothing seen", 1)
def test_transposed_keys_are_exact_but_for_rounding(seed, sizes, masked, threads):
    found = arrays(seed, *sizes, masked)
    assert_right(found, attended(found, sizes[2], True, threads))


@given(st.integers(0, 99), SIZES, st.integers(1, 2))
@settings(max_examples=15)
@example(0, (4, 5, 4, 100, 64), 2)
def test_keys_by_rows_are_exact_but_for_rounding(seed, sizes, threads):
    found = arrays(seed, *sizes)
    assert_right(found, attended(found, sizes[2], False, threads))


@pytest.mark.parametrize("masked", MASKS[1:])
def test_keys_by_rows_may_have_a_mask(masked):
    found = arrays(0, 3, 2, 2, 21, 16, masked)
    assert_right(found, attended(found, 2, False))


@pytest.mark.parametrize("transposed", [True, False])
def test_weights_are_made_for_those_who_ask(transposed):
    found = arrays(0, 3, 2, 2, 21, 16)
    with_weights, without = (attended(found, 2, transposed, shown=shown) for shown in (True, False))
    assert same_bits(with_weights["context"], without["context"])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_no_number_shows_and_stays_in_its_beam(transposed, wrong):
    found = arrays(0, 3, 6, 2, 21, 16)
    before = attended(found, 2, transposed)["context"]
    found["q"][1, 4, 3] = wrong  # of head 0
    after = attended(found, 2, transposed)["context"]
    assert not np.isfinite(after[1, 4, :16]).any()
    others = np.ones((3, 6), bool)
    others[1, 4] = False
    assert same_bits(after[others], before[others])


def test_shapes_that_do_not_fit_are_an_error():
    found = arrays(0, 3, 2, 2, 21, 16, "padding")
    with pytest.raises(Exception, match=r"CrossAttention: .* do not fit"):
        attended({**found, "source_mask": found["source_mask"][:, 1:]}, 2, True)
    with pytest.raises(Exception, match=r"CrossAttention: .* do not fit"):
        attended({**found, "q": found["q"][:, :, 1:]}, 2, True)


@pytest.mark.parametrize("transposed", [True, False])
def test_an_empty_batch_is_empty(transposed):
    found = {name: array[:0] for name, array in arrays(0, 1, 2, 2, 13, 20).items()}
    assert attended(found, 2, transposed)["context"].shape == (0, 2, 40)
