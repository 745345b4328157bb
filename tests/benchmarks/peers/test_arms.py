"""Peers as arms: the real libraries of this environment next to ours, and the handling of one that fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.peers import processes
from seq2engine.benchmarks.peers.processes import PeerKind, peer_kinds
from seq2engine.benchmarks.report.page import bench_html, bench_table
from seq2engine.benchmarks.result import BenchResult, result_from_dict
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=64, target_vocab=64
)
CASES = [Case("greedy", 2, 1, 5, 7), Case("beam", 2, 3, 5, 7)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL, 3), tmp_path_factory.mktemp("peers") / "small", ("fp32",))


@pytest.fixture(scope="module")
def result(bundle: Bundle, environments: Path) -> BenchResult:
    with pytest.MonkeyPatch.context() as patch:
        kinds = {name: peer_kinds(1)[name] for name in ("ctranslate2 float32", "transformers")}
        broken = {"broken": PeerKind("no_such_peer", "transformers", "float32", "huggingface", ({},))}
        patch.setattr(processes, "peer_kinds", lambda threads: {**kinds, **broken})
        asked = BenchOptions(
            ["torch"], cases=CASES, rounds=2, threads=1, peers=["all"], environments=environments, quick=True
        )
        return bench_bundle(bundle, asked)


@pytest.mark.slow
def test_peers_are_timed_end_to_end_and_output_what_we_output(result: BenchResult) -> None:
    assert list(result.arms) == ["torch fp32", "ctranslate2 float32", "transformers"]
    for case in result.cases:
        for name in ("ctranslate2 float32", "transformers"):
            arm = case.arms[name]
            assert case.same(name), (case.case, arm)
            assert list(arm.parts) == ["end_to_end"]
            assert len(arm.parts["end_to_end"].samples.nanoseconds) == 2
            assert arm.cache is None
            assert not arm.split
        assert case.arms["ctranslate2 float32"].setting == "inter_threads 1, intra_threads 1"


@pytest.mark.slow
def test_their_size_memory_and_version_are_noted(result: BenchResult) -> None:
    for name, library in (("ctranslate2 float32", "ctranslate2 "), ("transformers", "transformers ")):
        arm = result.arms[name]
        assert arm.peer
        assert arm.version.startswith(library)
        assert arm.precision == "fp32"
        assert arm.bytes > 1000
        assert arm.load_ms > 0
        assert arm.peak_bytes is not None
        assert arm.peak_bytes > 1e7
    light, heavy = (result.arms[name].peak_bytes or 0 for name in ("ctranslate2 float32", "transformers"))
    assert light < heavy  # torch, which only converting needs, is not charged to it


@pytest.mark.slow
def test_reports_take_arms_without_parts(result: BenchResult) -> None:
    text, page = bench_table(result), bench_html(result)
    for message in (text, page):
        assert "broken did not run: broken failed: KeyError" in message
        assert "inter_threads 1, intra_threads 1" in message
        assert "transformers" in message
    assert result_from_dict(json.loads(result.to_json())) == result


@pytest.mark.slow
def test_of_all_peers_a_failing_one_is_listed(result: BenchResult) -> None:
    assert list(result.failed) == ["broken"]
    assert "no_such_peer" in result.failed["broken"]


def test_a_named_peer_that_fails_ends_the_run(
    bundle: Bundle, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"broken": PeerKind("no_such_peer", "transformers", "float32", "huggingface", ({},))}
    monkeypatch.setattr(processes, "peer_kinds", lambda threads: broken)
    with pytest.raises(SessionError, match="broken failed: KeyError"):
        bench_bundle(
            bundle,
            BenchOptions(
                ["torch"], cases=CASES, rounds=1, threads=1, peers=["broken"], environments=environments, quick=True
            ),
        )
