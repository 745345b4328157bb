"""fp32 fallback nodes: what fp16 cannot hold in real decodes stays in fp32, and tokens stay right."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from seq2engine.errors import ExportError, RequestError
from seq2engine.export.precision.census import audit_precision, census_of
from seq2engine.export.precision.fp32_nodes import LARGEST, MARGIN, fp32_nodes_of
from seq2engine.export.precision.passes import PASSES, fp16_from_fp32
from seq2engine.export.to_onnx import graphs_from_model, onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.ids import IdsTokenizer
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.calibration import CalibrationSession, calibration_of, measuring, sources_from_corpus
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import random_sources

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=64, target_vocab=64, max_source=20, max_target=24)
OPTIONS = SearchOptions(max_length=10, beam=2)
UP = "decoder.0.feed_forward.up"
FEED_FORWARD = [  # the fallback nodes that the planted overflow asks for; in and out of it fit into fp16
    f"{UP}/MatMul",
    f"{UP}/Add",
    "decoder.0.feed_forward.activation/Relu",
    "decoder.0.feed_forward.down/MatMul",
]


@pytest.fixture(scope="module")
def overflowing():
    """A model that decodes the same as before in fp32, though one feed-forward layer is now beyond fp16 inside.

    The first product is 2**16 times as large and the second as much smaller; ReLU lets factors pass.
    """
    model = random_model(SMALL, 3)
    layer = model.get_submodule("decoder.0.feed_forward")
    with torch.no_grad():
        for tensor, factor in ((layer.up.weight, 2.0**16), (layer.up.bias, 2.0**16), (layer.down.weight, 2.0**-16)):
            tensor.mul_(factor)
        assert float(layer.up.weight.abs().max()) < LARGEST  # the weights alone give nothing away
    return model


@pytest.fixture(scope="module")
def step():
    return graphs_from_model(random_model(SMALL, 3))["decoder_step"]


def calibration(sources=None):
    return calibration_of(sources or random_sources(SMALL, 8), "corpus.txt", SMALL)


def in_true_fp16(bundle, feeds_for, precision="fp16"):
    """A step by the reference evaluator of ONNX, in which every fp16 number is one."""
    spec = bundle.specs(precision)["decoder_step"]
    feeds = feeds_for(spec, {"B": 2, "K": 2, "S": 5, "L": 8, "M": 8}, vocab=64, positions=24)
    run = ReferenceEvaluator(str(bundle.graph_path(precision, "decoder_step")))
    with np.errstate(all="ignore"):
        return dict(zip(run.output_names, run.run(None, feeds), strict=True))


def decoded(bundle, precision, backend="onnxruntime"):
    with open_session(bundle, backend, precision, threads=1) as session:
        return [found[0].tokens for found in generate(session, random_sources(SMALL, 8, seed=9), OPTIONS)]


# --- planted overflow -------------------------------------------------------------------------------------------------


def test_without_a_scan_the_planted_overflow_breaks_fp16(overflowing, tmp_path, feeds_for):
    bundle = onnx_from_model(overflowing, tmp_path / "blind", ("fp32", "fp16"))
    assert bundle.manifest.calibration == {}
    plain = onnx_from_model(random_model(SMALL, 3), tmp_path / "plain", ("fp32",))
    assert decoded(bundle, "fp32") == decoded(plain, "fp32")
    with pytest.raises(RequestError, match="logits"):
        decoded(bundle, "fp16", "torch")  # ONNX Runtime computes fp16 in fp32 on the CPU, which hides it
    assert not np.isfinite(in_true_fp16(bundle, feeds_for)["logits"]).all()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_calibrated_fp16_decodes_like_fp32_and_the_manifest_has_the_reasons(
    precision, overflowing, tmp_path, feeds_for
):
    bundle = onnx_from_model(overflowing, tmp_path / "seen", ("fp32", precision), calibrate=calibration())
    entry = bundle.graph(precision, "decoder_step")
    assert list(entry.fp32_nodes)[:3] == FEED_FORWARD[:3]
    assert FEED_FORWARD[3] in entry.fp32_nodes
    assert all("reaches" in reason for reason in entry.fp32_nodes.values())
    assert bundle.graph(precision, "encoder").fp32_nodes == bundle.graph("fp32", "decoder_step").fp32_nodes == {}
    assert bundle.manifest.calibration["corpus"] == "corpus.txt"
    assert bundle.manifest.calibration["sources"] == 8
    assert bundle.manifest.calibration["steps"] >= 10
    assert entry.census["products"] == {"float16": 19, "float32": 2}
    assert np.isfinite(in_true_fp16(bundle, feeds_for, precision)["logits"]).all()
    assert parity_of(bundle, precision=precision, options=ParityOptions(count=8, max_length=6, beam=2, threads=1))
    if precision == "fp16":
        assert decoded(bundle, "fp16") == decoded(bundle, "fp32") == decoded(bundle, "fp16", "torch")


def test_bf16_is_calibrated_and_has_no_fallback_nodes(overflowing, tmp_path):
    bundle = onnx_from_model(overflowing, tmp_path / "bf16", ("bf16",), calibrate=calibration())
    assert bundle.graph("bf16", "decoder_step").fp32_nodes == {}
    assert bundle.manifest.calibration["sources"] == 8


# --- choosing, from magnitudes ----------------------------------------------------------------------------------------


def test_nothing_stays_in_fp32_for_nothing(step):
    assert fp32_nodes_of(step, {}) == {}
    makes_no_norm = [node for node in step.graph.node if node.op_type != "Add"]
    assert fp32_nodes_of(step, {name: LARGEST / MARGIN for node in makes_no_norm for name in node.output}) == {}


@pytest.mark.parametrize(
    ("magnitude", "stays"),
    [(LARGEST / MARGIN, False), (LARGEST / MARGIN * 1.01, True), (float("nan"), True), (1e-5, True)],
)
def test_a_tensor_beyond_fp16_keeps_its_maker_and_its_readers(magnitude, stays, step):
    found = fp32_nodes_of(step, {f"{UP}/Add": magnitude})
    wanted = [f"{UP}/Add", "decoder.0.feed_forward.activation/Relu"]
    assert list(found) == (wanted if stays else [])
    assert all(f"{UP}/Add reaches" in reason for reason in found.values())


def test_a_norm_stays_in_fp32_before_its_squares_overflow(step):
    norm = next(node for node in step.graph.node if node.op_type == "LayerNormalization")
    assert fp32_nodes_of(step, {norm.input[0]: 100.0}) == {}
    found = fp32_nodes_of(step, {norm.input[0]: 200.0})
    assert found == {norm.name: f"the squares of {norm.input[0]} reach 4e+04"}


def test_an_attention_stays_in_fp32_as_a_whole(step):
    scores = next(n for n in step.graph.node if n.op_type == "MatMul" and n.name.startswith("decoder.1.cross_attn/"))
    found = fp32_nodes_of(step, {scores.output[0]: 1e5})
    kinds = [node.op_type for node in step.graph.node if node.name in found]
    assert kinds == ["Mul", "Transpose", "MatMul", "Where", "Softmax", "MatMul"]
    model = fp16_from_fp32(step, found)
    onnx.checker.check_model(model, full_check=True)
    audit_precision(model, "fp16", found)


@pytest.mark.parametrize("name", ["new_self_k.0", "new_self_v.1"])
def test_what_passes_between_graphs_must_fit(name, step):
    with pytest.raises(
        ExportError, match=rf"fp16 cannot hold {name} \({name} reaches 1e\+05\).*--precision bf16 or fp32"
    ):
        fp32_nodes_of(step, {name: 1e5})


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4", "fp8"])
def test_logits_beyond_fp16_leave_as_they_are(precision, step):
    found = fp32_nodes_of(step, {"logits": 1e5})
    assert "output/MatMul" in found or "output/Add" in found
    model = PASSES[precision](step, found)
    onnx.checker.check_model(model, full_check=True)
    assert not any(node.op_type == "Cast" and node.output[0] == "logits" for node in model.graph.node)
    assert census_of(model)["tensors"]["float32"] >= 1


def test_a_weight_for_fallback_nodes_only_stays_in_fp32_and_a_shared_one_does_not(step):
    model = fp16_from_fp32(step, {f"{UP}/MatMul", f"{UP}/Add"})
    kinds = {weight.name: weight.data_type for weight in model.graph.initializer}
    assert kinds[f"{UP}.weight"] == kinds[f"{UP}.bias"] == TensorProto.FLOAT
    assert kinds["decoder.0.feed_forward.down.weight"] == TensorProto.FLOAT16
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.output[0] != "logits"]
    assert len(casts) == 2  # one in, one out


# --- scanning ---------------------------------------------------------------------------------------------------------


def test_the_scan_measures_every_float_tensor(run_onnx):
    encoder = graphs_from_model(random_model(SMALL, 3))["encoder"]
    feeds = {"source_ids": np.array([[3, 4, 5]]), "source_mask": np.array([[True, True, False]])}
    computed = run_onnx(measuring(encoder), feeds)
    for name in ("encoder_states", "cross_k.0", "cross_v.1"):
        assert computed[f"largest/{name}"] == np.abs(computed[name]).max()
    measured = {name.removeprefix("largest/") for name in computed if name.startswith("largest/")}
    assert "encoder.0.feed_forward.up/Add" in measured
    assert not any("Shape" in name or "Range" in name for name in measured)


@pytest.mark.parametrize("cache_form", ["static", "growing"])
def test_a_scan_decodes_as_any_session_does(cache_form, tmp_path):
    bundle = onnx_from_model(random_model(SMALL, 3), tmp_path / "bundle", ("fp32",), cache_form)
    sources = random_sources(SMALL, 6)
    graphs = graphs_from_model(random_model(SMALL, 3), cache_form)
    with CalibrationSession(graphs, SMALL, cache_form) as looking, OrtSession.from_bundle(bundle, "fp32", 1) as session:
        ours, theirs = (generate(one, sources, OPTIONS) for one in (looking, session))
        assert [found[0].tokens for found in ours] == [found[0].tokens for found in theirs]
        assert looking.steps >= 10
        made = {name for node in graphs["decoder_step"].graph.node for name in node.output}
        assert set(looking.largest["decoder_step"]) <= made
        assert 0.1 < looking.largest["decoder_step"]["logits"] < 100


def test_a_corpus_is_lines_of_sources(tmp_path):
    path = tmp_path / "corpus.tsv"
    path.write_text("3 4 5\t6 7\n\n8\n")
    assert sources_from_corpus(path, IdsTokenizer()) == [[3, 4, 5], [8]]
    path.write_text("\n")
    with pytest.raises(RequestError, match=r"corpus\.tsv has no source to decode; name a UTF-8 file of source lines"):
        calibration_of(sources_from_corpus(path, IdsTokenizer()), path.name, SMALL)
    with pytest.raises(RequestError, match=r"none cannot be read \(.*\); name a UTF-8 file of source lines"):
        sources_from_corpus(tmp_path / "none", IdsTokenizer())
