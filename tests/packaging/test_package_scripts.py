"""What one runs of a package: text decoded as `generate` does, timing, one report, and builds that ask first."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cudart_stand_in import Cudart
from support.handed_over import (
    BESIDE,
    OWN_OPTIONS,
    forget_scripts,
    not_a_number,
    ran,
    scaled_weight,
    script,
    wrong_engine,
)
from support.stand_in_engines import BEAMS, FOUR_BEAMS, MODEL, NARROWER, ONE_BEAM, SOURCES, THREE_BEAMS, put_engines
from support.tensorrt_stand_in import tensorrt_stand_in
from support.text_bundle import text_bundle

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.packaging.decodes import decode_values, greedy_options
from seq2engine.packaging.package import SCRIPTS, PackageOptions, package_from_bundle
from seq2engine.runtime.defaults import Defaults
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import measured_options
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.translator import load

# One option of a model's own each, that greedy decoding obeys.
OPTIONS: list[dict[str, Any]] = [
    *OWN_OPTIONS,
    {"prefix": [7, 30]},
    {"start": 5},
    {"beam": 4, "length_penalty": 0.6, "early_stopping": True},
]
PADDED = ShapeRanges(Range(2, 2, 4), Range(1, 1, 1), Range(4, 8, 16), Range(1, 8, 12))  # no single or short source
TEXTS = ["abc", "a bad cab 😀", "jig", "é\u2028e"]


@pytest.fixture(autouse=True)
def scripts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget_scripts()


@pytest.fixture(scope="module")
def text_package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    """A package of a model that takes text, with engines; not to be written to."""
    where = tmp_path_factory.mktemp("text")
    bundle = text_bundle(where, forced_eos=2, beam=3)
    put_engines(bundle, BEAMS, flavour="tensorrt", name="one")
    package_from_bundle(bundle, where / "out", PackageOptions(threads=1, texts=TEXTS))
    return bundle, where / "out"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["static", "growing"])
@pytest.mark.parametrize(
    "ranges", [ONE_BEAM, THREE_BEAMS, FOUR_BEAMS, PADDED], ids=["one", "three", "up to four", "padded"]
)
def test_decode_is_generate_for_every_pair_of_options(
    ranges: Any, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, whatever beams the engines are for; with several profiles, too."""
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",), form)
    narrower = NARROWER if ranges is FOUR_BEAMS and form == "static" else ()
    put_engines(bundle, ranges, flavour="tensorrt", name="one", narrower=narrower)
    package_from_bundle(bundle, tmp_path / "out", PackageOptions(threads=1))
    monkeypatch.setitem(sys.modules, "tensorrt", trt := tensorrt_stand_in("tensorrt"))
    script(tmp_path / "out", "decode")
    files, greedy = sys.modules["package_files"], sys.modules["greedy"]
    package = files.read_package()
    folder, built = files.read_engines(package, None)
    sources = [*SOURCES, *SOURCES[:2]]  # more than fit one batch
    pairs = [{}, *OPTIONS, *({**a, **b} for a, b in itertools.combinations(OPTIONS, 2))]
    outputs = set()
    cudart = Cudart()
    with (
        open_session(bundle, "onnxruntime", "fp32", 1) as session,
        sys.modules["cuda_memory"].Cuda(cudart) as cuda,
        sys.modules["model_engines"].ModelEngines(package, cuda, trt, folder, built) as model,
    ):
        for values in pairs if ranges is ONE_BEAM else pairs[:: len(OPTIONS)]:
            session.defaults = Defaults(values)
            package["decode"] = json.loads(json.dumps(decode_values(session, 12, 0.0)))
            expected = [nbest[0].tokens for nbest in generate(session, sources, greedy_options(session, 12))]
            assert list(map(tuple, greedy.decoded(model, sources))) == expected, values
            outputs.add(tuple(expected))
        session.defaults = Defaults({"forced_bos": 9})  # as of a language that is asked for
        package["decode"] = json.loads(json.dumps(decode_values(session, 12, 0.0)))
        expected = [nbest[0].tokens for nbest in generate(session, sources, greedy_options(session, 5))]
        package["decode"]["forced_start"] = [7]
        assert list(map(tuple, greedy.decoded(model, sources, first=9, longest=5))) == expected
        assert tokens_by(model, best=True) == tokens_by(model, best=False)
    assert len(outputs) > 4  # the options do something
    assert not trt.broken
    assert not cudart.memory


