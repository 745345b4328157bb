"""Every command as a user types it: what it prints, what it leaves behind, and how it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import onnx
import pytest
from onnx.parser import parse_model
from support.mutations import bundle_of_other_weights

from seq2engine.cli.main import main
from seq2engine.common.reports import latest_report
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(random_model(SMALL, 1), tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("cli") / "bundle", ("fp32", "fp16")).root


@pytest.fixture
def own_bundle(bundle, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(bundle, tmp_path / "bundle")


def assert_refused(result, *parts, exits=1):
    """One line of error, and exit code 1, or 2 where the files do not matter."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == exits
    assert out == ""
    assert len(lines) == 1, err
    assert err.rstrip().endswith(lines[0])
    assert "Traceback" not in err
    for part in parts:
        assert part in lines[0]


# --- what works -------------------------------------------------------------------------------------------------------


def test_export_inspect_run(cli, checkpoint, tmp_path, stdin):
    out = tmp_path / "out" / "run7"
    code, text, _ = cli("export", checkpoint, out, "--precision", "fp32", "fp16")
    assert code == 0
    assert "decoder_step  fp16" in text
    assert cli("inspect", out)[0] == 0
    code, text, _ = cli("inspect", out, "--json")
    assert json.loads(text)["graphs"]["fp16"]["decoder_step"]["census"]["products"] == {"float16": 21}
    stdin(b"5 6 7\n8\n")
    code, greedy, _ = cli("run", out, "--max-length", "6", "--quiet")
    assert code == 0
    assert len(greedy.splitlines()) == 2
    stdin(b"5 6 7\n8\n")
    message = "precision fp32: the most precise of fp32, fp16 that torch runs\n"
    assert cli("run", out, "--backend", "torch", "--max-length", "6") == (0, greedy, message)
    stdin(b"5 6 7\n")
    code, text, _ = cli(
        "run", out, "--beam", "3", "--nbest", "2", "--json", "--max-length", "6", "--early-stopping", "never"
    )
    scores = [found["score"] for found in json.loads(text)["hypotheses"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_export_of_random_weights(cli, tmp_path):
    code, _, _ = cli("export", "random:tiny:3", tmp_path / "b", "--cache-form", "growing", "--quiet")
    assert code == 0
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["cache_form"] == "growing"


def test_build_and_its_passport(cli, own_bundle):
    argv = (
        "build",
        own_bundle,
        "--precision",
        "fp16",
        "--gpu",
        "sm89",
        "--batch",
        "1:2:4",
        "--source-length",
        "1:8:20",
        "--max-length",
        "16",
        "--beam",
        "2",
    )
    code, text, err = cli(*argv)
    assert code == 0
    assert "4 of 4" in text
    assert "build: decoder_step fp16: done" in err
    code, text, _ = cli("inspect", own_bundle)
    (name,) = [path.name for path in (own_bundle / "engines").iterdir()]
    assert re.fullmatch("sm89-fp16-beam2-[0-9a-f]{8}", name)
    assert f"engines/{name}" in text
    assert re.search(r"decoder_step +\d+ +- +4 of 4", text)  # heads of 8 have no launch budget
    onnx.save_model(parse_model(FOREIGN), own_bundle.parent / "other.onnx")
    code, text, _ = cli("inspect", own_bundle, "--foreign-step", own_bundle.parent / "other.onnx", "--json")
    assert code == 0
    values = json.loads(text)
    assert values["engines"][name]["engines"]["decoder_step"]["launch_budget"] is None
    assert values["foreign_step"]["launches"] >= 1
    assert values["foreign_step"]["attentions"] == 1
    assert cli(*argv, "--slots", "40", "--quiet")[0] == 0  # another one, beside it
    assert len(list((own_bundle / "engines").iterdir())) == 2
    assert cli(*argv, "--force", "--json")[0] == 0


FOREIGN = """<ir_version: 8, opset_import: ["": 18]>
other (float[batch_size, 4] x) => (float[batch_size, 4] y) { y = Softmax(x) }"""


def test_parity_and_its_reports(cli, own_bundle):
    code, text, _ = cli("parity", own_bundle, "--count", "8", "--max-length", "8")
    assert code == 0
    (report,) = (own_bundle / "reports").glob("parity-onnxruntime-fp32-*.html")
    assert str(report) in text
    assert "<!doctype html>" in report.read_text()
    code, text, _ = cli("parity", own_bundle, "--count", "8", "--max-length", "8", "--json", "--quiet")
    assert json.loads(text) == json.loads(latest_report(own_bundle, "parity").read_text())


def test_bench_and_its_reports(cli, own_bundle):
    code, text, _ = cli("bench", own_bundle, "--case", "2x2x8x6", "--rounds", "3", "--threads", "1", "--quick")
    assert code == 0
    assert "onnxruntime" in text
    (page,) = (own_bundle / "reports").glob("bench-*.html")
    assert "<!doctype html>" in page.read_text()
    json.loads(page.with_suffix(".json").read_text())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_usage_errors_exit_with_2(cli):
    for argv in (["explode"], ["export"], ["run", "x", "--beam", "many"], []):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2


def test_export_refusals(cli, checkpoint, tmp_path):
    out = tmp_path / "out"
    assert_refused(cli("export", tmp_path / "nowhere", out), "no checkpoint at", "config.json")
    assert_refused(cli("export", "random:huge", out), "unknown preset 'huge'", "tiny, base, big")
    assert_refused(cli("export", "random:tiny:x", out), "random:PRESET:SEED")
    assert_refused(cli("export", checkpoint, out, "--precision", "int3"), "unknown precision 'int3'", exits=2)
    assert_refused(cli("export", checkpoint, out, "--cache-form", "odd"), "unknown cache form 'odd'", exits=2)
    truncated = shutil.copytree(checkpoint, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(cli("export", truncated, out), "cannot be read", "copy the checkpoint again")
    foreign = shutil.copytree(checkpoint, tmp_path / "foreign")
    (foreign / "config.json").write_text('{"model_type": "marian", "d_model": 512}')
    assert_refused(cli("export", foreign, out), "has no weights for model.encoder.embed_tokens.weight; expected one of")
    wrong = shutil.copytree(checkpoint, tmp_path / "wrong")
    values = json.loads((wrong / "config.json").read_text()) | {"heads": 5, "norm": "middle", "end_id": 99}
    (wrong / "config.json").write_text(json.dumps(values))
    assert_refused(cli("export", wrong, out), "d_model 32 is not divisible by heads 5", "norm is 'middle'", "end_id 99")
    assert not out.exists()
    assert cli("export", checkpoint, out)[0] == 0
    assert_refused(cli("export", checkpoint, out), "holds fp32 and fp16 of this model already", "--force")
    before = (out / "manifest.json").read_bytes()
    assert cli("export", checkpoint, out, "--force")[0] == 0
    assert (out / "manifest.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert_refused(cli("export", checkpoint, tmp_path / "mine", "--force"), "not ours to replace")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "truncated", "foreign", "wrong", "mine"}


@pytest.mark.parametrize("command", ["inspect", "run", "parity", "bench", "build"])
def test_missing_bundle(cli, tmp_path, command):
    assert_refused(cli(command, tmp_path / "nowhere"), "no bundle at", "seq2engine export")
    (tmp_path / "empty").mkdir()
    assert_refused(cli(command, tmp_path / "empty"), "no manifest.json")


@pytest.mark.parametrize("command", ["run", "parity", "bench", "build"])
def test_damaged_bundle(cli, own_bundle, command, stdin):
    stdin(b"5\n")
    data = own_bundle / "onnx" / "fp32" / "decoder_step.onnx.data"
    data.write_bytes(data.read_bytes()[:-8])
    assert_refused(cli(command, own_bundle, "--quiet"), "its hash differs", "--force")
    assert not (own_bundle / "engines").exists()


def test_run_refusals(cli, bundle, stdin, tmp_path):
    stdin(b"5\n")
    assert_refused(cli("run", bundle, "--max-length", "25"), "max length 25, at most 24")
    assert_refused(cli("run", bundle, "--beam", "0", "--nbest", "2"), "beam 0", "nbest 2", exits=2)
    assert_refused(cli("run", bundle, "--batch", "0"), "batch 0, expected at least 1", exits=2)
    assert_refused(cli("run", bundle, "--backend", "trt"), "unknown backend 'trt'", exits=2)
    assert_refused(cli("run", bundle, "--precision", "fp8"), "holds no fp8 graphs")
    assert_refused(cli("run", bundle, "--input", tmp_path / "none.txt"), "cannot read", "none.txt")
    assert_refused(
        cli("run", bundle, "--backend", "tensorrt", "--precision", "fp16"), "no fp16 engine", "seq2engine build"
    )


def test_build_refusals(cli, own_bundle):
    assert_refused(cli("build", own_bundle, "--gpu", "9.0"), "nothing for sm90 (Hopper)", "`tensorrt`")
    assert_refused(
        cli("build", own_bundle, "--gpu", "sm75", "--precision", "fp32"), "sm75 cannot run fp32", "--precision fp16"
    )
    assert_refused(cli("build", own_bundle, "--batch", "8:4:2"), "batch 8:4:2, expected a number", exits=2)
    assert_refused(
        cli("build", own_bundle, "--source-length", "1:8:300"),
        "source length 1:8:300 exceeds the model's maximum of 20",
    )
    assert_refused(cli("build", own_bundle, "--batch", "1-8"), "'1-8' is not a range", exits=2)
    assert_refused(cli("build", own_bundle, "--slots", "3"), "--slots 3 is too few")
    assert_refused(cli("build", own_bundle, "--flavour", "trt"), "unknown TensorRT flavour", exits=2)
    assert not (own_bundle / "engines").exists()


def test_engines_on_a_machine_without_a_gpu(cli, own_bundle, stdin):
    options = ("--batch", "1:2:4", "--max-length", "16", "--name", "mine", "--precision", "fp16")
    assert cli("build", own_bundle, *options, "--quiet")[0] == 0
    stdin(b"5\n")
    argv = ("run", own_bundle, "--backend", "tensorrt", "--precision", "fp16")
    assert_refused(cli(*argv), "no NVIDIA GPU on this machine", "--backend onnxruntime")
    engine = own_bundle / "engines" / "mine" / "decoder_step.engine"
    engine.write_bytes(engine.read_bytes()[: 1 << 12])
    assert_refused(cli(*argv), "decoder_step.engine", "4096", "seq2engine build")


def test_a_failed_parity_exits_with_1(cli, tmp_path):
    """Graphs of other weights than the reference: the verdict is an exit code, the report is still written."""
    bundle = bundle_of_other_weights(SMALL, tmp_path)
    code, _, _ = cli("parity", bundle, "--count", "4", "--max-length", "6", "--quiet")
    assert code == 1
    assert latest_report(bundle, "parity", ".html") is not None


def test_bench_takes_one_bundle(cli, bundle):
    code, _, err = cli("bench", bundle, bundle)
    assert code == 2
    assert err == "error: 2 bundles, expected one; or two results: bench compare BEFORE AFTER\n"


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """An export that is interrupted exits with 130 and removes what it had written."""
    argv = [sys.executable, "-m", "seq2engine", "export", "random:base", str(tmp_path / "out" / "b")]
    # A shell that starts the tests in the background has set its children to ignore the interrupt.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed)
    assert process.stderr is not None
    while not list(tmp_path.rglob("*.safetensors")) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_reader_that_goes_away_is_not_an_error_report(bundle):
    run = f"{sys.executable} -m seq2engine run {bundle} --quiet --max-length 4 --batch 1"
    command = f"printf '5\\n%.0s' $(seq 200) | {run} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
