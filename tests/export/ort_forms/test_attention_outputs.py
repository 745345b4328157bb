"""The decoder step with its attention as outputs: the same graph otherwise, found by name and held to its shape."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.rounding import apart, exp_sum_error, tensor_error, unit

from seq2engine.errors import ExportError
from seq2engine.export.audit import axes_of, dtype_of
from seq2engine.export.contract import attention_name
from seq2engine.export.ort_forms.attention_outputs import attention_graph

SIZES = {"B": 2, "K": 3, "S": 5, "L": 16, "M": 19}
NAMES = [attention_name(0), attention_name(1)]


def step_of(bundle, precision="fp32", load_external_data=True):
    path = bundle.graph_path(precision, "decoder_step")
    return onnx.load(path, load_external_data=load_external_data)


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_outputs_are_added_and_nothing_else_changes(bundles, feeds_for, run_onnx, cache_form, precision):
    bundle = bundles("tiny", cache_form)
    plain = step_of(bundle, precision)
    made = attention_graph(plain, 2)
    onnx.checker.check_model(made, full_check=True)
    spec = bundle.specs(precision)["decoder_step"]
    assert [output.name for output in made.graph.output] == [*(tensor.name for tensor in spec.outputs), *NAMES]
    for value in list(made.graph.output)[-2:]:
        assert axes_of(value) == ("B", bundle.config.heads, "K", "S")
        assert dtype_of(value.type.tensor_type.elem_type) == {"fp32": "float32", "fp16": "float16"}[precision]
    assert [node.name for node in made.graph.node] == [node.name for node in plain.graph.node]
    assert made.graph.initializer == plain.graph.initializer

    feeds = feeds_for(spec, SIZES)
    outputs = run_onnx(made, feeds)
    weights = [outputs.pop(name) for name in NAMES]
    for name, array in run_onnx(plain, feeds).items():
        near = tensor_error(bundle.config, array, precision)
        np.testing.assert_allclose(outputs[name], array, rtol=0, atol=near)
    for array in weights:
        assert array.shape == (2, bundle.config.heads, 3, 5)
        near = exp_sum_error(array.shape[-1]) + apart([(1, unit(precision)[1])])
        np.testing.assert_allclose(array.sum(axis=-1, dtype=np.float64), 1, rtol=0, atol=near)
        assert (array[~np.broadcast_to(feeds["source_mask"][:, None, None], array.shape)] == 0).all()


def test_the_given_graph_is_left_as_it_was(bundles):
    plain = step_of(bundles())
    before = plain.SerializeToString(deterministic=True)
    attention_graph(plain, 2)
    assert plain.SerializeToString(deterministic=True) == before


def test_weights_need_not_be_loaded(bundles):
    made = attention_graph(step_of(bundles(), load_external_data=False), 2)
    assert [output.name for output in made.graph.output][-2:] == NAMES
    assert made.ByteSize() < 100_000


def test_another_graph_is_refused(bundles):
    bundle = bundles()
    encoder = onnx.load(bundle.graph_path("fp32", "encoder"))
    with pytest.raises(ExportError, match=r"encoder has 0 Softmax nodes in decoder\.0\.cross_attn, expected one"):
        attention_graph(encoder, 2)
    with pytest.raises(ExportError, match=r"decoder_step has 0 Softmax nodes in decoder\.2\.cross_attn"):
        attention_graph(step_of(bundle), 3)


def test_two_candidates_are_refused(bundles):
    model = step_of(bundles())
    (found,) = [node for node in model.graph.node if node.name == "decoder.1.cross_attn/Softmax"]
    twin = model.graph.node.add()
    twin.CopyFrom(found)
    twin.name, twin.output[0] = f"{found.name}.1", f"{found.output[0]}.1"
    with pytest.raises(ExportError, match=r"has 2 Softmax nodes in decoder\.1\.cross_attn, expected one"):
        attention_graph(model, 2)


def test_a_softmax_of_another_shape_is_refused(bundles):
    """A name alone proves nothing: attention over the cache is not cross-attention, whatever its name."""
    model = step_of(bundles())
    names = {"decoder.0.self_attn/Softmax": "decoder.0.cross_attn/Softmax", "decoder.0.cross_attn/Softmax": "other"}
    for node in model.graph.node:
        node.name = names.get(node.name, node.name)
    with pytest.raises(
        ExportError, match=r"self_attn/Softmax is \['B', 4, 'K', 'L'\], expected .*\['B', 4, 'K', 'S'\]"
    ):
        attention_graph(model, 2)
