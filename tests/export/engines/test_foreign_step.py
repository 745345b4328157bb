"""A decoder step of another exporter is built, and its kernels are counted like ours."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from seq2engine.errors import BuildError
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.engines.foreign_step import foreign_step_of, shapes_from_symbols

RANGES = ShapeRanges(Range(1, 2, 4), Range(1, 1, 1), Range(1, 8, 32), Range(1, 8, 16))
D, H, E, F, V, LAYERS = 64, 4, 16, 128, 96, 2


class Optimum:
    """A decoder with past in the manner of Optimum's Marian export: q, k and v apart, beams folded into the batch,
    additive masks, names and open axes as it writes them."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.weights, self.count = [], [], 0

    def op(self, kind, *inputs, output=None, **attributes):
        self.count += 1
        name = output or f"{kind}_{self.count}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"/{name}", **attributes))
        return name

    def weight(self, *shape):
        return self.constant((self.rng.normal(size=shape) / 8).astype(np.float32))

    def constant(self, array):
        self.count += 1
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"onnx::{self.count}"))
        return self.weights[-1].name

    def linear(self, x, width, out):
        return self.op("Add", self.op("MatMul", x, self.weight(width, out)), self.weight(out))

    def heads(self, x):
        split = self.op("Reshape", x, self.constant(np.array([0, -1, H, E])))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def attend(self, x, k, v, mask):
        q = self.op("Mul", self.heads(self.linear(x, D, D)), self.constant(np.float32(E**-0.5)))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = scores if mask is None else self.op("Add", scores, mask)
        mixed = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", mixed, self.constant(np.array([0, -1, D]))), D, D)

    def norm(self, x, part):
        return self.op("LayerNormalization", self.op("Add", x, part), self.weight(D), self.weight(D), axis=-1)

    def model(self):
        batch, past, source = "batch_size", "past_decoder_sequence_length", "encoder_sequence_length_out"
        inputs = [
            ("encoder_attention_mask", TensorProto.INT64, [batch, "encoder_sequence_length"]),
            ("input_ids", TensorProto.INT64, [batch, 1]),
        ]
        outputs = [("logits", TensorProto.FLOAT, [batch, 1, V])]
        hidden = self.op("Cast", "encoder_attention_mask", to=TensorProto.FLOAT)
        hidden = self.op("Mul", self.op("Sub", hidden, self.constant(np.float32(1))), self.constant(np.float32(1e9)))
        mask = self.op("Unsqueeze", hidden, self.constant(np.array([1, 2])))
        table = self.weight(V, D)
        x = self.op("Gather", table, "input_ids")
        for layer in range(LAYERS):
            names = [f"past_key_values.{layer}.{part}" for part in ("decoder.key", "decoder.value")]
            cross = [f"past_key_values.{layer}.{part}" for part in ("encoder.key", "encoder.value")]
            inputs += [(name, TensorProto.FLOAT, [batch, H, past, E]) for name in names]
            inputs += [(name, TensorProto.FLOAT, [batch, H, source, E]) for name in cross]
            grown = []
            for name in names:
                present = name.replace("past_key_values", "present")
                new = self.heads(self.linear(x, D, D))
                grown.append(self.op("Concat", name, new, output=present, axis=2))
                outputs.append((present, TensorProto.FLOAT, [batch, H, f"{past} + 1", E]))
            x = self.norm(x, self.attend(x, *grown, None))
            x = self.norm(x, self.attend(x, *cross, mask))
            x = self.norm(x, self.linear(self.op("Relu", self.linear(x, D, F)), F, D))
        self.op("MatMul", x, self.op("Transpose", table, perm=[1, 0]), output="logits")
        values = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "main_graph", *values, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimum") / "decoder_with_past_model.onnx"
    onnx.save_model(Optimum().model(), path)
    return path


def test_it_is_built_as_ours_is_and_counted(foreign, built, tmp_path):
    ours = built("tiny", "growing", "fp16", 1).passport
    step = foreign_step_of(foreign, {"ours": ours}, tmp_path)
    assert step.attentions == 2 * LAYERS
    assert step.path == str(foreign)
    assert step.launches > ours.engines["decoder_step"].launches
    assert 0 <= step.fused_attentions <= step.attentions


def test_axes_get_their_sizes_by_name(foreign):
    shapes = shapes_from_symbols(onnx.load(foreign), foreign, dataclasses.replace(RANGES, beam=Range(1, 3, 3)))
    assert shapes["input_ids"] == ((1, 1), (6, 1), (12, 1))
    assert shapes["encoder_attention_mask"] == ((1, 1), (6, 8), (12, 32))
    assert shapes["past_key_values.0.decoder.key"] == ((1, H, 1, E), (6, H, 7, E), (12, H, 15, E))
    assert shapes["past_key_values.1.encoder.value"] == ((1, H, 1, E), (6, H, 8, E), (12, H, 32, E))


def test_an_axis_of_the_step_itself_is_one_token(foreign):
    model = onnx.load(foreign)
    next(v for v in model.graph.input if v.name == "input_ids").type.tensor_type.shape.dim[
        1
    ].dim_param = "decoder_sequence_length"
    assert shapes_from_symbols(model, foreign, RANGES)["input_ids"] == ((1, 1), (2, 1), (4, 1))


def test_weights_that_are_listed_as_inputs_need_no_shape(foreign):
    model = onnx.load(foreign)
    weight = model.graph.initializer[0]
    model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    assert weight.name not in shapes_from_symbols(model, foreign, RANGES)


def test_an_axis_without_size_and_name_is_refused(foreign):
    model = onnx.load(foreign)
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    with pytest.raises(BuildError, match=r"encoder_attention_mask .* without a size .* named dynamic axes"):
        shapes_from_symbols(model, foreign, RANGES)


def test_a_bundle_without_such_an_engine_is_refused(foreign, tmp_path):
    with pytest.raises(BuildError, match=r"no engine of tensorrt_rtx .* seq2engine build"):
        foreign_step_of(foreign, {}, tmp_path)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff" * 40, "not an ONNX file")])
def test_a_file_that_cannot_be_read_is_refused(content, reason, built, tmp_path):
    path = tmp_path / "other.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match=reason):
        foreign_step_of(path, {"ours": built().passport}, tmp_path)
