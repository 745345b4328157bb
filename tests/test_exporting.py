"""Every export that computes in fp16 is calibrated: by the command, Python, the demo, the GPU check."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path

import pytest
import torch

import seq2engine
from seq2engine.errors import ConfigError
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=64, target_vocab=64, max_source=20, max_target=24)
ROOT = Path(seq2engine.__file__).parent


@pytest.fixture(scope="module")
def overflowing():
    """A feed-forward layer is beyond fp16 inside, which its weights alone do not give away."""
    model = random_model(SMALL, 3)
    layer = model.get_submodule("decoder.0.feed_forward")
    with torch.no_grad():
        for tensor, factor in ((layer.up.weight, 2.0**16), (layer.up.bias, 2.0**16), (layer.down.weight, 2.0**-16)):
            tensor.mul_(factor)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_python_makes_the_command_s_bundle(cli, overflowing, tmp_path, precision, form):
    save_checkpoint(overflowing, tmp_path / "checkpoint")
    python = seq2engine.onnx_from_model(overflowing, tmp_path / "python", (precision,), form)
    flags = ("--precision", precision, "--cache-form", form, "--quiet")
    assert cli("export", tmp_path / "checkpoint", tmp_path / "command", *flags)[0] == 0
    command = seq2engine.open_bundle(tmp_path / "command")
    assert python.manifest.calibration == command.manifest.calibration != {}
    entry = python.graph(precision, "decoder_step")
    assert "decoder.0.feed_forward.up/MatMul" in entry.fp32_nodes
    assert entry.fp32_nodes == command.graph(precision, "decoder_step").fp32_nodes
    assert entry.fingerprint == command.graph(precision, "decoder_step").fingerprint


def test_a_corpus_of_one_s_own(overflowing, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("5 6 7\n8 9\n")
    made = seq2engine.onnx_from_model(overflowing, tmp_path / "bundle", ("fp16",), calibrate=corpus)
    assert (made.manifest.calibration["corpus"], made.manifest.calibration["sources"]) == ("corpus.txt", 2)
    with pytest.raises(ConfigError, match="but fp32 is neither"):
        seq2engine.onnx_from_model(overflowing, tmp_path / "other", ("fp32",), calibrate=corpus)
    assert not (tmp_path / "other").exists()


def test_nothing_is_decoded_where_nothing_is_measured(overflowing, tmp_path):
    assert seq2engine.onnx_from_model(overflowing, tmp_path / "bundle", ("fp32",)).manifest.calibration == {}


@pytest.mark.parametrize(("bias", "refused"), [(-math.inf, False), (-1e9, False), (math.inf, True), (math.nan, True)])
def test_a_bias_may_mask_tokens_by_infinity(cli, tmp_path, bias, refused):
    model = random_model(dataclasses.replace(SMALL, output_bias=True), 7)
    with torch.no_grad():
        model.output.bias[-3:] = bias
    save_checkpoint(model, tmp_path / "checkpoint")
    flags = ("--precision", "fp32,fp16,w8a8,int8", "--quiet")
    code, _, errors = cli("export", tmp_path / "checkpoint", tmp_path / "bundle", *flags)
    assert code == (1 if refused else 0), errors
    assert ("not finite" in errors) == refused
    if not refused:
        kept = seq2engine.open_bundle(tmp_path / "bundle").graph("fp16", "decoder_step").fp32_nodes
        assert kept.keys() == {"output/Add"}


def test_all_commands_export_through_it():
    paths = [*ROOT.rglob("*.py")]
    assert ROOT / "commands" / "export.py" in paths
    for path in paths:
        names = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        past = "seq2engine.export.to_onnx.onnx_from_model" in names or "seq2engine.export.to_onnx" in names
        assert not past or path.name == "exporting.py", path