def tokens_by(model: Any, best: bool) -> list[Any]:
    """Greedy tokens of eight steps, from logits that were copied or from the best tokens that the GPU has found."""
    found: list[Any] = []

    def choose(output: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = output[..., 0] if best else output.argmax(axis=-1)
        found.append(tokens.tolist())
        return tokens, np.zeros_like(tokens)

    sys.modules["engine_steps"].run(model, SOURCES, 1, MODEL.config.start_id, 8, choose, best=best)
    return found


def test_decode_text(
    text_package: tuple[Bundle, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, folder = text_package
    with load(bundle, "onnxruntime", "fp32", 1) as model:
        expected = model.translate([*TEXTS, "x"], measured_options(model.session, 3, 12))
    assert ran(folder, "decode", monkeypatch, capsys, *TEXTS) == (0, "".join(f"{t}\n" for t in expected[:-1]), "")
    lines = b"".join(text.encode() + b"\n" for text in ["", *TEXTS, " "]) + b"x\r"  # the last without a line end
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(lines)))
    code, printed, noted = ran(folder, "decode", monkeypatch, capsys)
    unknown = "line 7: the model has no token for some of it, decoded as <unk>\n"
    assert (code, printed.split("\n"), noted) == (0, ["", *expected[:-1], "", expected[-1], ""], unknown)


def test_lines_that_cannot_be_decoded(
    text_package: tuple[Bundle, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"abcdefghijabcdefghij\n\xff\nabc\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(lines)))
    code, printed, errors = ran(text_package[1], "decode", monkeypatch, capsys)
    assert (code, printed.count("\n")) == (1, 3)
    assert printed.startswith("\n\n")
    assert errors.splitlines() == [
        "error: line 1: 21 tokens, at most 16 are supported; shorten it",
        "error: line 2: byte 1 is not UTF-8; save the input as UTF-8",
    ]
    for argv, expected in (
        (("abc", "--to", "fra"), "error: language 'fra' asked for, but this model has none; leave it out\n"),
        (("abc", "--from", "fra"), "error: language 'fra' asked for, but this model has none; leave it out\n"),
        (("abc", "--max-length", "13"), "error: length 13, at most 12 are supported\n"),
    ):
        assert ran(text_package[1], "decode", monkeypatch, capsys, *argv)[::2] == (1, expected)
    with pytest.raises(SystemExit, match="2"):
        ran(text_package[1], "decode", monkeypatch, capsys, "abc", "--max-length", "0")


def test_a_package_without_a_tokenizer_takes_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",))
    put_engines(bundle, flavour="tensorrt", name="one")
    package_from_bundle(bundle, tmp_path / "out", PackageOptions(threads=1))
    code, printed, errors = ran(tmp_path / "out", "decode", monkeypatch, capsys, "5 17 250", "a", "999999")
    assert code == 1
    assert all(word.isdigit() for word in printed.splitlines()[0].split())
    assert errors.splitlines() == [
        "error: line 2: 'a' is not a token id; this package has no tokenizer: give ids such as 17 4",
        f"error: line 3: token 999999, but the vocabulary has 0 to {MODEL.config.source_vocab - 1}",
    ]
    assert not (tmp_path / "out" / "tokenizer").exists()


def test_the_readme_of_a_package(text_package: tuple[Bundle, Path]) -> None:
    readme = (text_package[1] / "README.md").read_text()
    assert readme.index("pip install -r requirements.txt") < readme.index("run_all.py") < readme.index("decode.py")
    assert "**Send back** `report.html` and `report.json`" in readme
    assert "`--beam` 1 to 3 (the model's own default is 3)" in readme
    assert "{" not in readme
    assert (text_package[1] / "requirements.txt").read_text() == "numpy>=1.24\ntensorrt==10.16.1.11\n"
    listed = json.loads((text_package[1] / "package.json").read_text())["files"]
    there = {p.relative_to(text_package[1]).as_posix() for p in text_package[1].rglob("*") if p.is_file()}
    kept = {name for name in there if not name.startswith(("engines/", "package.json")) and "__pycache__" not in name}
    assert listed.keys() == kept


def gpu_tool(folder: Path, answer: str) -> None:
    """An nvidia-smi that answers so."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ \"$2\" = 0000:01:00.0 ] || exit 3\necho '{answer}'\n")
    tool.chmod(0o755)


def test_one_report(
    text_package: tuple[Bundle, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu_tool(tmp_path, "Stand-in GPU, 580.10, 1500 MHz, 2100 MHz, 7000 MHz, 40, 24576 MiB")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    argv = ("--rounds", 2, "--out", tmp_path / "sent")
    trt, cudart = tensorrt_stand_in("tensorrt"), Cudart()
    code, printed, errors = ran(text_package[1], "run_all", monkeypatch, capsys, *argv, trt=trt, cudart=cudart)
    assert (code, errors) == (0, ""), printed
    found = json.loads((tmp_path / "sent" / "report.json").read_text())
    assert found["passed"] is True
    assert [stage["name"] for stage in found["stages"]] == [
        *("files", "engines", "TensorRT", "GPU", "open", "parity", "decodes", "timing")
    ]
    assert found["machine"]["GPU"] == "Stand-in GPU"
    assert found["machine"]["driver"] == "580.10"
    assert found["machine"]["SM clock after timing"] == "1500 MHz"
    assert found["machine"]["TensorRT"] == "tensorrt 10.16.1.11"
    assert [row["source"] for row in found["decodes"]] == TEXTS
    assert all(row["output"] == row["expected"] and row["detail"] == "the same tokens" for row in found["decodes"])
    assert [(row["batch"], row["source"], row["steps"]) for row in found["timing"]] == [(1, 8, 8), (2, 8, 8), (4, 8, 8)]
    assert all(row["step"]["tenth"] <= row["step"]["median"] <= row["step"]["nine_tenths"] for row in found["timing"])
    page = (tmp_path / "sent" / "report.html").read_text()
    assert all(word in page for word in ("Stand-in GPU", "580.10", "tokens / s", "a bad cab 😀", "encoder_states"))
    assert "<script" not in page
    assert "http" not in page
    assert not trt.broken
    assert not cudart.memory


@pytest.mark.parametrize(
    ("change", "failed"), [(scaled_weight, ["parity"]), (not_a_number, ["parity", "decodes", "timing"])]
)
def test_a_wrong_engine_fails_in_the_report(
    change: Any,
    failed: list[str],
    text_package: tuple[Bundle, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(text_package[1], tmp_path / "copy"))
    wrong_engine(folder, "decoder_step", change)
    code, printed, _ = ran(folder, "run_all", monkeypatch, capsys, "--rounds", 1)
    found = json.loads((folder / "report.json").read_text())
    assert (code, found["passed"]) == (1, False)
    assert [stage["name"] for stage in found["stages"] if not stage["passed"]] == failed
    assert f"FAIL: 8 of 8 stages run, failed: {', '.join(failed)}" in printed
    assert "FAIL" in (folder / "report.html").read_text()


def test_another_output_than_the_reference_fails_unless_it_is_a_tie(
    text_package: tuple[Bundle, Path], tmp_path: Path
) -> None:
    script(text_package[1], "run_all")
    compared = sys.modules["verify"].compared
    sample = {"tokens": [5, 6, 2], "best": [[[5, 9], [3.0, 1.0]], [[6, 7], [2.0, 1.75]], [[2, 3], [1.0, 0.0]]]}
    assert compared(sample, [5, 6, 2], 0.0) == (True, "the same tokens")
    assert compared(sample, [5, 7, 8, 2], 0.25) == (True, "a tie at token 2: the reference has them 0.25 apart")
    assert compared(sample, [5, 7, 8, 2], 0.2) == (False, "token 2 is 7, expected 6")
    assert compared(sample, [5, 8, 2], 0.25) == (False, "token 2 is 8, expected 6")
    assert compared(sample, [5, 6], 9.0) == (False, "2 tokens, expected 3")


def test_a_report_where_nothing_can_be_run(
    text_package: tuple[Bundle, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "sent"
    code, _, _ = ran(text_package[1], "run_all", monkeypatch, capsys, "--out", out, cudart=Cudart(gpus=0))
    found = json.loads((out / "report.json").read_text())
    assert (code, found["passed"], found["stages"][-1]["name"]) == (1, False, "GPU")
    assert found["stages"][-1]["detail"].startswith("no NVIDIA GPU on this machine; ")
    folder = Path(shutil.copytree(text_package[1], tmp_path / "copy"))
    (folder / "graphs" / "encoder.onnx").write_bytes(b"")
    assert ran(folder, "run_all", monkeypatch, capsys)[0] == 1
    found = json.loads((folder / "report.json").read_text())
    assert "encoder.onnx is damaged (its hash differs); copy the package again" in found["stages"][0]["detail"]
    (tmp_path / "file").touch()
    code, _, errors = ran(folder, "run_all", monkeypatch, capsys, "--out", tmp_path / "file" / "under")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("error: the report cannot be written (")


def test_a_gpu_that_cannot_be_asked(text_package: tuple[Bundle, Path], tmp_path: Path, monkeypatch: Any) -> None:
    script(text_package[1], "verify")
    gpu_facts = sys.modules["machine"].gpu_facts
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts("0000:01:00.0")["GPU"] == "unknown (no nvidia-smi)"
    gpu_tool(tmp_path, "what?")
    assert gpu_facts("0000:01:00.0")["GPU"] == "unknown (nvidia-smi printed 'what?')"
    assert gpu_facts("0000:02:00.0")["driver"] == "unknown (CalledProcessError of nvidia-smi)"


def test_options_that_decode_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported, and the rest of the package is checked nevertheless."""
    bundle = text_bundle(tmp_path, phrases=[[5, 6]])
    put_engines(bundle, flavour="tensorrt", name="one")
    package_from_bundle(bundle, tmp_path / "out", PackageOptions(threads=1))
    refused = "error: this model's own decoding asks for phrases, which decode.py does not do\n"
    assert ran(tmp_path / "out", "decode", monkeypatch, capsys, "abc") == (1, "", refused)
    code, _, _ = ran(tmp_path / "out", "run_all", monkeypatch, capsys, "--rounds", 1)
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (code, found["passed"], found["decodes"]) == (0, True, [])
    assert "left out: the model asks for phrases" in found["stages"][6]["detail"]


def test_texts_that_cannot_be_packaged(text_package: tuple[Bundle, Path], tmp_path: Path, cli: Any) -> None:
    bundle = text_package[0]
    for text, tokens in (("abcdefghijabcdefghij", 21), (" ", 0)):
        with pytest.raises(RequestError, match=f"^text 2 has {tokens} tokens, expected 1 to 16, which the engines"):
            package_from_bundle(bundle, tmp_path / "out", PackageOptions(threads=1, texts=["abc", text]))
    code, _, errors = cli("package", bundle.root, tmp_path / "out", "--texts", tmp_path / "none")
    wanted = (
        f"error: {tmp_path / 'none'} cannot be read (No such file or directory); name a file of lines with --texts\n"
    )
    assert (code, errors) == (1, wanted)
    (tmp_path / "lines").write_bytes(b"abc\n\xff\n")
    code, _, errors = cli("package", bundle.root, tmp_path / "out", "--texts", tmp_path / "lines")
    assert (code, errors.startswith(f"error: {tmp_path / 'lines'}, line 2: byte 1")) == (1, True)
    (tmp_path / "lines").write_text("abc\n\njig\n")
    code, _, _ = cli("package", bundle.root, tmp_path / "out", "--texts", tmp_path / "lines", "--threads", 1, "--quiet")
    decodes = json.loads((tmp_path / "out" / "package.json").read_text())["decodes"]
    assert (code, [decode["text"] for decode in decodes]) == (0, ["abc", "jig"])


def test_scripts_need_nothing_of_ours(text_package: tuple[Bundle, Path]) -> None:
    """Only Python's own modules, numpy, and each other; tokenizer libraries and TensorRT are imported by name."""
    allowed = {*sys.stdlib_module_names, "numpy", *BESIDE}
    for name in SCRIPTS:
        for node in ast.walk(ast.parse((text_package[1] / name).read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in allowed, name


@pytest.mark.parametrize("name", ["run_all", "build", "verify", "decode"])
def test_a_python_without_numpy(name: str, text_package: tuple[Bundle, Path]) -> None:
    program = "import runpy, sys; sys.modules['numpy'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    words = [sys.executable, "-c", program, str(text_package[1] / f"{name}.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    wanted = "error: numpy is not installed; install all that is needed with: pip install -r requirements.txt\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", wanted)


@pytest.mark.slow
def test_builds_ask_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of whole files only, and engines that are there stay unless they may be replaced (with the real TensorRT-RTX)."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",))
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(ranges=ONE_BEAM, threads=1))
    weights = out / open_bundle(bundle.root).graph("fp32", "encoder").data_path.replace("onnx/fp32", "graphs")
    whole = weights.read_bytes()
    words = ["--flavour", "tensorrt_rtx", "--gpu", "sm89"]
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert script(out, "build").main(words) == 1
    assert capsys.readouterr().err == f"error: {weights} is damaged (its hash differs); copy the package again\n"
    assert not (out / "engines").exists()
    weights.write_bytes(whole)
    assert script(out, "build").main(words) == 0
    first = (out / "engines" / "tensorrt_rtx" / "engines.json").stat().st_ino
    assert script(out, "build").main(words) == 1
    folder = out / "engines" / "tensorrt_rtx"
    wanted = f"error: {folder} is there already; to replace it, run: python build.py --force\n"
    assert capsys.readouterr().err == wanted
    assert script(out, "build").main([*words, "--force"]) == 0
    assert (folder / "engines.json").stat().st_ino != first
    assert [path.name for path in (out / "engines").iterdir()] == ["tensorrt_rtx"]
    shutil.rmtree(out / "engines")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert script(out, "run_all").main([], Cudart(gpus=0)) == 1
    stages = json.loads((out / "report.json").read_text())["stages"]
    assert [(stage["name"], stage["passed"]) for stage in stages] == [
        *(("files", True), ("engines", True), ("TensorRT", True), ("GPU", False))
    ]
    assert stages[1]["detail"].endswith("built here, by build.py")
