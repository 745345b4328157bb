"""The encoder of audio with fused attention: fewer nodes, no mask, and the same numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.rounding import tensor_error

from seq2engine.errors import ExportError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.ort_forms.flash_attention import flash_attention
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.ort.session import OrtSession

SMALL = dataclasses.replace(
    PRESETS["whisper-tiny.en"],
    encoder_layers=2,
    decoder_layers=1,
    heads=2,
    d_model=32,
    d_ff=48,
    target_vocab=64,
    mels=8,
    max_source=150,
    max_target=16,
    pad_id=0,
    start_id=1,
    end_id=2,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("flash") / "small"
    return onnx_from_model(random_model(SMALL, 3), folder, ("fp32", "w8a8"))


def encoder_of(bundle: Bundle) -> onnx.ModelProto:
    return onnx.load(bundle.graph_path("fp32", "encoder"))


def outputs_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString())
    features = np.random.default_rng(0).normal(size=(2, SMALL.mels, SMALL.frames)).astype(np.float32)
    given = {"features": features, "source_mask": np.ones((2, SMALL.max_source), dtype=bool)}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def test_numbers_are_the_same(bundle: Bundle) -> None:
    plain = encoder_of(bundle)
    expected, found = outputs_of(plain), outputs_of(flash_attention(plain, SMALL.heads))
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        near = tensor_error(SMALL, array, "fp32")
        assert np.allclose(found[name], array, rtol=0, atol=near), name


def test_an_attention_is_one_node(bundle: Bundle) -> None:
    made = flash_attention(encoder_of(bundle), SMALL.heads)
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count("MultiHeadAttention") == SMALL.encoder_layers
    assert not {"Where", "Softmax"} & set(kinds)


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_sessions_take_it(bundle: Bundle, precision: str) -> None:
    with OrtSession.from_bundle(bundle, precision, threads=1) as session:
        assert session.form.flash_heads == SMALL.heads


def test_another_graph_is_refused(bundle: Bundle) -> None:
    graph = encoder_of(bundle)
    split = next(node for node in graph.graph.node if node.op_type == "Split" and ".self_attn/" in node.name)
    split.input[0] = "features"
    with pytest.raises(ExportError, match="not an encoder of ours"):
        flash_attention(graph, SMALL.heads)
