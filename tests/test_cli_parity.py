"""`seq2engine parity` from the command line: several precisions, another side, a gate, and one line for a mistake."""

from __future__ import annotations

import json

import pytest
from text_bundle import text_bundle

FEW = ("--count", 8, "--beam", 2, "--max-length", 6, "--threads", 1, "--quiet")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("parity")).root


def test_the_other_side_is_named(root, cli):
    code, out, _ = cli("parity", root, "--against", "torch", *FEW)
    assert code == 0
    assert "compared with those of PyTorch fp32" in out
    for level in ("graphs", "encoder", "steps", "decodes", "quality", "invariance"):
        assert f"\n{level} " in out


def test_json_of_one_precision_has_every_level(root, cli):
    code, out, _ = cli("parity", root, "--json", *FEW)
    found = json.loads(out)
    assert code == 0
    assert found["verdict"] is True
    assert [graph["graph"] for graph in found["graphs"]] == ["encoder", "decoder_step"]
    assert len(found["drift"]["candidate"]) == len(found["drift"]["rows"])
    assert all(company["verdict"] for company in found["companies"])


def test_a_gate_decides_the_exit_code(root, cli, tmp_path):
    gate = tmp_path / "gate.json"
    gate.write_text('{"min_equal": 1.0}')
    code, out, _ = cli("parity", root, "--gate", gate, *FEW)
    assert (code, out.splitlines()[-1]) == (0, f"gate: {gate} holds")
    gate.write_text('{"max_median_ratio": 0.001, "max_worst_ratio": 0.001}')
    code, out, _ = cli("parity", root, "--gate", gate, *FEW)
    assert code == 1
    assert [line.split(":")[2] for line in out.splitlines()[-2:]] == [" max_median_ratio", " max_worst_ratio"]


@pytest.mark.parametrize(
    ("flags", "told", "exits"),
    [
        (("--gate", "none.toml"), "cannot read none.toml", 1),
        (("--against", "cuda:fp32"), "no bundle at cuda:fp32", 1),
        (("--metrics", "bleu"), "add --references TSV", 2),
        (("--precision", "fp32", "fp16", "--hunt"), "one precision to hunt in", 2),
        (("--precision", "fp16"), "holds no fp16 graphs", 1),
    ],
)
def test_mistakes_are_one_line(root, cli, flags, told, exits):
    code, _, err = cli("parity", root, *flags, *FEW)
    assert (code, err.count("\n")) == (exits, 1)
    assert told in err
