"""`seq2engine bench` as a user has it: what is refused before any work, where reports go, what an interrupt leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from seq2engine.benchmarks import arms, checks, runner
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.result_files import result_from_path
from seq2engine.errors import UsageError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.default_precision import shared_precision
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=64, target_vocab=64
)
QUICK = ("--case", "1x1x4x3", "--rounds", "4", "--threads", "1", "--quick", "--quiet")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return onnx_from_model(random_model(SMALL), tmp_path_factory.mktemp("bench") / "small", ("fp32", "w8a8")).root


@pytest.fixture
def bundle(tmp_path):
    return onnx_from_model(random_model(SMALL), tmp_path / "small").root


@pytest.fixture
def no_work(monkeypatch):
    """Nothing may be loaded, timed or measured."""
    monkeypatch.setattr(arms, "open_session", None)
    for name in ("ceiling_of", "CaseTimer", "open_peers"):
        monkeypatch.setattr(runner, name, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scenario", "foo", "server"), "unknown scenario foo, expected some of single, offline, server"),
        (("--peers", "abacus"), "unknown peer abacus, expected all or some of ctranslate2 float32"),
        (("--case", "8x4"), "case 8x4: expected batch x beam x source x output, such as 8x4x32x32"),
        (("--case", "1x1x4x4", "--batch", "2"), "cases and a sweep, expected either"),
        (("--backend", "abacus"), "backend 'abacus', expected one of torch, onnxruntime, tensorrt"),
        (("--precision", "fp61"), "precision 'fp61', expected one of fp32, fp16"),
        (("--provider", "abacus"), "unknown provider 'abacus', expected one of cpu, cuda"),
        (
            ("--provider", "cuda"),
            "has no provider cuda; install it with: pip uninstall -y onnxruntime onnxruntime-gpu && pip",
        ),
        (("--provider", "cpu", "--backend", "torch"), "provider 'cpu' without the backend onnxruntime"),
        (("--max-length", "0", "99"), "--max-length 0, expected at least 1"),
        (("--sweep", "--batch", "0"), "--batch 0, expected at least 1"),
        (("--case", "1x1x0x4"), "case 1x1x0x4: source 0, expected at least 1"),
        (("another",), "2 bundles, expected one; or two results: bench compare BEFORE AFTER"),
        (("--draft", "int3"), "draft 'int3', expected one of fp32"),
        (("--draft", "w8a8", "--backend", "torch"), "draft 'w8a8' without the backend onnxruntime"),
        (("--bound", "5"), "a bound without the scenario server"),
        (("--bound", "-1", "--scenario", "server"), "a bound of -1 ms, expected more than 0"),
        (("--bound", "nan", "--scenario", "server"), "a bound of nan ms, expected more than 0"),
        (("--rounds", "0"), "rounds 0, expected at least 1"),
        (("--threads", "0"), "threads 0, expected at least 1"),
        (("--count", "3"), "--count without --references"),
    ],
)
def test_wrong_usage_is_found_before_the_bundle_is_opened(cli, tmp_path, no_work, words, message):
    code, out, err = cli("bench", tmp_path / "nothing", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "fp16"), "precision 'fp16', expected one of fp32, w8a8"),
        (("--draft", "fp16"), "holds no fp16 graphs, only fp32, w8a8"),
        (("--case", "1x1x4x99"), "output 99, the model gives at most 64"),
        (("--max-length", "99"), "output 99, the model gives at most 64"),
    ],
)
def test_what_the_bundle_cannot_do_is_found_before_any_work(cli, shared, no_work, words, message):
    code, out, err = cli("bench", shared, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: cannot benchmark {shared}: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (shared / "reports").exists()


def test_all_that_is_wrong_is_in_one_error(cli, tmp_path, no_work):
    words = ("--case", "8x4", "--backend", "abacus", "--precision", "int3", "--scenario", "foo", "--peers", "bar")
    _, _, err = cli("bench", tmp_path / "nothing", *words, "--rounds", "0")
    for message in ("case 8x4", "'abacus'", "'int3'", "scenario foo", "peer bar", "rounds 0"):
        assert message in err
    assert "no case to time" not in err  # there was one, only wrong


def test_the_function_refuses_what_the_command_refuses(shared, no_work):
    with pytest.raises(UsageError, match=r"unknown scenario foo.*; unknown peer bar"):
        runner.bench_bundle(shared, BenchOptions(scenarios=["foo"], peers=["bar"]))


def test_the_backends_are_those_whose_files_are_known():
    assert set(checks.BACKENDS) == set(arms.FILES)


def test_without_a_precision_it_is_what_the_bundle_has(cli, tmp_path, shared):
    only = onnx_from_model(random_model(SMALL), tmp_path / "only", ("w8a8",)).root
    for root, precision in ((only, "w8a8"), (shared, "fp32")):
        assert shared_precision(open_bundle(root), ("onnxruntime",)) == precision
    code, text, _ = cli("bench", only, "--backend", "onnxruntime", *QUICK, "--json")
    assert code == 0
    assert list(json.loads(text)["arms"]) == ["onnxruntime w8a8"]


def test_a_second_run_leaves_the_first_and_compare_takes_the_bundle(cli, bundle, tmp_path):
    texts = [cli("bench", bundle, *QUICK)[1] for _ in range(2)]
    pages = sorted((bundle / "reports").glob("bench-*.html"), key=lambda page: page.stat().st_mtime_ns)
    assert len(pages) == len(list((bundle / "reports").glob("*.json"))) == 2
    assert all(page.name.startswith("bench-torch-onnxruntime-fp32-") for page in pages)
    assert [text.splitlines()[-1] for text in texts] == [f"report: {page}" for page in pages]
    before = tmp_path / "before.json"
    assert cli("bench", bundle, *QUICK, "--out", before)[0] == 0
    assert before.is_file()
    assert before.with_suffix(".html").is_file()
    assert cli("bench", bundle, *QUICK, "--out", tmp_path / "folder")[0] == 0
    assert len(list((tmp_path / "folder").glob("bench-*.json"))) == 1
    for one in (bundle, before, tmp_path / "folder"):
        assert cli("bench", "compare", one, one)[0] == 0


def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(cli, bundle, no_work):
    (bundle / "reports").write_text("a file, which holds even for root")
    code, _, err = cli("bench", bundle, *QUICK)
    assert code == 1
    assert err.startswith("error: cannot write in ")
    assert err.endswith("; name another place with --out\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_the_finished_cases(bundle, tmp_path, number):
    """The second case takes for ever; when the first is in the file, the run is stopped."""
    out = tmp_path / "bench.json"
    words = ("--case", "1x1x4x3", "1x1x64x64", "--rounds", "4", "--threads", "1", "--quick", "--out", str(out))
    slow = f"""
import sys
from seq2engine.benchmarks import runner
from seq2engine.cli.main import main
real = runner.interleaved
def interleaved(calls, rounds, warmup, progress, stage, *rest, **named):
    return real(calls, 10**6 if "64x64" in stage else rounds, warmup, progress, stage, *rest, **named)
runner.interleaved = interleaved
sys.exit(main({["bench", str(bundle), *words]!r}))
"""
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell tells its children to ignore it
    process = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, preexec_fn=heed)
    while not out.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    found = result_from_path(out)
    assert found.interrupted == "interrupted after 1 of 2 cases"
    assert [case.case.name for case in found.cases] == ["1x1x4x3"]
    assert found.interrupted in out.with_suffix(".html").read_text()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"interrupted after 1 of 2 cases, which are in: {Path(out).with_suffix('.html')}\n" in err.decode()
        assert b"Traceback" not in err
        assert not list(tmp_path.rglob(".*"))
