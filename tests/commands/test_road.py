"""The road without a flag: export, build, parity, run, package. Each takes what the one before it made."""

from __future__ import annotations

import json

import pytest
from support.host_device import HostDevice
from support.stand_in_engines import MODEL
from support.tensorrt_stand_in import engine_bytes, tensorrt_stand_in

from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.default_precision import default_precision, precision_to_build, shared_precision
from seq2engine.export.artifact.engines import engine_names, passports_of
from seq2engine.export.engines import jobs as build_jobs
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import save_checkpoint
from seq2engine.runtime.trt import session as trt_session

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")

LINES = ["5 17 250 9 41", "77 3", "12 200 31 8 99 140 6"]
FEW = ("--count", "6", "--max-length", "8", "--quiet")


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, and builds that the TensorRT stand-in can run: the graph as the build got it."""

    def build(trt, model, path, shapes, targets, progress, narrower=(), *_):
        from onnx.external_data_helper import load_external_data_for_model

        load_external_data_for_model(model, str(path.parent))
        return engine_bytes(model, [shapes, *narrower])

    monkeypatch.setattr(build_jobs, "build_engine", build)
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    monkeypatch.setattr(trt_session, "load_tensorrt", tensorrt_stand_in)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(MODEL, tmp_path_factory.mktemp("road") / "checkpoint")


def passed(result):
    code, out, err = result
    assert code == 0, err
    return out, err


def test_the_road_without_a_flag(cli, gpu, checkpoint, tmp_path):
    bundle, out = tmp_path / "bundle", tmp_path / "package"
    passed(cli("export", checkpoint, bundle))
    assert open_bundle(bundle).precisions == ("fp32", "fp16")
    text, err = passed(cli("build", bundle))
    assert "precision fp32: the most precise of fp32, fp16 that every GPU runs" in err
    (name,) = engine_names(open_bundle(bundle))
    assert text.startswith(f"engines/{name}\n")
    text, _ = passed(cli("parity", bundle, *FEW))
    assert "onnxruntime fp32" in text
    text, _ = passed(cli("parity", bundle, "--backend", "tensorrt", *FEW))
    assert "tensorrt fp32" in text
    expected, err = passed(cli("run", bundle, *LINES))
    assert err == "precision fp32: the most precise of fp32, fp16 that onnxruntime runs\n"
    found, err = passed(cli("run", bundle, *LINES, "--backend", "tensorrt"))
    assert err == "precision fp32: the most precise of fp32, fp16 that tensorrt runs\n"
    assert found == expected
    text, _ = passed(cli("package", bundle, out, "--quiet"))
    assert "fp32" in text
    assert "engines: tensorrt_rtx 1.7.1.116" in text


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_default_build_serves_one_beam_and_four(cli, gpu, checkpoint, tmp_path, precision, cache):
    bundle = tmp_path / "bundle"
    passed(cli("export", checkpoint, bundle, "--precision", precision, "--cache-form", cache, "--quiet"))
    passed(cli("build", bundle, "--quiet"))
    (passport,) = passports_of(open_bundle(bundle)).values()
    fixed = precision == "fp32" and cache == "static"  # where TensorRT fuses attention over a fixed number only
    assert str(passport.ranges.beam) == ("4:4:4" if fixed else "1:4:4")
    for beam in range(1, 5):
        options = (*LINES, "--beam", beam, "--nbest", beam, "--max-length", 30, "--json", "--quiet")
        expected, _ = passed(cli("run", bundle, *options))
        found, _ = passed(cli("run", bundle, *options, "--backend", "tensorrt"))
        assert tokens(found) == tokens(expected)
    for beam in (1, 4):
        passed(cli("parity", bundle, "--backend", "tensorrt", "--beam", beam, *FEW))


def tokens(text):
    return [[found["tokens"] for found in json.loads(line)["hypotheses"]] for line in text.splitlines()]


@pytest.mark.parametrize(("slots", "beams"), [(15, (1,)), (30, (2, 3))])
def test_a_padded_decode_fits_a_cache_without_a_slot_to_spare(cli, gpu, checkpoint, tmp_path, slots, beams):
    """Spare beams write behind the last slot of the others, where the cache must not end: with 15 slots, one beam
    reaches the last place it can; with 30, more of them fill the cache and are compacted."""
    bundle = tmp_path / "bundle"
    passed(cli("export", checkpoint, bundle, "--precision", "fp32", "--quiet"))
    passed(cli("build", bundle, "--max-length", 12, "--slots", slots, "--quiet"))
    for beam in beams:
        options = (*LINES, "--beam", beam, "--max-length", 12, "--json", "--quiet")
        found, _ = passed(cli("run", bundle, *options, "--backend", "tensorrt"))
        assert tokens(found) == tokens(passed(cli("run", bundle, *options))[0])


@pytest.mark.slow
def test_builds_that_differ_lie_side_by_side_and_the_one_that_fits_is_run(cli, gpu, checkpoint, tmp_path):
    bundle = tmp_path / "bundle"
    passed(cli("export", checkpoint, bundle, "--quiet"))
    builds = [
        (),
        ("--precision", "fp16"),
        ("--beam", 1, "--max-length", 20),
        ("--beam", 8, "--max-length", 20),
        ("--beam", 1, "--max-length", 10, "--name", "short"),
    ]
    for number, options in enumerate(builds, start=1):
        passed(cli("build", *options, bundle, "--quiet"))
        assert len(engine_names(open_bundle(bundle))) == number
        passed(cli("build", bundle, *options, "--quiet"))  # again: it is there
        assert len(engine_names(open_bundle(bundle))) == number
    opened = []
    own = trt_session.TrtSession.__init__

    def noted(self, trt, device, folder, passport, *given):
        opened.append(f"{passport.precision} beam {passport.ranges.beam} length {passport.ranges.target.max}")
        own(self, trt, device, folder, passport, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trt_session.TrtSession, "__init__", noted)
        for options, engine in (
            (("--max-length", 10), "fp32 beam 1:1:1 length 10"),
            (("--max-length", 11), "fp32 beam 1:1:1 length 20"),
            (("--max-length", 21), "fp32 beam 4:4:4 length 64"),
            ((), "fp32 beam 1:1:1 length 20"),
            (("--beam", 5), "fp32 beam 8:8:8 length 20"),
            (("--precision", "fp16"), "fp16 beam 1:4:4 length 64"),
            (("--engine", "short"), "fp32 beam 1:1:1 length 10"),
        ):
            passed(cli("run", bundle, "5 6", "--backend", "tensorrt", *options, "--quiet"))
            assert opened.pop() == engine, options
    code, _, err = cli("build", bundle, "--name", "short", "--quiet")
    assert code == 1
    assert "short is another engine, or damaged; choose another --name, or add --force to replace it" in err
    passed(cli("build", bundle, "--name", "short", "--force", "--quiet"))
    code, _, err = cli("build", bundle, "--name", "../out", "--quiet")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "--name '../out' cannot name a folder" in err


def test_an_engine_that_was_damaged_is_built_again_without_a_word(cli, gpu, checkpoint, tmp_path):
    bundle = tmp_path / "bundle"
    passed(cli("export", checkpoint, bundle, "--precision", "fp32", "--quiet"))
    passed(cli("build", bundle, "--quiet"))
    (name,) = engine_names(open_bundle(bundle))
    (bundle / "engines" / name / "encoder.engine").write_bytes(b"cut")
    passed(cli("build", bundle, "--quiet"))
    passed(cli("run", bundle, "5 6", "--backend", "tensorrt", "--quiet"))


# --- the precision that nobody named ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "backend", "chosen"),
    [
        (("fp16", "fp32"), "onnxruntime", "fp32"),
        (("int8", "fp16"), "onnxruntime", "fp16"),
        (("bf16", "int8"), "onnxruntime", "int8"),
        (("bf16", "int8"), "torch", "bf16"),
        (("w8a8", "int8"), "onnxruntime", "int8"),
        (("w8a8", "int8"), "tensorrt", "int8"),
        (("fp16", "fp32"), "tensorrt", "fp32"),
    ],
)
def test_the_most_precise_that_serves(tmp_path, held, backend, chosen):
    bundle = onnx_from_model(MODEL, tmp_path / "bundle", held)
    assert default_precision(bundle, backend) == chosen


def test_the_most_precise_that_every_target_and_backend_runs(gpu, cli, tmp_path):
    bundle = onnx_from_model(MODEL, tmp_path / "bundle", ("fp32", "fp16", "w8a8"))
    assert precision_to_build(bundle, ["sm89"]) == "fp32"
    assert precision_to_build(bundle, ["sm75", "sm89"]) == "fp16"
    assert precision_to_build(bundle, [], ahead_of_time=False) == "fp32"
    passed(cli("build", bundle.root, "--precision", "fp16", "--quiet"))
    assert default_precision(bundle, "tensorrt") == "fp16"
    assert shared_precision(bundle, ["onnxruntime", "tensorrt"]) == "fp16"
    assert shared_precision(bundle, ["torch", "onnxruntime"]) == "fp32"


def test_what_no_backend_runs_is_refused_with_what_to_add(cli, tmp_path):
    bundle = onnx_from_model(MODEL, tmp_path / "bundle", ("bf16",)).root
    code, _, err = cli("run", bundle, "5 6")
    assert code == 1
    assert err == (
        f"error: {bundle} holds only bf16, which onnxruntime does not run; "
        f"add them with: seq2engine export --add fp32 {bundle}\n"
    )
