"""`--precision auto`: chosen by timing, of those whose parity has not failed, and reported in one line."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from seq2engine.errors import SessionError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime import auto_precision
from seq2engine.runtime.auto_precision import CANDIDATES, candidates_of, decode_times
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=60, target_vocab=60, max_source=20, max_target=12)
SOURCES = [[5, 6, 7], [9], [11, 4, 8, 30]]


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, 3)


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    return onnx_from_model(model, tmp_path_factory.mktemp("auto") / "bundle", (*CANDIDATES, "int8", "int4"))


def timed(monkeypatch, **seconds):
    monkeypatch.setattr(auto_precision, "decode_times", lambda sessions: {name: seconds[name] for name in sessions})


def put_report(bundle, name, verdict, precision, when, backend="onnxruntime"):
    path = bundle.root / "reports" / f"parity-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"verdict": verdict, "backend": backend, "precision": precision}))
    os.utime(path, (when, when))


def test_every_candidate_is_timed(bundle):
    with open_session(bundle, threads=1) as one, open_session(bundle, precision="w8a8", threads=1) as other:
        times = decode_times({"fp32": one, "w8a8": other})
    assert list(times) == ["fp32", "w8a8"]
    assert all(0 < seconds < float("inf") for seconds in times.values())


@pytest.mark.parametrize("fastest", CANDIDATES)
@pytest.mark.parametrize("wish", [{}, {"attention": True}, {"deterministic": True}], ids=str)
def test_the_fastest_is_opened_as_if_it_had_been_named(bundle, monkeypatch, fastest, wish):
    timed(monkeypatch, **{name: 0.001 if name == fastest else 0.002 for name in CANDIDATES})
    with (
        open_session(bundle, precision="auto", threads=1, **wish) as chosen,
        open_session(bundle, precision=fastest, threads=1, **wish) as named,
    ):
        assert (chosen.precision, type(chosen), chosen.limits) == (fastest, type(named), named.limits)
        assert chosen.chosen.startswith(f"precision {fastest}, the fastest here (fp32 ")
        assert named.chosen == ""
        assert generate(chosen, SOURCES) == generate(named, SOURCES)


def test_of_equals_the_finest(bundle, monkeypatch):
    timed(monkeypatch, fp32=0.001, fp16=0.001, w8a8=0.001)
    with open_session(bundle, precision="auto", threads=1) as session:
        assert session.precision == "fp32"


def test_the_cost_is_reported(bundle, monkeypatch):
    timed(monkeypatch, fp32=0.002, fp16=0.003, w8a8=0.001)
    with open_session(bundle, precision="auto", threads=1) as session:
        advice = f"w8a8 rounds weights and activations to int8; compare it with: seq2engine parity {bundle.root}"
        assert session.chosen.endswith(f"{advice} --precision w8a8")


def test_a_precision_whose_latest_parity_failed_is_left_out(model, monkeypatch, tmp_path):
    bundle = onnx_from_model(model, tmp_path / "bundle", ("fp32", "w8a8"))
    timed(monkeypatch, fp32=0.002, w8a8=0.001)
    put_report(bundle, "onnxruntime-w8a8-1", False, "w8a8", 1_000)
    put_report(bundle, "torch-w8a8", True, "w8a8", 3_000, backend="torch")  # of another backend: says nothing here
    with open_session(bundle, precision="auto", threads=1) as session:
        assert session.precision == "fp32"
        assert session.chosen.endswith("w8a8 left out, because its latest parity failed")
    put_report(bundle, "onnxruntime-w8a8-2", True, "w8a8", 2_000)
    with open_session(bundle, precision="auto", threads=1) as session:
        assert session.precision == "w8a8"
        assert session.chosen.endswith("w8a8 rounds weights and activations to int8, and its parity passed")
    (bundle.root / "reports" / "parity-onnxruntime-w8a8-3.json").write_text("{")
    with pytest.raises(SessionError, match=r"w8a8-3\.json is not a parity report .*delete it, or run again"):
        open_session(bundle, precision="auto", threads=1)


def test_where_there_is_nothing_to_choose(model, bundle, tmp_path):
    coarse = onnx_from_model(model, tmp_path / "coarse", ("int4",))
    with pytest.raises(SessionError, match=r"chooses among fp32, fp16, w8a8, and .* has int4; name one"):
        open_session(coarse, precision="auto")
    only = onnx_from_model(model, tmp_path / "only", ("w8a8", "int4"))
    with open_session(only, precision="auto", threads=1) as session:
        assert session.precision == "w8a8"
        assert session.chosen.startswith("precision w8a8, the only one here")
    with pytest.raises(SessionError, match="an engine has the precision it was built in"):
        open_session(bundle, "tensorrt", "auto")
    with pytest.raises(SessionError, match="leave --draft out"):
        open_session(bundle, precision="auto", draft="w8a8")


def test_int8_products_are_only_for_the_cpu(bundle):
    assert candidates_of(bundle, "onnxruntime", "cuda")[0] == ["fp32", "fp16"]
    assert candidates_of(bundle, "torch", None)[0] == ["fp32", "fp16"]
    assert candidates_of(bundle, "onnxruntime", "cpu")[0] == list(CANDIDATES)


@pytest.mark.parametrize("command", ["run", "score"])
@pytest.mark.parametrize("quiet", [False, True])
def test_commands_report_it_in_one_line(cli, bundle, stdin, command, quiet):
    stdin(b"5 6 7\t5 6\n" if command == "score" else b"5 6 7\n")
    flags = ("--quiet",) if quiet else ()
    code, out, err = cli(command, bundle.root, "--precision", "auto", "--threads", 1, *flags)
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert (code, len(notes), bool(out.strip())) == (0, 0 if quiet else 1, True)
    assert all("the fastest here (fp32 " in note for note in notes)


@pytest.mark.parametrize(("precision", "noted"), [("int8", True), ("int4", True), ("w8a8", False), ("fp16", False)])
def test_running_a_gpu_s_weights_on_the_cpu_gives_a_note(cli, bundle, precision, noted):
    code, _, err = cli("run", bundle.root, "5 6 7", "--precision", precision)
    assert code == 0
    expected = (
        f"note: {precision} stores the weights of a GPU engine in fewer bits; on this CPU every step restores them"
    )
    assert err.startswith(expected) if noted else err == ""
    assert err.count("\n") == int(noted)
    assert cli("run", bundle.root, "5 6 7", "--precision", precision, "--quiet")[2] == ""


def test_a_kept_measurement_is_not_taken_again(bundle, monkeypatch, tmp_path):
    timed(monkeypatch, fp32=0.002, fp16=0.003, w8a8=0.001)
    with open_session(bundle, precision="auto", threads=1, measured=tmp_path) as first:
        message = first.chosen
    timed(monkeypatch)  # raises where it is asked for
    with open_session(bundle, precision="auto", threads=1, measured=tmp_path) as again:
        assert (again.precision, again.chosen) == ("w8a8", message)
    put_report(bundle, "w8a8", False, "w8a8", 1)
    timed(monkeypatch, fp32=0.002, fp16=0.003)
    try:
        with open_session(bundle, precision="auto", threads=1, measured=tmp_path) as other:
            assert other.precision == "fp32"
    finally:
        (bundle.root / "reports" / "parity-w8a8.json").unlink()
