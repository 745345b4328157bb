"""Cross-attention over audio one row at a time: the same numbers for few beams and for a prompt, without a mask."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from support.rounding import tensor_error

from seq2engine.errors import ExportError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import attention_name
from seq2engine.export.ort_forms.attention_outputs import attention_graph
from seq2engine.export.ort_forms.cross_rows import MOST_BEAMS, cross_rows
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.ort.session import OrtSession

SMALL = dataclasses.replace(
    PRESETS["whisper-tiny.en"],
    encoder_layers=1,
    decoder_layers=2,
    heads=2,
    d_model=32,
    d_ff=48,
    target_vocab=256,
    mels=8,
    max_source=150,
    max_target=64,
    pad_id=0,
    start_id=1,
    end_id=2,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("rows") / "small"
    return onnx_from_model(random_model(SMALL, 3), folder, ("fp32", "w8a8"))


def step_of(bundle: Bundle) -> onnx.ModelProto:
    return onnx.load(bundle.graph_path("fp32", "decoder_step"))


@pytest.mark.parametrize("beams", [1, 4, MOST_BEAMS, MOST_BEAMS + 1])
def test_numbers_and_weights_are_the_same(bundle, feeds_for, run_onnx, beams):
    plain = attention_graph(step_of(bundle), SMALL.decoder_layers)
    made = cross_rows(plain)
    onnx.checker.check_model(made, full_check=True)
    spec = bundle.specs("fp32")["decoder_step"]
    feeds = feeds_for(spec, {"B": 2, "K": beams, "S": SMALL.max_source, "L": 24, "M": 30})
    feeds["source_mask"] = np.ones_like(feeds["source_mask"])
    expected, found = run_onnx(plain, feeds), run_onnx(made, feeds)
    assert expected.keys() == found.keys()
    assert found[attention_name(1)].shape == (2, SMALL.heads, beams, SMALL.max_source)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tensor_error(SMALL, array, "fp32"), err_msg=name)


def test_there_is_no_mask(bundle):
    made = cross_rows(step_of(bundle))
    assert not any("source_mask" in node.input and node.op_type == "Where" for node in made.graph.node)
    masked = [node for node in made.graph.node if node.op_type == "Where" and ".cross_attn/" in node.name]
    assert not masked


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_sessions_take_it(bundle, precision):
    with OrtSession.from_bundle(bundle, precision, threads=1) as session:
        assert session.form.cross_rows
        assert not session.form.transposed_keys


def test_sources_with_padding_keep_their_mask(bundles):
    with OrtSession.from_bundle(bundles(), "fp32", threads=1) as session:
        assert not session.form.cross_rows
        assert session.form.transposed_keys


def test_another_graph_is_refused(bundle):
    graph = step_of(bundle)
    scaling = next(node for node in graph.graph.node if node.op_type == "Mul" and ".cross_attn/" in node.name)
    scaling.input[0] = "cross_v.0"
    with pytest.raises(ExportError, match="not a decoder step of ours"):
        cross_rows(graph)
