"""What a precision costs: its outputs against fp32's, shared between precisions; information, not a verdict."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.parity_cases import SMALL

from seq2engine.errors import RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.gate import broken_of
from seq2engine.runtime.parity.levels import cost
from seq2engine.runtime.parity.levels.baseline import Against
from seq2engine.runtime.parity.levels.corpus import Corpus
from seq2engine.runtime.parity.levels.cost import Cost, Fp32Outputs, SearchCost
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.report.page import parity_html, parity_table
from seq2engine.runtime.parity.run import parities_of
from seq2engine.runtime.search.options import SearchOptions

FEW = ParityOptions(count=16, beam=2, max_length=10, threads=1)
COARSE = ("fp16", "int4", "w8a8")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 4), tmp_path_factory.mktemp("cost") / "b", ("fp32", *COARSE))


@pytest.fixture(scope="module")
def results(bundle):
    found = parities_of(bundle, ["fp32", *COARSE], options=FEW)
    return {result.precision: result for result in found}


@pytest.mark.parametrize("precision", COARSE)
def test_the_verdict_has_two_lines(results, precision):
    result = results[precision]
    assert result, result.reason
    first, second, *_ = parity_table(result).splitlines()
    assert first.startswith(f"parity passed: onnxruntime {precision}: faithful to its own weights: errors at most")
    assert second.startswith(f"{precision} against PyTorch fp32: greedy: ")
    assert second in parity_html(result)
    assert json.loads(result.to_json())["cost_line"] == second
    assert [part["search"] for part in json.loads(result.to_json())["cost"]["searches"]] == ["greedy", "beam 2"]


def test_fp32_has_one(results):
    lines = parity_table(results["fp32"]).splitlines()
    assert lines[0].startswith("parity passed: onnxruntime fp32: errors at most")
    assert lines[1] == ""
    assert "Cost against" not in parity_html(results["fp32"])
    assert results["fp32"].cost.nothing


def test_int4_passes_and_yet_costs(results):
    result = results["int4"]
    assert all(decode.equal == 16 for decode in result.decodes)  # over its own weights
    assert not result.cost.nothing
    for part in result.cost.searches:
        assert part.equal < 16
        assert part.edit_rate > 0


def test_what_no_side_has_decoded_the_baseline_decodes(bundle):
    options, sources = SearchOptions(10, 1, scores=False), [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    with open_session(bundle, "torch", threads=1) as fp32:
        emitted = cost.outputs_of(fp32, sources, range(3), options, 2)
    corpus = Corpus(bundle, sources, [options], {("onnxruntime int4", "greedy"): {**emitted, 1: (9, 2)}}, threads=1)
    (part,) = Fp32Outputs(bundle, "torch", None, by_torch=False).cost("onnxruntime int4", ["greedy"], corpus).searches
    assert part.equal == 2


def test_edits_are_per_token_of_fp32(bundle):
    options = SearchOptions(10, 1)
    baseline = Fp32Outputs(bundle, "onnxruntime", None, by_torch=True)
    outputs = {
        ("PyTorch fp32", "greedy"): {0: (4, 5, 6, 2), 1: (7, 2), 2: (8, 9, 2)},
        ("onnxruntime int4", "greedy"): {0: (4, 9, 2), 1: (7, 2), 2: (3, 9, 2)},
    }
    corpus = Corpus(bundle, [[5], [6], [7]], [options], outputs, threads=1)
    assert baseline.cost("onnxruntime int4", ["greedy"], corpus) == Cost(
        "PyTorch fp32", (SearchCost("greedy", 3, 1, 3 / 9, 0.5),)
    )


@pytest.mark.slow
def test_precisions_share_the_decodes_of_fp32(bundle, monkeypatch):
    """Alone ONNX Runtime decodes them, once for both; with fp32, PyTorch has done it already."""
    decoded = []
    kept = cost.outputs_of
    monkeypatch.setattr(
        cost, "outputs_of", lambda session, *rest: decoded.append(session.backend) or kept(session, *rest)
    )
    few = dataclasses.replace(FEW, count=4, max_length=4)
    found = parities_of(bundle, ["int4", "w8a8"], options=few)
    assert {result.cost.baseline for result in found} == {"onnxruntime fp32"}
    assert decoded == ["onnxruntime", "onnxruntime"]  # greedy and beam
    decoded.clear()
    found = parities_of(bundle, ["int4", "fp32"], options=few)
    assert [result.precision for result in found] == ["int4", "fp32"]
    assert {result.cost.baseline for result in found} == {"PyTorch fp32"}
    assert decoded == []


def test_a_bundle_without_fp32_graphs_has_pytorch_decode(tmp_path):
    bundle = onnx_from_model(random_model(SMALL, 4), tmp_path / "b", ("int8",))
    (result,) = parities_of(bundle, ["int8"], options=dataclasses.replace(FEW, count=4, max_length=4))
    assert result.cost.baseline == "PyTorch fp32"


@pytest.mark.slow
def test_against_another_side_the_cost_is_still_of_fp32(bundle):
    options = dataclasses.replace(FEW, count=8, max_length=6, against=Against(None, "torch", None))
    (result,) = parities_of(bundle, ["int4"], options=options)
    assert result.baseline == "PyTorch int4"
    assert result.cost.baseline == "onnxruntime fp32"
    assert "PyTorch int4" in result.claim
    options = dataclasses.replace(options, against=Against(None, "torch", "fp16"))
    (result,) = parities_of(bundle, ["fp32"], options=options)
    assert result.cost is None  # fp32 costs nothing, and its own decodes are not those of the other side


def test_a_gate_may_hold_the_cost(results):
    result = results["int4"]
    assert broken_of({"min_fp32_equal": 0.0, "max_fp32_edit_rate": 2.0}, result) == []
    (line,) = broken_of({"min_fp32_equal": 1.0}, result)
    assert line.startswith("min_fp32_equal: ")
    assert broken_of({"min_fp32_equal": 1.0}, results["fp32"]) == []
    (line,) = broken_of({"max_fp32_worse_per": 0.1}, result)
    assert "it needs --references" in line
    (line,) = broken_of({"min_fp32_equal": 0.0}, dataclasses.replace(result, cost=None))
    assert "without --against" in line


def test_a_baseline_that_stops_is_reported(bundle, monkeypatch):
    def stop(*given):
        raise RequestError("logits are not finite")

    monkeypatch.setattr(cost, "outputs_of", stop)
    (result,) = parities_of(bundle, ["int4"], options=dataclasses.replace(FEW, count=4, max_length=4))
    assert result
    assert result.cost_line == (
        "int4 against onnxruntime fp32: not measured, onnxruntime fp32 stopped: logits are not finite"
    )
    assert result.samples[0].baseline == "PyTorch fp32:int4"


def test_outputs_are_shown_though_all_agree(results):
    result = results["fp32"]
    assert [sample.search for sample in result.samples] == ["beam 2"] * 5
    assert all(sample.expected == sample.candidate for sample in result.samples)
    page = parity_html(result)
    assert "<h2>Sample outputs</h2>" in page
    assert result.samples[0].candidate in page


def test_the_page_names_model_date_and_versions(bundle, results):
    page = parity_html(results["w8a8"])
    rows = dict(results["w8a8"].about)
    assert rows["model"].startswith("b, 2+2 layers")
    assert rows["checkpoint"] == bundle.manifest.checkpoint_sha256[:12]
    for name in ("model", "checkpoint", "date", "versions"):
        assert f"<dt>{name}</dt>" in page
