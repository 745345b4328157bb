"""Keys with the source last: the same graphs otherwise, and the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from support.rounding import tensor_error

from seq2engine.errors import ExportError
from seq2engine.export.ort_forms.interface import KEYS, TRANSPOSED, specs_with_transposed_keys
from seq2engine.export.ort_forms.transposed_keys import transposed_keys

SIZES = {"B": 2, "K": 3, "S": 5, "L": 16, "M": 19}


def graph_of(bundle, precision, name):
    return onnx.load(bundle.graph_path(precision, name))


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["encoder", "decoder_step"])
def test_numbers_are_the_same(bundles, feeds_for, run_onnx, cache_form, precision, name):
    bundle = bundles("tiny", cache_form)
    plain = graph_of(bundle, precision, name)
    made = transposed_keys(plain)
    onnx.checker.check_model(made, full_check=True)
    spec = bundle.specs(precision)[name]
    feeds = feeds_for(spec, SIZES)
    transposed = {key: array.transpose(TRANSPOSED) if key.startswith(KEYS) else array for key, array in feeds.items()}
    expected, found = run_onnx(plain, feeds), run_onnx(made, transposed)
    for tensor in spec.outputs:
        array = found[tensor.name]
        array = array.transpose(TRANSPOSED) if tensor.name.startswith(KEYS) else array
        near = tensor_error(bundle.config, expected[tensor.name], precision)
        assert np.allclose(array, expected[tensor.name], rtol=0, atol=near), tensor.name


def test_no_node_of_the_step_transposes_keys(bundles):
    made = transposed_keys(graph_of(bundles("tiny", "static"), "fp32", "decoder_step"))
    readers = [node.op_type for node in made.graph.node if any(name.startswith(KEYS) for name in node.input)]
    assert readers == ["MatMul"] * len(readers)
    assert readers


def test_the_contract_transposed(bundles):
    specs = bundles("tiny", "static").specs("fp32")
    transposed = specs_with_transposed_keys(specs)
    heads, width = specs["encoder"].output("cross_k.0").axes[1::2]
    assert transposed["encoder"].output("cross_k.0").axes == ("B", heads, width, "S")
    assert transposed["decoder_step"].input("cross_k.1").axes == ("B", heads, width, "S")
    assert transposed["encoder"].output("cross_v.0") == specs["encoder"].output("cross_v.0")
    assert specs_with_transposed_keys(transposed) == specs


def test_another_graph_is_refused(bundles):
    graph = graph_of(bundles("tiny", "static"), "fp32", "decoder_step")
    product = next(
        node for node in graph.graph.node if node.op_type == "MatMul" and node.name.endswith("cross_attn/MatMul")
    )
    product.input[0] = "other"
    graph.graph.node.insert(0, helper.make_node("Identity", ["self_k.0"], ["other"], name="other"))
    with pytest.raises(ExportError, match="no decoder step of ours"):
        transposed_keys(graph)
