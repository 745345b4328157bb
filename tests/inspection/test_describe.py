"""What `inspect` tells of engines: everything the passport has, in words and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from seq2engine.export.artifact.passport import EngineTensor
from seq2engine.export.contract import GRAPHS
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.inspection.describe import tensors_text
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return onnx_from_model(random_model("tiny"), tmp_path_factory.mktemp("describe") / "bundle", ("int8", "fp16")).root


@pytest.mark.slow
def test_inspect_prints_the_whole_passport(cli, root):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    flags = (
        "--weight-streaming",
        "--workspace",
        "512M",
        "--source-length",
        "1:8:32",
        "1:8:16",
        "--batch",
        "1:2:4",
        "--beam",
        "1",
    )
    options = ("--gpu", "sm86", "sm89", "--precision", "int8", "--max-length", "16", *flags)
    assert cli("build", root, *options, "--quiet", "--no-engine-cache")[0] == 0
    code, text, _ = cli("inspect", root)
    assert code == 0
    lines = text.splitlines()
    (engine,) = [line for line in lines if line.startswith("engines/sm86-sm89-int8-beam1-")]
    assert re.search(r"^tensorrt_rtx [\d.]+ for sm86, sm89: int8, 16 cache slots$", text, re.MULTILINE)
    assert "profile 0: batch 1:2:4, beam 1:1:1, source 1:8:32, output 16:16:16" in lines
    assert "profile 1: batch 1:2:4, beam 1:1:1, source 1:8:16, output 16:16:16" in lines
    assert "built with --weight-streaming --workspace 512M" in lines
    values = json.loads(cli("inspect", root, "--json")[1])["engines"][engine.removeprefix("engines/")]
    assert (values["flavour"], values["targets"], values["precision"]) == ("tensorrt_rtx", ["sm86", "sm89"], "int8")
    assert values["damage"] == []
    for name, entry in values["engines"].items():
        (row,) = [line for line in lines if re.match(rf"{name} +\d+, \d+ ", line)]
        counts = f"{entry['launches']}, {entry['narrower_launches'][0]} +{entry['launch_budget']}"
        tiny = name not in GRAPHS
        sizes = "none" if tiny else f"{entry['weight_bytes']['int8'] / 1e6:.1f} MB int8"
        hashes = " +".join(entry[field][:12] for field in ("key", "onnx_fingerprint", "sha256"))
        fused = "-" if tiny else f"{entry['fused_attentions']} of {entry['attentions']}"
        size = rf"{entry['bytes'] / 1e6:.1f} MB"
        assert re.search(rf"{counts} +{fused} +{size} +{sizes}.* s +([\d.]+ MB|unknown) +{hashes}$", row), row
        assert tiny or entry["weight_bytes"]["int8"] > entry["weight_bytes"].get("float16", 0)
    launches = {name: entry["launches"] for name, entry in values["engines"].items()}
    greedy = launches["decoder_step"] + launches["next_greedy"]
    beams = launches["tree_mask"] + launches["decoder_step"] + launches["candidates"]
    assert values["reductions"]["next_greedy"]["transfers"] == {
        "batch": 4,
        "beams": 1,
        "sent": 0,
        "received": 80,
        "waits": 0.125,
        "allocations": 0,
    }
    moved = "0 bytes +80 bytes +0.125 +0"
    row = rf"^next_greedy +decoder_step \+ next_greedy +{greedy} +{moved} +8 +greedy search"
    assert re.search(row, text, re.MULTILINE)
    assert re.search(
        rf"^candidates +tree_mask \+ decoder_step \+ candidates +{beams} .* bytes +1 +0 +8 +", text, re.MULTILINE
    )
    heads = f"{PRESETS['tiny'].heads}"
    (step,) = [line for line in lines if line.startswith("decoder_step: ")]
    assert f", self_k.0 to 1 float16 [B,{heads},L," in step
    assert " -> logits float32 [B,K," in step


def test_tensors_of_many_layers_are_one_entry():
    tensors = [EngineTensor("tokens", "int64", ("B", "K"))]
    tensors += [EngineTensor(f"self_{part}.{i}", "float16", ("B", 8, "L", 64)) for i in range(3) for part in "kv"]
    tensors += [EngineTensor("cross.0", "float16", ("B",))]
    assert tensors_text(tensors) == (
        "tokens int64 [B,K], self_k.0 to 2 float16 [B,8,L,64], self_v.0 to 2 float16 [B,8,L,64], cross.0 float16 [B]"
    )


@pytest.mark.slow
def test_turing_has_no_budget_as_the_table_was_read_from_other_kernels(cli, root):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    shapes = (
        "--batch",
        "1",
        "--beam",
        "1",
        "--source-length",
        "8",
        "--max-length",
        "8",
        "--precision",
        "fp16",
        "--quiet",
        "--no-engine-cache",
    )
    assert cli("build", root, "--gpu", "sm75", "sm89", *shapes)[0] == 0
    engines = json.loads(cli("inspect", root, "--json")[1])["engines"]
    budgets = {name[:-9]: [entry["launch_budget"] for entry in engines[name]["engines"].values()] for name in engines}
    assert set(budgets["sm75-fp16-beam1"]) == {None}
    assert None not in budgets["sm89-fp16-beam1"]
