"""A benchmark over sentences on a tiny model: what is decoded, compared and reported. No time is ever asserted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.text_bundle import CONFIG, text_bundle

from seq2engine.benchmarks.natural.result import Workload
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.peers import processes
from seq2engine.benchmarks.report.page import bench_html, bench_table
from seq2engine.benchmarks.report.readme import readme_text
from seq2engine.benchmarks.result import Arm, BenchResult, result_from_dict
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.errors import UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.lines import Line
from seq2engine.runtime.translator import load

SENTENCES = {word: ["a right output"] for word in ("ab", "bca", "c", "abcab", "cab", "bb")}
ASKED = BenchOptions(
    ["onnxruntime"], ["fp32"], natural=[Workload(1, 1), Workload(2, 2)], references=SENTENCES, threads=1, quick=True
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("natural") / "bundle")


@pytest.fixture(scope="module")
def result(bundle: Bundle) -> BenchResult:
    return bench_bundle(bundle, ASKED)


def test_every_sentence_is_decoded_to_its_own_end(bundle: Bundle, result: BenchResult) -> None:
    single, pairs = result.natural
    assert not result.cases
    assert (single.workload, len(single.arms["onnxruntime fp32"].samples.nanoseconds)) == (Workload(1, 1), 6)
    assert len(pairs.arms["onnxruntime fp32"].samples.nanoseconds) == 3
    with load(bundle, threads=1) as model:
        options = SearchOptions(max_length=12)
        lines = [Line(number, text) for number, text in enumerate(SENTENCES, start=1)]
        outputs = [line.outputs[0].tokens for line in model.translate_lines(lines, options)]
    assert single.arms["onnxruntime fp32"].tokens == sum(map(len, outputs))
    assert single.arms["onnxruntime fp32"].likeness.equal == len(SENTENCES)


def test_json_page_and_tables_tell_it(result: BenchResult) -> None:
    again = result_from_dict(json.loads(result.to_json()))
    assert again.natural == result.natural
    assert "Real sentences" in bench_html(result)
    assert "batch 2, beam 2" in bench_table(result)


def test_the_table_of_readme_takes_the_fastest_of_a_precision(result: BenchResult) -> None:
    arm = result.natural[0].arms["onnxruntime fp32"]
    fast = dataclasses.replace(arm, tokens=3 * arm.tokens)
    single = dataclasses.replace(result.natural[0], arms={"onnxruntime fp32": arm, "drafted": fast, "peer": arm})
    arms = result.arms | {
        "drafted": dataclasses.replace(result.arms["onnxruntime fp32"], draft="w8a8"),
        "peer": Arm("peer", "fp32", 1, 1.0, peer=True),
    }
    text = readme_text(dataclasses.replace(result, arms=arms, natural=(single,)), "some model")
    assert "| batch 1, beam 1, fp32 | draft w8a8 |" in text
    assert "| peer |" in text
    assert "6 of 6, 100.0" in text


def test_too_few_sentences_for_a_batch_are_refused(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="batch 32, beam 1: only 6 sentences"):
        bench_bundle(bundle, dataclasses.replace(ASKED, natural=[Workload(32, 1)]))


@pytest.mark.slow
def test_peers_output_what_we_do(
    bundle: Bundle, environments: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = {name: kind for name, kind in processes.peer_kinds(1).items() if name == "ctranslate2 float32"}
    monkeypatch.setattr(processes, "peer_kinds", lambda threads: kinds)
    asked = dataclasses.replace(ASKED, peers=["ctranslate2 float32"], environments=environments, neighbours=1)
    config = dataclasses.replace(CONFIG, max_target=CONFIG.max_source)  # peers have one table of positions
    companions = bundle.root.parent / "checkpoint"
    found = bench_bundle(onnx_from_model(random_model(config, 3), tmp_path / "b", companions=companions), asked)
    assert found.environment.neighbours == 1
    for natural in found.natural:
        likeness = natural.arms["ctranslate2 float32"].likeness
        assert likeness.equal == likeness.lines
        assert natural.arms["ctranslate2 float32"].setting == "inter_threads 1, intra_threads 1"
