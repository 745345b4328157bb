"""The graphs that move a decode's state: in ONNX Runtime they do what numpy does, and TensorRT builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.export.contract import GraphSpec, TensorSpec
from seq2engine.export.device_graphs.gathers import gather_rows, gather_slots, put_columns, put_places, put_rows
from seq2engine.export.engines.build import build_engine
from seq2engine.runtime.fitting import fitted

HEADS, WIDTH = 3, 4
DTYPES = ("float32", "float16", "bool", "int64")


def cache_specs(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(f"self_{part}.0", dtype, ("B", HEADS, "L", WIDTH)) for part in "kv"]


def kept_specs(dtype: str) -> list[TensorSpec]:
    return [
        TensorSpec("cross_v.0", dtype, ("B", HEADS, "S", WIDTH)),
        TensorSpec("cross_k.0", dtype, ("B", HEADS, WIDTH, "S")),  # keys as ONNX Runtime's form stores them
        TensorSpec("encoder_states", dtype, ("B", "S", WIDTH)),
        TensorSpec("source_mask", "bool", ("B", "S")),
    ]


def numbers(rng: np.random.Generator, tensor: TensorSpec, sizes: dict[str, int]) -> np.ndarray:
    return rng.integers(0, 1 if 0 in tensor.shape(sizes) else 100, tensor.shape(sizes)).astype(tensor.dtype)


def run(made: tuple[onnx.ModelProto, GraphSpec], given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model, spec = made
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [tensor.name for tensor in session.get_inputs()] == [tensor.name for tensor in spec.inputs]
    names = [tensor.name for tensor in spec.outputs]
    return dict(zip(names, session.run(names, given), strict=True))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 4), slots=st.integers(0, 5), dtype=st.sampled_from(DTYPES))
def test_rows_are_those_of_numpy(seed: int, batch: int, slots: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    tensors = [*cache_specs(dtype), *kept_specs(dtype)]
    given = {tensor.name: numbers(rng, tensor, {"B": batch, "L": slots, "S": 3}) for tensor in tensors}
    rows = rng.integers(0, batch, rng.integers(1, 5))
    found = run(gather_rows(tensors), {**given, "rows": rows})
    assert len(found) == len(tensors)
    for name, array in given.items():
        assert np.array_equal(found[f"new_{name}"], array[rows])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    before=st.integers(1, 5),
    after=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_slots_are_those_of_numpy(seed: int, batch: int, before: int, after: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    tensors = cache_specs(dtype)
    given = {tensor.name: numbers(rng, tensor, {"B": batch, "L": before}) for tensor in tensors}
    rows = rng.integers(0, batch, rng.integers(1, 5))
    slots = rng.integers(0, before, (len(rows), after))
    found = run(gather_slots(tensors), {**given, "rows": rows, "slots": slots})
    for name, array in given.items():
        assert np.array_equal(found[f"new_{name}"], np.take_along_axis(array[rows], slots[:, None, :, None], axis=2))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 5),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8)),
    dtype=st.sampled_from(DTYPES[:2]),
)
def test_newcomers_take_rows_and_sources_get_a_width(
    seed: int, batch: int, lengths: tuple[int, int, int], dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    before, coming, width = lengths
    rows = rng.permutation(batch)[: rng.integers(1, batch + 1)]
    tensors = kept_specs(dtype)
    given = {tensor.name: numbers(rng, tensor, {"B": batch, "S": before}) for tensor in tensors}
    newcomers = {tensor.name: numbers(rng, tensor, {"B": len(rows), "S": coming}) for tensor in tensors}
    places = {
        "rows": put_places(batch, rows),
        "columns": put_columns(before, width),
        "new_columns": put_columns(coming, width),
    }
    found = run(put_rows(tensors), {**given, **{f"put_{name}": one for name, one in newcomers.items()}, **places})
    for tensor in tensors:
        axis = tensor.axes.index("S")
        wanted = np.array(fitted(given[tensor.name], axis, width))
        wanted[rows] = fitted(newcomers[tensor.name], axis, width)
        assert np.array_equal(found[f"new_{tensor.name}"], wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("make", [gather_rows, gather_slots, put_rows])
def test_tensorrt_builds_them(make: Any, dtype: str, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    tensors = {gather_slots: cache_specs, put_rows: kept_specs}.get(make, kept_specs)(dtype)
    model, spec = make(tensors)
    most = {"B": 8, "R": 8, "N": 8, "L": 64, "T": 64, "S": 32, "P": 32, "W": 32}
    shapes = {
        tensor.name: (tensor.shape(dict.fromkeys(most, 1)), tensor.shape(most), tensor.shape(most))
        for tensor in spec.inputs
    }
    assert build_engine(trt, model, tmp_path / f"{spec.name}.onnx", shapes, ["sm86"], lambda done: None)
