"""Rows of a table, scaled and with positions: the bits of separate operators, from the table or its packed form."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper
from support.kernel_sessions import options_of, run_node, same_bits

from seq2engine.export.kernel_forms import ops
from seq2engine.export.kernel_forms.ops import DOMAIN, VERSION

pytestmark = pytest.mark.usefixtures("vectors")
PLACES = {"each": (3, 5), "of a source": (3, 1), "of all sources": (1, 5), "one axis": (3,), "one": (1, 1), "none": ()}
FACTOR = float(np.float32(22.627417))
VOCAB = 70


def arrays(seed: int, width: int, int8: bool, places: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.integers(-127, 128, (VOCAB, width)).astype(np.int8) if int8 else normal(rng, VOCAB, width)
    found = {"tokens": rng.integers(0, VOCAB, (3, 5)), "table": table}
    if int8:
        found["scale"] = np.abs(normal(rng, VOCAB))
    if shape := PLACES[places]:
        found |= {"positions": normal(rng, 12, width), "place": rng.integers(0, 12, shape)}
    return found


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def columns(seed: int, width: int, int8: bool, count: int) -> dict[str, np.ndarray]:
    """With positions for that many columns, and no place: tokens have 5 columns."""
    return arrays(seed, width, int8, "none") | {"positions": normal(np.random.default_rng(seed + 1), count, width)}


def node_of(found: dict[str, np.ndarray]) -> NodeProto:
    return ops.embedding("embedding", "x", **{name: name for name in found}, factor=FACTOR)


def expected(found: dict[str, np.ndarray]) -> np.ndarray:
    rows = found["table"][found["tokens"]].astype(np.float32)
    rows = rows * found["scale"][found["tokens"]][..., None] if "scale" in found else rows
    rows = rows * np.float32(FACTOR)
    if "positions" not in found:
        return rows
    place = found.get("place", np.arange(found["tokens"].shape[1])[None])
    return rows + found["positions"][place[:, None] if place.ndim == 1 else place]


@given(st.integers(0, 99), st.integers(1, 70), st.booleans(), st.sampled_from(sorted(PLACES)), st.integers(1, 2))
@settings(max_examples=40)
def test_is_what_separate_operators_compute(seed, width, int8, places, threads):
    found = arrays(seed, width, int8, places)
    assert same_bits(run_node(node_of(found), found, threads)["x"], expected(found))


@given(st.integers(0, 99), st.integers(1, 70), st.booleans(), st.integers(5, 12), st.integers(1, 2))
@settings(max_examples=20)
def test_without_a_place_columns_are_counted(seed, width, int8, count, threads):
    found = columns(seed, width, int8, count)
    assert same_bits(run_node(node_of(found), found, threads)["x"], expected(found))
    one = {**found, "tokens": found["tokens"][:, :1]}
    assert same_bits(run_node(node_of(one), one, threads)["x"], expected(one))


def test_columns_are_those_of_the_tokens_in_every_part_of_the_work():
    """Parts are of 32 tokens, whatever the columns."""
    found = columns(1, 600, False, 99) | {"tokens": np.random.default_rng(2).integers(0, VOCAB, (5, 99))}
    assert same_bits(run_node(node_of(found), found, 2)["x"], expected(found))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_more_columns_than_positions_are_an_error(count):
    found = columns(1, 6, False, count)
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="not in its table"):
        run_node(node_of(found), found)


def test_a_place_without_positions_is_an_error():
    found = arrays(1, 6, False, "none") | {"place": np.zeros((3, 5), dtype=np.int64)}
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="do not fit"):
        run_node(node_of(found), found)


def test_many_tokens_are_divided_among_threads():
    found = arrays(1, 600, False, "none") | {"tokens": np.random.default_rng(2).integers(0, VOCAB, (5, 99))}
    assert same_bits(run_node(node_of(found), found, 2)["x"], expected(found))


def test_no_tokens():
    found = arrays(1, 6, False, "none") | {"tokens": np.zeros((0, 5), dtype=np.int64)}
    assert run_node(node_of(found), found)["x"].shape == (0, 5, 6)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_is_not_in_the_table_is_an_error(token):
    found = arrays(1, 6, False, "none")
    found["tokens"][1, 2] = token
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="not in its table"):
        run_node(node_of(found), found)


@pytest.mark.parametrize("place", [-1, 12])
def test_a_position_that_is_not_in_the_table_is_an_error(place):
    found = arrays(1, 6, True, "each")
    found["place"][2, 1] = place
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="not in its table"):
        run_node(node_of(found), found)


def test_positions_of_other_tokens_are_an_error():
    found = arrays(1, 6, True, "each") | {"place": np.zeros((2, 5), dtype=np.int64)}
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="neither one for all tokens"):
        run_node(node_of(found), found)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("width", [6, 64])
def test_the_packed_table_of_the_output_projection_serves_as_well(int8, width):
    """After the first call the projection has packed the table, and the embedding reads that copy: the table itself is
    overwritten here, which no result shows."""
    found = arrays(4, width, int8, "each")
    table = found["table"].copy()
    lookup = node_of(found)
    scale = "scale" if int8 else ""
    names = ["logits", "exp_sum", "best_logits", "best_tokens"]
    projection = ops.candidates(
        "output", names, x="state", table="table", scale=scale, wanted="wanted", by_rows=True, screened=False
    )
    fed = {"tokens": found["tokens"], "place": found["place"], "wanted": np.array([0])}
    fed["state"] = normal(np.random.default_rng(5), 1, 2, width)
    inputs = [helper.make_tensor_value_info(n, kind_of(a), [None] * a.ndim) for n, a in fed.items()]
    kinds = {"x": TensorProto.FLOAT, **dict.fromkeys(names, TensorProto.FLOAT), "best_tokens": TensorProto.INT64}
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    stored = [numpy_helper.from_array(array, name) for name, array in found.items() if name not in fed]
    graph = helper.make_graph([lookup, projection], "both", inputs, outputs, stored)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    options, value = options_of(1), ort.OrtValue.ortvalue_from_numpy(table)
    options.add_initializer("table", value)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    first = session.run(["x"], fed)[0]
    assert same_bits(first, expected(found))
    session.run(["logits"], fed)
    table[:] = 0
    assert same_bits(session.run(["x"], fed)[0], first)


def kind_of(array: np.ndarray) -> int:
    return helper.np_dtype_to_tensor_dtype(array.dtype)
