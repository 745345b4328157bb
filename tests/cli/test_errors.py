"""What a new user gets wrong, on every command: one line of error, exit code 1 or 2, and nothing half-written."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from support.fast_cases import rest_slow

from seq2engine.cli.main import main
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
ENGINE = "engines/sm89-fp16-beam1"
ENGINE_SHAPES = ("--gpu", "sm89", "--batch", "1:2:4", "--max-length", "16", "--beam", "1")
ENGINE_SHAPES += ("--precision", "fp16", "--name", "sm89-fp16-beam1")
# Every command that opens a bundle, as briefly as it can be run. B is the bundle, W a folder to write to.
COMMANDS = {
    "build": ("build", "B", *ENGINE_SHAPES),
    "refit": ("refit", "B", "B"),
    "plan": ("plan", "W/corpus.txt", "B", "--ratio", "1", "--precision", "fp16"),
    "package": ("package", "B", "W/package"),
    "inspect": ("inspect", "B"),
    "run": ("run", "B", "5 6", "--max-length", "3"),
    "score": ("score", "B", "--input", "W/pairs.tsv"),
    "parity": ("parity", "B", "--count", "2", "--max-length", "3"),
    "attention": ("attention", "B", "5 6", "--max-length", "3"),
    "bench": ("bench", "B", "--case", "1x1x4x3", "--rounds", "1", "--threads", "1"),
    "torch": ("run", "B", "5 6", "--backend", "torch", "--max-length", "3"),
    "tensorrt": ("run", "B", "5 6", "--backend", "tensorrt", "--precision", "fp16"),
}
OPENING = [name for name in COMMANDS if name not in ("torch", "tensorrt")]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A bundle with an engine."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    root = onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("errors") / "good", ("fp32", "fp16")).root
    assert main(["build", str(root), *ENGINE_SHAPES, "--quiet"]) == 0
    return root


@pytest.fixture
def work(tmp_path):
    (tmp_path / "corpus.txt").write_text("5 6 7\n8 9\n")
    (tmp_path / "pairs.tsv").write_text("5 6\t7\n")
    return tmp_path


@pytest.fixture
def refused(cli, work, good):
    """Runs words on a bundle; they must be refused in one line, and leave everything as it was."""

    def run(words, bundle=good, code=1):
        paths = {"B": str(bundle), "W": str(work)}
        argv = [paths.get(word) or str(word).replace("W/", f"{work}/") for word in words]
        before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
        found, out, err = cli(*argv, "--quiet")
        assert (found, out) == (code, ""), (argv, out, err)
        assert len(err.strip().splitlines()) == 1, err
        assert err.startswith("error: ")
        assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
        return err

    return run


@pytest.mark.parametrize("name", OPENING)
def test_a_bundle_that_is_none(refused, work, name):
    assert "no bundle at" in refused(COMMANDS[name], work / "nowhere")
    assert "no bundle at" in refused(COMMANDS[name], work / "corpus.txt")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["half", "empty", "missing", "folder"])
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("manifest.json", COMMANDS),
        (f"{ENGINE}/passport.json", ["build", "inspect", "package", "refit", "tensorrt"]),
        (f"{ENGINE}/decoder_step.engine", ["build", "package", "refit", "tensorrt"]),
        ("onnx/fp32/decoder_step.onnx", ["run", "score", "parity", "attention", "bench"]),
        ("onnx/fp32/encoder.onnx.data", ["run", "score", "parity", "attention", "bench"]),
        ("onnx/fp16/decoder_step.onnx", ["build", "package"]),
        ("model.safetensors", ["torch", "parity", "attention", "bench", "package"]),
        ("config.json", ["torch", "parity", "attention", "bench", "package"]),
    ],
)
def test_files_that_are_cut_off_missing_or_something_else(refused, good, work, file, names, damage):
    bundle = shutil.copytree(good, work / "bundle")
    path = bundle / file
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    for name in names:
        if (file, name, damage) != (f"{ENGINE}/passport.json", "inspect", "missing"):  # then nobody knows of the engine
            refused(COMMANDS[name], bundle)


@pytest.mark.parametrize("damage", rest_slow(["half", "missing"], ["half"]))
def test_inspect_names_the_broken_engine_and_its_repair(cli, good, work, damage):
    bundle = shutil.copytree(good, work / "bundle")
    path = bundle / ENGINE / "decoder_step.engine"
    size = path.stat().st_size
    if damage == "half":
        path.write_bytes(path.read_bytes()[: size // 2])
        wanted = f"damaged: decoder_step.engine has {size // 2} bytes, its passport has {size}; build it again with: "
    else:
        path.unlink()
        wanted = "damaged: decoder_step.engine is missing; build it again with: "
    code, text, _ = cli("inspect", bundle)
    assert code == 0
    (line,) = [line for line in text.splitlines() if line.startswith("damaged")]
    assert line.startswith(f"{wanted}seq2engine build {bundle} --precision fp16 --gpu sm89")
    command = line.partition("seq2engine ")[2].split()
    assert cli(*command, "--no-engine-cache", "--quiet")[0] == 0
    assert "damaged" not in cli("inspect", bundle)[1]


@pytest.mark.parametrize("name", ["build", "run", "score", "parity", "attention", "package", "plan", "tensorrt"])
def test_an_unknown_precision(refused, name):
    assert "unknown precision 'fp61', expected one of fp32, fp16, bf16" in refused(
        (*COMMANDS[name], "--precision", "fp61"), code=2
    )
    assert "holds no int8 graphs, only fp32, fp16; add them with: seq2engine export --add int8" in refused(
        (*COMMANDS[name], "--precision", "int8")
    )


@pytest.mark.parametrize("name", ["run", "score", "parity", "bench"])
def test_an_unknown_provider(refused, name):
    assert "unknown provider 'cdua', expected one of cpu, cuda, tensorrt, nv_tensorrt_rtx" in refused(
        (*COMMANDS[name], "--provider", "cdua"), code=2
    )


@pytest.mark.parametrize("name", ["run", "bench"])
def test_drafts_that_cannot_be(refused, name):
    for draft, reason, code in (
        ("w88a", "'w88a', expected one of", 2),
        ("w8a8", "holds no w8a8 graphs, only fp32, fp16", 2 if name == "bench" else 1),
        ("fp16", "fp16 cannot draft for fp32, expected another precision with", 2 if name == "bench" else 1),
    ):
        assert reason in refused((*COMMANDS[name], "--draft", draft), code=code)


@pytest.mark.parametrize("name", ["run", "score", "parity", "attention", "torch", "bench"])
@pytest.mark.parametrize("threads", ["0", "-3"])
def test_no_threads(refused, name, threads):
    assert f"threads {threads}, expected at least 1" in refused((*COMMANDS[name], "--threads", threads), code=2)


@pytest.mark.parametrize("name", ["run", "score", "parity", "attention", "torch", "bench"])
def test_more_threads_than_any_machine_has(refused, name):
    many = "9" * 20
    assert f"threads {many}, expected at most 4096" in refused((*COMMANDS[name], "--threads", many), code=2)


@pytest.mark.parametrize("name", ["run", "score", "parity"])
def test_an_engine_for_a_backend_that_has_none(refused, name):
    assert "an engine is an option of tensorrt, not of onnxruntime" in refused(
        (*COMMANDS[name], "--engine", "sm89"), code=2
    )


@pytest.mark.parametrize("name", ["build", "package"])
@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("batch", "0", "batch 0, expected a number of at least 1, or rising numbers such as 1:8:64"),
        ("batch", "1:2", "is not a range; write one number, or min:opt:max such as 1:8:64"),
        ("batch", "٣", "is not a range"),
        ("batch", "1:8:99999", "batch 1:8:99999 exceeds the most that is built, 65536"),
        ("beam", "41", "beam 41:41:41 exceeds the model's vocabulary of 40"),
        ("beam", f"1:2:{10**20}", "exceeds the model's vocabulary of 40"),
        ("source-length", "21", "source length 21:21:21 exceeds the model's maximum of 20"),
        ("max-length", "1:8:25", "max length 1:8:25 exceeds the model's maximum of 24"),
    ],
)
def test_ranges_that_cannot_be_built(refused, name, option, text, reason):
    code = 1 if "exceeds" in reason else 2  # a model's limits are in its files
    assert reason in refused((*COMMANDS[name], f"--{option}={text}"), code=code)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("build", "B", "--gpu", "91"), "unknown target 'sm91', expected one of sm75"),
        (("build", "B", "--gpu", "sm_90"), "TensorRT-RTX builds nothing for sm90 (Hopper)"),
        (("refit", "B", "B"), f"({ENGINE.rpartition('/')[2]}: tensorrt_rtx needs a CUDA driver"),
        (("refit", "B", "B", "--engine", "other"), "has no engine 'other', only sm89-fp16-beam1"),
        (("package", "B", "W/corpus.txt"), "is a file"),
        (("inspect", "B", "--foreign-step", "W/none.onnx"), "none.onnx cannot be used as a graph (No such file"),
        (("inspect", "B", "--foreign-step", "W/corpus.txt"), "it is not an ONNX file"),
        (("run", "B", "5", "--max-length", "25"), "max length 25, at most 24"),
        (("run", "B", "--input", "W/none.txt"), "cannot read"),
        (("score", "B", "--input", "W/none.tsv"), "cannot read"),
        (("parity", "B", "--references", "W/none.tsv"), "no data at"),
        (("parity", "B", "--locate", "nowhere"), "unknown place 'nowhere'"),
        (("attention", "B", "99"), "the vocabulary has 40"),
        (("attention", "B", "5", "--out", "W/corpus.txt/x.html"), "cannot write"),
        (("plan", "W/none.txt", "B"), "cannot read"),
        (("import", "W/none", "W/out"), "nothing at"),
        (("import", "W/corpus.txt", "W/out"), "cannot be read"),
        (("export", "shipped:g3p", "W/out"), "no shipped checkpoint 'g3p'"),
        (("export", "random:tiny", "W/corpus.txt"), "is a file"),
        (("export", "random:tiny", "W/corpus.txt/out"), "cannot write"),
        (("train", "W/none.tsv", "W/out", "--dev", "W/pairs.tsv"), "no data at"),
        (("train", "W/pairs.tsv", "W/out", "--dev", "W/none.tsv"), "no data at"),
        (("demo", "--out", "W/corpus.txt"), "cannot write"),
    ],
)
def test_other_slips(refused, words, reason):
    assert reason in refused(words)


def test_a_benchmark_that_cannot_be(refused):
    assert "source 99, the model takes at most 20" in refused(("bench", "B", "--case", "1x1x99x9"), code=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("build", "B", "--gpu", "hopper"), "unknown target 'hopper', expected one of sm75"),
        (("build", "B", "--jobs", "0"), "--jobs 0, expected at least 1"),
        (("build", "B", "--workspace", "1T"), "'1T' is not a size"),
        (("package", "B", "W/package", "--seed", "-1"), "seed -1, expected 0 or more"),
        (("parity", "B", "--seed", "-1"), "seed -1, expected 0 or more"),
        (("parity", "B", "--count", "0"), "expected at least 1"),
        (("bench", "B", "--rounds", "0"), "rounds 0, expected at least 1"),
        (("plan", "W/corpus.txt", "B", "--ratio", "1", "--profiles", "0"), "--profiles 0, expected at least 1"),
        (
            ("export", "random:tiny", "W/out", "--precision", "fp32", "--calibrate", "W/corpus.txt"),
            "but fp32 is neither",
        ),
        (("run", "B", "5", "--beam", "0"), "beam 0, expected at least 1"),
        (("run", "B", "5", "--sample", "--beam", "2"), "beam 2 together with sample, expected beam 1"),
        (("run", "B", "5", "--nbest", "2"), "nbest 2, expected 1 to the beam size 1"),
    ],
)
def test_wrong_usage(refused, words, reason):
    assert reason in refused(words, code=2)


@pytest.mark.parametrize("name", ["demo", "train", "import", "export", *OPENING])
def test_a_mistyped_option_is_wrong_usage(name, capsys):
    words = COMMANDS.get(name, (name, *{"demo": (), "train": ("a", "b", "--dev", "c")}.get(name, ("a", "b"))))
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--quite"])
    _, err = capsys.readouterr()
    assert stopped.value.code == 2
    command = f"seq2engine {name}"
    assert err == (
        f"{command}: error: unrecognized arguments: --quite (did you mean --quiet?); see: {command} --help\n"
    )


def test_too_much_asked_for_at_once_is_one_line(cli, good):
    code, out, err = cli("run", good, "5 6", "--beam", 20_000_000, "--max-length", 4, "--quiet")
    assert (code, out) == (2, "")
    assert err == "error: search options: beam 20000000, expected at most 4096\n"


def test_a_target_named_twice_is_one(cli, good, work):
    bundle = shutil.copytree(good, work / "bundle")
    shutil.rmtree(bundle / "engines")
    assert cli("build", bundle, *ENGINE_SHAPES[2:], "--gpu", "sm89", "sm89", "--quiet")[0] == 0
    assert [path.name for path in (bundle / "engines").iterdir()] == ["sm89-fp16-beam1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train", "pairs.tsv", "out", "--dev", "pairs.tsv", "--epochs", "100000"),
        ("parity", "B", "--count", "100000"),
        ("bench", "B", "--rounds", "100000", "--threads", "1"),
        ("package", "B", "out"),
    ],
    ids=lambda words: words[0],
)
def test_an_interrupt_is_one_line_and_leaves_no_litter(good, work, words):
    """Sent when the command has begun, whatever it is doing by then."""
    bundle = shutil.copytree(good, work / "bundle")
    argv = [sys.executable, "-m", "seq2engine", *(str(bundle) if word == "B" else word for word in words)]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell tells its children to ignore it
    process = subprocess.Popen(argv, cwd=work, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heed)
    assert process.stderr is not None
    process.stderr.readline()  # its first line of progress
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    if process.returncode != -signal.SIGINT and (words[0] != "package" or process.returncode):  # else it was quicker
        assert process.returncode == 130, err
        assert err.decode().strip().splitlines()[-1].startswith("interrupted")
        assert b"Traceback" not in err
        whole = (work / "out" / "package.json").is_file()  # it was done, and interrupted before it could say so
        assert words[0] == "train" or whole or not (work / "out").exists()
    assert not list(work.rglob(".*"))
