"""The `tensorrt` flavour, which needs a GPU to build: exercised on a stand-in that is as strict about its rules."""

from __future__ import annotations

import dataclasses
import shutil
import sys

import onnx
import pytest
from support.builds import build_engines
from support.stand_in_engines import session_over
from support.tensorrt_builder_stand_in import KERNELS, BuilderFlag, MemoryPoolType, building_stand_in

from seq2engine.common.tensorrt_module import gpu_name
from seq2engine.errors import BuildError
from seq2engine.export.artifact.build_flags import BuildFlags
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.passport import read_passport
from seq2engine.export.artifact.profiles import Range
from seq2engine.export.contract import DEVICE_GRAPHS
from seq2engine.export.engines import to_engine
from seq2engine.export.engines.refit import refit_engines
from seq2engine.export.engines.to_engine import name_of
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions

NAME = "local-fp32-beam1"
REFIT = BuildFlags(refit=True)


@pytest.fixture
def trt(monkeypatch):
    module = building_stand_in()
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


@pytest.fixture
def build(own_bundle, ranges, trt):
    def run(bundle=own_bundle, **options):
        return build_engines(bundle, ranges=ranges, precision="fp32", flavour="tensorrt", **{"name": NAME, **options})

    return run


@pytest.fixture(scope="module")
def other_root(tmp_path_factory):
    """A bundle of the same architecture as `own_bundle`, with other weights."""
    model = random_model(PRESETS["tiny"], seed=99)
    return onnx_from_model(model, tmp_path_factory.mktemp("other") / "bundle", ("fp32",)).root


@pytest.fixture
def other(other_root, tmp_path):
    return open_bundle(shutil.copytree(other_root, tmp_path / "other"))


def test_flags_reach_the_builder(build, trt):
    build(flags=BuildFlags(weight_streaming=True, refit=True, workspace=5 << 20))
    with_weights, tiny = trt.configs[:2], trt.configs[2:]
    assert len(tiny) == len(DEVICE_GRAPHS["static"])
    for config in with_weights:
        assert config.flags == {BuilderFlag.WEIGHT_STREAMING, BuilderFlag.REFIT}  # and not TF32
    assert all(not config.flags for config in tiny)
    assert all(config.pools == {MemoryPoolType.WORKSPACE: 5 << 20} for config in trt.configs)


def test_every_profile_reaches_the_builder_the_widest_first(build, trt, ranges):
    narrow = dataclasses.replace(ranges, batch=dataclasses.replace(ranges.batch, opt=1, max=1))
    build(narrower=[narrow])
    batches = [[next(iter(shapes.values()))[2][0] for shapes in config.profiles] for config in trt.configs]
    assert batches == [[4, 1]] * (2 + len(DEVICE_GRAPHS["static"]))


def test_kernels_are_timed_once_for_a_gpu(build, trt, tmp_path):
    cache = tmp_path / "cache"
    build(cache=cache)
    assert trt.timed == KERNELS  # by the encoder; the step found them
    build(cache=cache, rebuild=True)
    assert trt.timed == KERNELS
    (saved,) = (cache / "timings").iterdir()
    trt.environment = "sm90 driver 600"
    build(cache=cache, rebuild=True)
    assert trt.timed == KERNELS * 2  # those of another GPU are of no use
    saved.write_bytes(b"damaged")
    build(cache=cache, rebuild=True)
    assert trt.timed == KERNELS * 3
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_timing_cache_that_cannot_be_written_costs_no_build(build, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "timings").write_text("in the way")
    build(cache=tmp_path / "cache")
    assert "the next build measures its kernels again" in caplog.text


def test_an_engine_notes_the_gpu_it_was_built_on_and_is_not_reused_on_another(build, monkeypatch, trt):
    assert build().device == gpu_name() == ""
    monkeypatch.setattr(to_engine, "gpu_name", lambda: "NVIDIA H100")
    first = build(force=True)
    assert first.device == "NVIDIA H100"
    monkeypatch.setattr(to_engine, "gpu_name", lambda: "NVIDIA L4")
    assert build(force=True).keys != first.keys


# --- refit ------------------------------------------------------------------------------------------------------------


def decoded(session):
    with session:
        found = generate(session, [[5, 17, 250, 9], [77, 3]], SearchOptions(max_length=12))
    return [best.tokens for best, *_ in found]


