"""Precisions from the command line: exported with their fp32_nodes, run, compared and timed where a backend can."""

from __future__ import annotations

import dataclasses
import json

import pytest

from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=64, target_vocab=64, max_source=16, max_target=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(random_model(SMALL, 1), tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture
def bundle(cli, checkpoint, tmp_path):
    """All precisions, with a corpus of three lines."""
    (tmp_path / "corpus.txt").write_text("5 6 7\n8\n9 10\n")
    out = tmp_path / "bundle"
    options = ("--precision", "fp32", "fp16", "bf16", "int8", "int4", "fp8", "--calibrate", tmp_path / "corpus.txt")
    assert cli("export", checkpoint, out, *options, "--quiet")[0] == 0
    return out


@pytest.mark.slow
def test_every_precision_is_exported_and_works_where_it_can(cli, bundle):
    values = json.loads(cli("inspect", bundle, "--json")[1])
    assert list(values["graphs"]) == ["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
    assert values["calibration"]["corpus"] == "corpus.txt"
    assert values["calibration"]["sources"] == 3
    for precision in ("fp32", "fp16", "int8", "int4", "fp8"):
        code, text, _ = cli("run", bundle, "5 6 7", "--precision", precision, "--max-length", "5", "--quiet")
        assert (code, len(text.splitlines())) == (0, 1)
    for precision in ("int8", "int4", "fp8"):
        options = ("--count", "4", "--max-length", "4", "--beam", "2", "--threads", "1", "--quiet")
        code, text, _ = cli("parity", bundle, "--precision", precision, *options)
        assert code == 0, text
    options = ("--case", "1x1x4x4", "--rounds", "2", "--threads", "1", "--quiet")
    assert cli("bench", bundle, "--precision", "int8", "int4", "--quick", *options)[0] == 0


def test_bf16_is_refused_by_onnx_runtime_in_one_line_and_runs_in_torch(cli, bundle):
    for command in (("run", "5 6"), ("parity", "--count", "2")):
        code, text, err = cli(command[0], bundle, *command[1:], "--precision", "bf16", "--quiet")
        assert (code, text) == (1, "")
        assert err.splitlines() == [
            "error: ONNX Runtime has no bf16 products on the CPU; run fp16 or fp32 here, --backend torch, or an engine "
            "with: seq2engine build BUNDLE --precision bf16"
        ]
    options = ("--precision", "bf16", "--backend", "torch", "--max-length", "5", "--quiet")
    assert cli("run", bundle, "5 6", *options)[0] == 0


def test_wrong_precisions_and_corpora_are_refused_in_one_line(cli, checkpoint, tmp_path):
    for options, part, exits in (
        (("--precision", "int3"), "unknown precision 'int3', expected one of fp32, fp16, bf16, int8, int4, fp8", 2),
        (("--precision", "fp16", "--calibrate", tmp_path / "none"), "none cannot be read", 1),
    ):
        code, _, err = cli("export", checkpoint, tmp_path / "out", *options, "--quiet")
        assert code == exits
        assert len(err.splitlines()) == 1
        assert part in err
        assert not (tmp_path / "out").exists()
