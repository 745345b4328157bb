"""`seq2engine parity` from the command line: several precisions, another side, a gate, and one line for a mistake."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.parity_cases import SMALL
from support.text_bundle import text_bundle

from seq2engine.cli.main import make_parser
from seq2engine.commands.parity import options_from_args
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.parity.options import ParityOptions

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
    assert len(found["error_growth"]["candidate"]) == len(found["error_growth"]["rows"])
    assert all(arranged["verdict"] for arranged in found["invariance"])


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
    ("flags", "message", "exits"),
    [
        (("--gate", "none.toml"), "cannot read none.toml", 1),
        (("--against", "cuda:fp32"), "no bundle at cuda:fp32", 1),
        (("--metrics", "bleu"), "add --references TSV", 2),
        (("--precision", "fp32", "fp16", "--locate"), "one precision to locate a fault in", 2),
        (("--locate", "--out", "x"), "--locate writes no report", 2),
        (("--precision", "fp16"), "holds no fp16 graphs", 1),
    ],
)
def test_mistakes_are_one_line(root, cli, flags, message, exits):
    code, _, err = cli("parity", root, *flags, *FEW)
    assert (code, err.count("\n")) == (exits, 1)
    assert message in err


def pages(folder):
    return sorted(path.name for path in folder.glob("parity-*.html"))


class TestReports:
    @pytest.mark.slow
    def test_no_report_replaces_another(self, root, cli, tmp_path):
        for more in ((), (), ("--against", "torch"), ("--against", ":fp32")):
            assert cli("parity", root, *more, "--out", tmp_path, *FEW)[0] == 0
        plain, second, *_ = pages(tmp_path)
        assert len(pages(tmp_path)) == 4
        assert plain.startswith("parity-onnxruntime-fp32-2")
        assert second.startswith("parity-onnxruntime-fp32-2")
        assert sum("-against-torch-2" in name for name in pages(tmp_path)) == 1
        assert sum("-against-fp32-2" in name for name in pages(tmp_path)) == 1

    def test_another_bundle_is_in_the_name(self, root, cli, tmp_path):
        assert cli("parity", root, "--against", root, "--out", tmp_path, *FEW)[0] == 0
        assert pages(tmp_path)[0].startswith(f"parity-onnxruntime-fp32-against-{root.name}-2")

    def test_one_precision_may_have_its_very_file(self, root, cli, tmp_path):
        assert cli("parity", root, "--out", tmp_path / "mine.html", *FEW)[0] == 0
        assert json.loads((tmp_path / "mine.json").read_text())["verdict"] is True
        assert "<!doctype html>" in (tmp_path / "mine.html").read_text()

    def test_several_have_a_folder(self, tiny, cli, tmp_path):
        several = ("--precision", "fp32", "fp16")
        code, _, err = cli("parity", tiny, *several, "--out", tmp_path / "one.html", *FEW)
        assert (code, err.count("\n")) == (2, 1)
        assert "one.html is one file, but 2 precisions have a report each; name a folder" in err
        assert cli("parity", tiny, *several, "--out", tmp_path / "new", *FEW)[0] == 0
        assert ["-fp16-" in name for name in pages(tmp_path / "new")] == [True, False]

    def test_a_place_that_cannot_be_written_to_costs_no_work(self, root, cli, tmp_path, monkeypatch):
        monkeypatch.setattr("seq2engine.runtime.parity.run.parities_of", lambda *given: pytest.fail("it worked"))
        (tmp_path / "file").write_text("")
        code, _, err = cli("parity", root, "--out", tmp_path / "file" / "reports", *FEW)
        assert (code, err.count("\n")) == (1, 1)
        assert "cannot write in" in err
        assert "--out" in err

    def test_the_page_has_the_command(self, root, cli, tmp_path):
        cli("parity", root, "--out", tmp_path / "mine.html", *FEW)
        assert "mine.html --count 8" in (tmp_path / "mine.html").read_text()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return onnx_from_model(
        random_model(SMALL, 4), tmp_path_factory.mktemp("tiny") / "tiny", ("fp32", "fp16", "int4")
    ).root


class TestTwoLines:
    def test_int4_passes_and_its_cost_is_the_second_line(self, tiny, cli):
        code, out, _ = cli("parity", tiny, "--precision", "int4", *FEW)
        first, second, *_ = out.splitlines()
        assert code == 0
        assert first.startswith("parity passed: onnxruntime int4: faithful to its own weights: ")
        assert second.startswith("int4 against onnxruntime fp32: greedy: ")

    def test_a_gate_on_the_cost_decides(self, tiny, cli, tmp_path):
        """Of several precisions it holds each: fp32 itself costs nothing."""
        gate = tmp_path / "gate.json"
        gate.write_text('{"min_fp32_equal": 1.0}')
        code, out, _ = cli("parity", tiny, "--precision", "fp32", "int4", "--gate", gate, *FEW)
        assert code == 1
        (line,) = [line for line in out.splitlines() if line.startswith("gate: ")]
        assert line.startswith("gate: onnxruntime int4: min_fp32_equal: ")

    @pytest.mark.slow
    def test_a_gate_against_another_side(self, tiny, cli, tmp_path):
        """It lets a verdict pass that is not asked for, but not outputs that differ."""
        gate = tmp_path / "gate.json"
        flags = ("--precision", "int4", "--against", ":fp32", "--gate", gate)
        gate.write_text('{"verdict": false, "min_equal": 0.0}')
        code, out, _ = cli("parity", tiny, *flags, *FEW)
        assert (code, out.splitlines()[-1]) == (0, f"gate: {gate} holds")
        assert "differs from onnxruntime fp32: " in out.splitlines()[0]
        gate.write_text('{"verdict": false, "min_equal": 1.0}')
        assert cli("parity", tiny, *flags, *FEW)[0] == 1


def test_references_against_another_side(root, cli, tmp_path):
    """Both sides and fp32 are counted; the same outputs have the same scores."""
    (tmp_path / "pairs.tsv").write_text("abc\ta b\nhij\tb\nfed cab\ta\n")
    flags = ("--references", tmp_path / "pairs.tsv", "--against", "torch", "--out", tmp_path)
    code, out, _ = cli("parity", root, *flags, "--beam", 2, "--threads", 1, "--quiet", "--json")
    found = json.loads(out)
    assert code == 0
    assert {rate["difference"]["value"] for rate in found["rates"]} == {0.0}
    assert found["against"] == "PyTorch fp32"
    assert found["cost"]["baseline"] == "PyTorch fp32"
    assert [sample["source"] for sample in found["samples"]] == ["abc", "hij", "fed cab"]
    assert found["doubts"] == []


def test_defaults_are_those_of_python():
    args = make_parser().parse_args(["parity", "BUNDLE"])
    args.command_line = ""
    given = options_from_args(args)
    named = {"command": given.command, "command_line": given.command_line, "metrics": given.metrics}
    assert given == dataclasses.replace(ParityOptions(), **named)
    assert tuple(given.metrics) == tuple(ParityOptions().metrics)
