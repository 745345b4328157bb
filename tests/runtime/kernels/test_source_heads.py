"""Keys and values of the source, cut into heads: numbers are moved, and none is changed."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_sessions import run_node, same_bits

from seq2engine.export.kernel_forms import ops

pytestmark = pytest.mark.usefixtures("vectors")
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 20))


def cut(kv: np.ndarray, heads: int, transposed: bool, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    node = ops.source_heads("heads", ["keys", "values"], kv="kv", heads=heads, transposed=transposed)
    found = run_node(node, {"kv": kv}, threads)
    return found["keys"], found["values"]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@given(SIZES, st.booleans(), st.integers(1, 2))
@settings(max_examples=20)
@example((5, 8, 67, 64), False, 2)  # enough for both threads
@example((5, 8, 67, 64), True, 2)
@example((1, 1, 16, 16), True, 1)  # one whole line of the cache
def test_cuts_heads(sizes, transposed, threads):
    sources, heads, length, width = sizes
    kv = normal(sources, length, 2 * heads * width)
    keys, values = kv.reshape(sources, length, 2, heads, width).transpose(2, 0, 3, 1, 4)
    keys = keys.swapaxes(2, 3) if transposed else keys
    found = cut(kv, heads, transposed, threads)
    assert same_bits(found[0], np.ascontiguousarray(keys))
    assert same_bits(found[1], np.ascontiguousarray(values))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12), (2, 5, 0)])
def test_an_empty_batch_is_empty(shape, transposed):
    keys, values = cut(np.zeros(shape, np.float32), 2, transposed)
    sources, length, width = shape[0], shape[1], shape[2] // 4
    assert values.shape == (sources, 2, length, width)
    assert keys.shape == ((sources, 2, width, length) if transposed else values.shape)


@pytest.mark.parametrize(("shape", "heads"), [((2, 5, 12), 4), ((2, 5, 12), 0), ((2, 5, 12), -2), ((5, 12), 2)])
def test_a_width_that_does_not_fit_the_heads_is_an_error(shape, heads):
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="does not fit the heads"):
        cut(normal(*shape), heads, False)