def test_a_refitted_engine_decodes_with_its_new_weights(build, own_bundle, other, trt):
    old = build(flags=REFIT)
    stages = []
    made = refit_engines(other, own_bundle, progress=lambda stage, fraction, detail="": stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["refit: encoder fp32", "refit: decoder_step fp32"]
    folder = other.root / "engines" / NAME
    assert read_passport(folder / "passport.json") == made
    assert decoded(session_over(folder, trt)) == decoded(open_session(other, precision="fp32"))
    assert decoded(open_session(other)) != decoded(open_session(own_bundle))
    assert made.engines["encoder"].onnx_fingerprint == other.graph("fp32", "encoder").fingerprint
    assert made.keys != old.keys
    builds = len(trt.configs)
    assert build(other, flags=REFIT) == made  # the same as if it had been built from these weights
    assert len(trt.configs) == builds
    again = refit_engines(own_bundle, other, force=True)  # and it can be refitted again
    assert again.keys == old.keys
    assert decoded(session_over(own_bundle.root / "engines" / NAME, trt)) == decoded(open_session(own_bundle))


@pytest.mark.parametrize("beam", [1, 3])
def test_weights_that_were_made_of_others_are_swapped_too(beam, own_bundle, other, ranges, trt):
    """A post-norm step has its queries folded: products of the model's weights, which only the new ones can give."""
    wide = dataclasses.replace(ranges, beam=Range(beam, beam, beam))
    options = {"ranges": wide, "precision": "fp32", "flavour": "tensorrt", "flags": REFIT}
    old = build_engines(own_bundle, **options)
    made = refit_engines(other, own_bundle)
    folders = [own_bundle.root / "engines" / name_of(old), other.root / "engines" / name_of(made)]
    models = [folded_weights(folder / "decoder_step.engine") for folder in folders]
    assert {"trt/decoder.0/out_and_q", "trt/decoder.1/qkv_and_q"} <= models[0].keys() == models[1].keys()
    changed = {name for name, content in models[0].items() if content != models[1][name]}
    assert {"trt/decoder.0/out_and_q", "trt/decoder.1/qkv_and_q", "trt/decoder.1/q_outside"} <= changed
    session = session_over(folders[1], trt)
    search = SearchOptions(max_length=12, beam=beam)
    sources = [[5, 17, 250, 9], [77, 3]]
    with session, open_session(other, "torch") as reference:
        assert [best.tokens for best, *_ in generate(session, sources, search)] == [
            best.tokens for best, *_ in generate(reference, sources, search)
        ]
    assert build_engines(other, **options) == made  # and it is the engine that a build would have made
    assert made.keys != old.keys


def folded_weights(path):
    """Weights that are not the model's own, by name, out of an engine of the stand-in."""
    content = path.read_bytes()[16:]
    model = onnx.load_from_string(content[8 + int.from_bytes(content[:8], "little") :])
    weights = {weight.name: weight.SerializeToString() for weight in model.graph.initializer}
    return {name: found for name, found in weights.items() if name.startswith("trt/decoder.")}


@pytest.fixture
def refused(other, own_bundle):
    def refusal(new=other, old=own_bundle, **options):
        with pytest.raises(BuildError) as caught:
            refit_engines(new, old, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refusal


def test_refits_that_are_refused(build, refused, own_bundle, other, tmp_path, trt):
    root = own_bundle.root
    none = (
        f"{root} has no engine that can be refitted; build one on a GPU machine with: "
        f"seq2engine build {root} --flavour tensorrt --refit"
    )
    assert refused() == none
    build()
    assert refused() == none
    again = (
        f"build it instead with: seq2engine build {other.root} --precision fp32 --flavour tensorrt "
        "--batch 1:2:4 --beam 1 --source-length 1:8:32 --max-length 1:8:32"
    )
    assert refused(engine=NAME) == f"engine {NAME} was built without --refit, so its weights are fixed; {again}"
    assert refused(engine="best") == (
        f"{root} has no engine 'best', only {NAME}; see them with: seq2engine inspect {root}"
    )
    build(flags=REFIT, force=True)
    bigger = random_model(dataclasses.replace(PRESETS["tiny"], decoder_layers=1))
    wrong = onnx_from_model(bigger, tmp_path / "wrong", ("fp32",))
    assert refused(wrong).startswith(
        f"{wrong.root} is of another architecture than {root}: their encoder differs; build"
    )
    trt.__version__ = "10.99"
    assert refused().startswith(f"engine {NAME} was built with tensorrt 10.16.1.11, installed is 10.99; build it again")
    file = root / "engines" / NAME / "encoder.engine"
    file.write_bytes(file.read_bytes()[:-1])
    assert refused().startswith(f"{file} is not the file its passport describes; build it instead with: ")
    assert not (other.root / "engines").exists()


def test_rtx_engines_are_not_refitted(build, refused, own_bundle, other):
    build(flags=REFIT)
    path = own_bundle.root / "engines" / NAME / "passport.json"
    path.write_text(dataclasses.replace(read_passport(path), flavour="tensorrt_rtx").to_json())
    assert refused().startswith(
        f"engine {NAME} cannot be refitted: tensorrt_rtx needs a CUDA driver to build weights that can be "
        "swapped; build it"
    )


def test_the_command(build, cli, own_bundle, other):
    build(flags=REFIT)
    code, text, error = cli("refit", other.root, own_bundle.root)
    assert code == 0
    assert "built with --refit" in text
    assert "refit: decoder_step fp32: done" in error
    code, _, error = cli("refit", other.root, own_bundle.root, "--quiet")
    assert (code, error) == (
        1,
        f"error: {other.root}/engines/{NAME} exists; name another folder, or add --force to replace it\n",
    )
