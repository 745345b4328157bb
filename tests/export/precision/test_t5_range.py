"""A T5 whose residual leaves fp16's range, as trained ones do: really rounded, our fp16 survives and plain does not.

ONNX Runtime's CPU computes fp16 graphs in fp32, so it is no witness here: ONNX's reference evaluator and PyTorch are,
which round every result.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import seq2engine
from seq2engine.errors import ExportError, RequestError
from seq2engine.export import to_onnx
from seq2engine.export.precision.passes import PASSES
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.numerics.error_scale import EPSILON
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import random_sources
from seq2engine.runtime.torch_session import TorchSession

T5 = dataclasses.replace(
    PRESETS["tiny"],
    source_vocab=64,
    target_vocab=64,
    max_source=20,
    max_target=24,
    norm="pre",
    norm_kind="rms",
    positions="relative",
    max_distance=9,
    gated=True,
    activation="gelu_tanh",
    biases=False,
    scale_attention=False,
    scale_embeddings=False,
)
LARGEST = 65504.0
CHANNEL = 7
OPTIONS = SearchOptions(max_length=10, beam=2)


@pytest.fixture(scope="module")
def model():
    """One channel of the residual is huge after the first layer of each side, whatever the text.

    All tokens have the same number there; one unit of the feed-forward reads it, and writes nothing else. Later norms
    undo what the huge channel takes from all others.
    """
    made = random_model(T5, 3)
    with torch.no_grad():
        made.target_embedding.tokens.weight[:, CHANNEL] = 1.0
        made.decoder[0].cross_attn.out.weight[CHANNEL] = 0.0
        for layers, last in ((made.encoder, made.encoder_norm), (made.decoder, made.decoder_norm)):
            layers[0].self_attn.out.weight[CHANNEL] = 0.0
            up, down = layers[0].feed_forward.up.weight, layers[0].feed_forward.down.weight
            for row in (0, T5.d_ff):  # of the gate, and of what it lets pass
                up[row] = 0.0
                up[row, CHANNEL] = 4.0
            down[CHANNEL], down[:, 0] = 0.0, 0.0
            down[CHANNEL, 0] = 2.0**15
            norms = [layers[1].self_residual.norm, layers[1].feed_residual.norm, last]
            for norm in norms + ([layers[1].cross_residual.norm] if layers is made.decoder else []):
                norm.weight *= 2.0**11
                norm.weight[CHANNEL] = 2.0**-4
        assert max(float(parameter.abs().max()) for parameter in made.parameters()) < LARGEST  # weights fit into fp16
    return made


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    return seq2engine.onnx_from_model(model, tmp_path_factory.mktemp("t5") / "bundle", ("fp32", "fp16"))


def evaluated(graph, feeds):
    """A graph by ONNX's reference evaluator, in which every fp16 number is one."""
    run = ReferenceEvaluator(graph)
    with np.errstate(all="ignore"):
        return dict(zip(run.output_names, run.run(None, feeds), strict=True))


def test_the_residual_is_beyond_fp16(model):
    residual = []
    hook = model.encoder[1].self_residual.norm.register_forward_pre_hook(lambda _, given: residual.append(given[0]))
    ids = torch.tensor([[5, 6, 7, 8]])
    model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
    hook.remove()
    assert residual[0].abs().max() > LARGEST


@pytest.mark.parametrize("graph", ["encoder", "decoder_step"])
def test_really_rounded_ours_survives_and_plain_fp16_does_not(graph, model, bundle, feeds_for):
    spec = bundle.specs("fp16")[graph]
    feeds = feeds_for(spec, {"B": 2, "K": 2, "S": 5, "L": 8, "M": 8}, vocab=64, positions=24)
    whole = {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in feeds.items()}
    fp32 = to_onnx.graphs_from_model(model)[graph]
    expected = evaluated(fp32, whole)
    plain = evaluated(PASSES["fp16"](fp32, ()), feeds)
    ours = evaluated(str(bundle.graph_path("fp16", graph)), feeds)
    name = "logits" if graph == "decoder_step" else "encoder_states"
    assert (
        not np.isfinite(plain[name]).all() or np.abs(plain[name] - expected[name]).max() > np.abs(expected[name]).std()
    )
    rows = expected[name].reshape(-1, expected[name].shape[-1])
    error = np.abs(ours[name].astype(np.float64) - expected[name]).reshape(rows.shape).max(axis=1)
    assert np.isfinite(error).all()
    assert (error <= 64 * EPSILON["fp16"] * np.abs(rows).max(axis=1)).all()  # a few roundings of every layer


def test_residual_and_down_projection_stay_in_fp32_and_products_do_not(bundle):
    kept = bundle.graph("fp16", "encoder").fp32_nodes
    assert {"encoder.0.feed_forward.down/MatMul", "encoder_norm/RMSNormalization"} <= kept.keys()
    assert not any("attn" in name for name in kept)


def test_decodes_are_those_of_fp32(model, bundle):
    """PyTorch rounds every result, with our fallback nodes and without."""
    sources = random_sources(T5, 6, seed=9)

    def tokens(session):
        with session:
            return [best.tokens for best, *_ in generate(session, sources, OPTIONS)]

    expected = tokens(open_session(bundle, "torch", "fp32"))
    assert tokens(open_session(bundle, "torch", "fp16")) == expected
    assert tokens(open_session(bundle, "onnxruntime", "fp16")) == expected
    with pytest.raises(RequestError, match="logits"):
        tokens(TorchSession(model, "fp16"))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_no_half_precision_without_calibration(precision, model, tmp_path):
    with pytest.raises(ExportError, match=r"without calibration: .*seq2engine\.onnx_from_model"):
        to_onnx.onnx_from_model(model, tmp_path / "bundle", (precision,))
    assert not (tmp_path / "bundle").exists()


def test_the_command_and_python_calibrate_alike(model, bundle, tmp_path, capsys):
    from seq2engine.cli.main import main

    save_checkpoint(model, tmp_path / "checkpoint")
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "bundle"), "--precision", "fp32", "fp16"]) == 0
    made = seq2engine.open_bundle(Path(tmp_path / "bundle"))
    for graph in ("encoder", "decoder_step"):
        assert made.graph("fp16", graph).fp32_nodes == bundle.graph("fp16", graph).fp32_nodes
    assert made.manifest.calibration == bundle.manifest.calibration
    assert made.manifest.calibration["corpus"] == "random sources"
