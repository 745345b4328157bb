"""Bundles to engines: what TensorRT makes of our graphs, and everything that is refused before it is asked."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.builds import build_engines

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import BuildError, BundleError, SessionError, UsageError
from seq2engine.export.artifact.build_flags import BuildFlags
from seq2engine.export.artifact.gpu_support import target_from_text, unknown_target
from seq2engine.export.artifact.passport import read_passport
from seq2engine.export.artifact.profiles import Range, check_ranges
from seq2engine.export.contract import DEVICE_GRAPHS, GRAPHS
from seq2engine.export.device_graphs.of_engine import graphs_of_engine
from seq2engine.export.engines import jobs as build_jobs
from seq2engine.export.engines.targets import check_targets, target_groups
from seq2engine.export.engines.to_engine import check_slots, default_ranges, engine_name, name_of
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

# --- what is built ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "base"])
def test_every_attention_of_the_fp16_encoder_is_fused(name, built):
    encoder = built(name).passport.engines["encoder"]
    assert (encoder.fused_attentions, encoder.attentions) == (2, 2)


@pytest.mark.slow
def test_fp32_engines_compute_in_fp32(built):
    """TF32, which keeps 10 bits of 23, is on by default; an engine notes the options it was made by."""
    for graph in ("encoder", "decoder_step"):
        assert re.findall(rb"\btf32=(\d)", built(precision="fp32").bytes_of(graph)) == [b"0"]


@pytest.mark.slow
def test_beams_may_stay_dynamic(built):
    passport = built("tiny", "static", "fp16", "any").passport
    step = passport.engines["decoder_step"]
    assert step.fused_attentions == step.attentions == 4
    assert step.launches <= 4 + 13 * 2
    tokens = next(tensor for tensor in step.inputs if tensor.name == "tokens")
    assert tokens.shapes == ((1, 1), (2, 2), (4, 4))


@pytest.mark.slow
def test_the_growing_cache_builds_from_empty(built):
    step = built("tiny", "growing", "fp16", 1).passport.engines["decoder_step"]
    past = next(tensor for tensor in step.inputs if tensor.name == "self_k.0")
    assert past.shapes == ((1, 4, 0, 16), (2, 4, 7, 16), (4, 4, 31, 16))
    assert step.fused_attentions == step.attentions == 4


def test_cache_outputs_share_the_memory_of_their_inputs_in_the_static_form_only(built):
    static, growing = (built("tiny", form).passport.engines for form in ("static", "growing"))
    cache_outputs = [t.name for t in static["decoder_step"].outputs if t.name != "logits"]
    assert len(cache_outputs) == 4
    assert static["decoder_step"].aliases == {name: name.removeprefix("new_") for name in cache_outputs}
    assert set(static["decoder_step"].aliases.values()) <= {t.name for t in static["decoder_step"].inputs}
    assert static["encoder"].aliases == growing["encoder"].aliases == growing["decoder_step"].aliases == {}


def test_the_passport_is_written_and_describes_the_build(built, bundles, ranges):
    made, bundle = built(), bundles("tiny")
    passport = read_passport(made.folder / "passport.json")
    assert passport == made.passport
    assert (passport.flavour, passport.targets, passport.precision) == ("tensorrt_rtx", ("sm86",), "fp16")
    assert (passport.cache_form, passport.ranges, passport.slots) == ("static", ranges, 32)
    assert passport.version == load_tensorrt("tensorrt_rtx").__version__
    step = bundle.specs("fp16")["decoder_step"]
    tiny = {name: spec for name, (_, spec) in graphs_of_engine(step, "static", ranges, 32).items()}
    specs = bundle.specs("fp16") | tiny
    assert tuple(passport.engines) == (*GRAPHS, *tiny)
    assert set(tiny) == set(DEVICE_GRAPHS["static"])
    for graph, entry in passport.engines.items():
        file = made.folder / entry.file
        assert (entry.bytes, entry.sha256) == (file.stat().st_size, sha256_of(file))
        if graph in GRAPHS:
            assert entry.onnx_fingerprint == bundle.graph("fp16", graph).fingerprint
        spec = specs[graph]
        for have, want in ((entry.inputs, spec.inputs), (entry.outputs, spec.outputs)):
            assert [(t.name, t.dtype, t.axes) for t in have] == [(t.name, t.dtype, t.axes) for t in want]
        assert entry.build_seconds > 0
    files = {path.name for path in made.folder.iterdir()}
    assert files == {"passport.json", *(f"{graph}.engine" for graph in specs)}
    assert list(passport.reductions) == ["next_greedy", "candidates", "logits"]
    assert [one.candidates for one in passport.reductions.values()] == [8, 8, bundle.config.target_vocab]


def test_progress_rises_to_one_for_each_graph(own_bundle, ranges):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    reports = []

    def report(stage, fraction, detail=""):
        reports.append((stage, fraction))

    passport = build_engines(own_bundle, (), ranges, "fp16", report, flavour="tensorrt_rtx", cache=None)
    stages = [f"build: {graph} fp16" for graph in passport.engines]
    assert list(dict.fromkeys(stage for stage, _ in reports)) == stages
    assert stages[:2] == ["build: encoder fp16", "build: decoder_step fp16"]
    for stage in ("build: encoder fp16", "build: decoder_step fp16"):
        fractions = [fraction for name, fraction in reports if name == stage]
        assert fractions == sorted(fractions)
        assert fractions[0] < 0.1
        assert fractions[-1] == 1.0
        assert len(set(fractions)) > 20  # a bar that moves


# --- cancelling -------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import json, os, signal, sys
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.engines.build_options import BuildOptions
from seq2engine.export.engines.to_engine import engines_from_onnx

reports = []

def interrupt(stage, fraction, detail=""):
    if stage == "build: decoder_step fp16" and (stage, 0) not in reports:
        reports.append((stage, 0))
        os.kill(os.getpid(), signal.SIGINT)
    reports.append((stage, fraction))

ranges = ShapeRanges(Range(1, 2, 4), Range(1, 1, 1), Range(1, 8, 32), Range(1, 8, 32))
options = BuildOptions(flavour="tensorrt_rtx", force=True)
try:
    engines_from_onnx(sys.argv[1], ["sm86"], ranges, "fp16", options, interrupt)
except KeyboardInterrupt:
    print(json.dumps(reports[-1]))
    raise
"""


def interrupted_build(root):
    """Builds in a process of its own that gets SIGINT while the second graph is built."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, root], capture_output=True, text=True, timeout=600)
    assert done.returncode in (-signal.SIGINT, 130), done.stderr
    stage, fraction = json.loads(done.stdout)
    assert stage == "build: decoder_step fp16"
    assert fraction < 1


def test_a_cancelled_build_leaves_nothing_or_what_was_there(own_bundle):
    """The first engine was finished when the interrupt came; not even that may stay."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    before = sorted(path.name for path in own_bundle.root.iterdir())
    interrupted_build(own_bundle.root)
    assert sorted(path.name for path in own_bundle.root.iterdir()) == before

    old = own_bundle.root / "engines" / "sm86-fp16-beam1"
    old.mkdir(parents=True)
    (old / "passport.json").write_text("an engine of last week")
    interrupted_build(own_bundle.root)
    assert (old / "passport.json").read_text() == "an engine of last week"
    assert list(old.iterdir()) == [old / "passport.json"]
    assert list(old.parent.iterdir()) == [old]


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_building(monkeypatch):
    """Engines that are a few bytes; returns the arguments of every build."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    calls = []

    def stand_in(trt, model, path, shapes, targets, *_):
        if path.stem in GRAPHS:
            calls.append((path.name, tuple(targets)))
        return b"engine of " + path.name.encode()

    monkeypatch.setattr(build_jobs, "build_engine", stand_in)
    return calls


def test_engines_that_are_there_are_refused_and_with_force_replaced(own_bundle, ranges, without_building):
    def build(**options):
        options = {"flavour": "tensorrt_rtx", "name": "mine", **options}
        return build_engines(own_bundle.root, ["sm89"], ranges, "fp32", **options)

    first = build()
    assert without_building == [("encoder.onnx", ("sm89",)), ("decoder_step.onnx", ("sm89",))]
    folder = own_bundle.root / "engines" / "mine"
    with pytest.raises(BuildError, match="mine is another engine, or damaged; choose another --name, or add --force"):
        build(slots=40)
    assert len(without_building) == 2  # refused before anything was built
    second = build(slots=40, force=True)
    assert without_building[2:] == [("decoder_step.onnx", ("sm89",))]  # the encoder has no slots: it was there
    assert (first.slots, second.slots) == (32, 40)
    assert read_passport(folder / "passport.json") == second
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_is_not_ours_is_never_replaced(own_bundle, ranges, without_building):
    folder = own_bundle.root / "engines" / "mine"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"has no passport\.json, so it is not ours to replace"):
        build_engines(own_bundle, (), ranges, flavour="tensorrt_rtx", force=True, name="mine")
    assert without_building == []


def test_a_failed_build_leaves_nothing(own_bundle, ranges, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")

    def failing(*_):
        raise BuildError("no luck")

    monkeypatch.setattr(build_jobs, "build_engine", failing)
    with pytest.raises(BuildError, match="no luck"):
        build_engines(own_bundle, (), ranges, flavour="tensorrt_rtx")
    assert not (own_bundle.root / "engines").exists()


@pytest.mark.parametrize(
    ("flavour", "targets", "beam", "name"),
    [
        ("tensorrt_rtx", (), Range(1, 1, 1), "portable-fp16-beam1"),
        ("tensorrt_rtx", ("sm86", "sm120"), Range(4, 4, 4), "sm86-sm120-fp16-beam4"),
        ("tensorrt", (), Range(1, 2, 8), "local-fp16-beam1to8"),
    ],
)
def test_a_folder_name_tells_builds_apart(flavour, targets, beam, name, ranges):
    wide = dataclasses.replace(ranges, beam=beam)
    names = [engine_name(flavour, targets, "fp16", wide, {"encoder": key, "decoder_step": "c"}) for key in "ab"]
    assert len(set(names)) == 2
    assert all(re.fullmatch(f"{name}-[0-9a-f]{{8}}", each) for each in names)


# --- refused before any build -----------------------------------------------------------------------------------------


@pytest.fixture
def refused(own_bundle, ranges, without_building):
    """Options -> the one line in which they are refused, with nothing built and nothing written."""

    def refusal(error=BuildError, **options):
        options = {"ranges": ranges, "flavour": "tensorrt_rtx", **options}
        with pytest.raises(error) as raised:
            build_engines(own_bundle, **options)
        assert "\n" not in str(raised.value)
        assert without_building == []
        assert not (own_bundle.root / "engines").exists()
        return str(raised.value)

    return refusal


def test_targets_that_cannot_share_an_engine(refused):
    message = refused(targets=["sm75", "sm89", "sm86"])
    assert message == "sm75, sm89, sm86 cannot share an engine; build one for each of: sm89, sm86 and sm75"


@pytest.mark.parametrize(
    ("targets", "groups"),
    [
        ([], [[]]),
        (["sm75"], [["sm75"]]),
        (["sm86", "sm89"], [["sm86", "sm89"]]),
        (["sm86", "sm75", "sm120", "sm75"], [["sm86", "sm120"], ["sm75"]]),
    ],
)
def test_turing_gets_an_engine_of_its_own(targets, groups):
    assert target_groups(targets) == groups


def test_refitting_is_not_for_rtx(refused):
    assert refused(flags=BuildFlags(refit=True)) == (
        "--refit is for tensorrt only: tensorrt_rtx compiles refittable weights with a CUDA driver, and none of its "
        "builds needs one; leave --refit out and build again for new weights, which takes seconds"
    )


def test_a_workspace_of_nothing(refused):
    assert "--workspace 0 is not a size" in refused(flags=BuildFlags(workspace=0))


def test_profiles_that_leave_requests_between_them(refused, ranges):
    other = dataclasses.replace(ranges, batch=Range(8, 8, 8), source=Range(1, 4, 8))
    assert refused(narrower=[other]) == (
        "profiles: none of 2 covers the others, so requests would fall between them; make one of them the widest: "
        "batch 1 to 8 beam 1 to 1 source length 1 to 32 max length 1 to 32"
    )


def test_fp32_on_turing_names_the_reason_and_the_nearest_command(refused, own_bundle):
    assert refused(targets=["sm89", "sm75"], precision="fp32") == (
        "sm75 cannot run fp32 (Turing has no fp32 matrix kernel in TensorRT-RTX); "
        f"build with: seq2engine build {own_bundle.root} --gpu sm75 --precision fp16"
    )


def test_unknown_targets_are_all_named_with_the_known_ones(refused):
    message = refused(UsageError, targets=["sm91", "sm86", "rtx4090"])
    assert message == (
        "unknown target 'sm91', expected one of sm75, sm80, sm86, sm89, sm120, sm121; "
        "unknown target 'rtx4090', expected one of sm75, sm80, sm86, sm89, sm120, sm121"
    )


def test_ranges_beyond_the_model(refused, ranges):
    longer = dataclasses.replace(ranges, source=Range(1, 32, 65), target=Range(1, 32, 100))
    assert refused(ranges=longer) == (
        "shape ranges: source length 1:32:65 exceeds the model's maximum of 64; "
        "max length 1:32:100 exceeds the model's maximum of 64"
    )


def test_ranges_that_fall(refused, ranges):
    assert "batch 8:4:2 must rise from at least 1" in refused(ranges=dataclasses.replace(ranges, batch=Range(8, 4, 2)))


def test_too_few_slots(refused, ranges):
    assert refused(slots=31) == "--slots 31 is too few: one path of 32 tokens needs at least 32"


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_slots_suffice_from_one_path_and_a_step_of_every_beam(beam, ranges):
    wide = dataclasses.replace(ranges, beam=Range(beam, beam, beam))
    assert check_slots(None, wide, "static") == wide.slots == 32 * beam
    assert check_slots(wide.slots, wide, "static") == wide.slots  # what is chosen by default may be asked for, too
    least = 31 + beam
    assert check_slots(least, wide, "static") == least
    with pytest.raises(BuildError, match=f"needs at least {least}"):
        check_slots(least - 1, wide, "static")


def test_a_growing_cache_has_no_slots_to_set():
    with pytest.raises(BuildError, match="this bundle's cache grows; leave --slots out"):
        check_slots(64, default_ranges(PRESETS["tiny"]), "growing")


def test_a_precision_that_was_not_exported(refused, own_bundle):
    message = refused(BundleError, precision="bf16")
    assert message.startswith(f"{own_bundle.root} holds no bf16 graphs, only fp32, fp16; ")
    assert message.endswith(f"add them with: seq2engine export --add bf16 {own_bundle.root}")


def test_a_graph_that_was_changed(refused, own_bundle):
    path = own_bundle.root / "onnx/fp16/encoder.onnx.data"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "is not the file the manifest describes" in refused(BundleError, precision="fp16")


def test_a_flavour_that_is_not_installed(refused, monkeypatch):
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails, whatever is installed
    alone = refused(SessionError, flavour="tensorrt")
    assert alone.startswith("tensorrt cannot be imported (")
    assert alone.endswith("; install it with: pip install 'seq2engine[gpu]'")
    either = refused(SessionError, flavour=None)
    assert either.startswith("tensorrt or tensorrt_rtx cannot be imported (")
    assert either.endswith("; install it with: pip install 'seq2engine[gpu]' or 'seq2engine[rtx]'")


def test_an_unknown_flavour(refused):
    message = refused(SessionError, flavour="onnx")
    assert message == "unknown TensorRT flavour 'onnx', expected one of tensorrt, tensorrt_rtx"


def test_the_tensorrt_of_this_machines_gpu_takes_no_targets(tmp_path):
    local = SimpleNamespace(__name__="tensorrt")  # has no list of compute capabilities
    check_targets(local, [], "fp32", tmp_path)
    with pytest.raises(BuildError, match="tensorrt builds for the GPU of this machine only; leave --gpu out"):
        check_targets(local, ["sm89"], "fp32", tmp_path)


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PRESETS["tiny"], PRESETS["base"], ModelConfig(max_source=5, max_target=1)])
@pytest.mark.parametrize(
    ("precision", "form", "beams"),
    [
        ("fp32", "static", Range(4, 4, 4)),
        ("fp32", "growing", Range(1, 4, 4)),
        ("fp16", "static", Range(1, 4, 4)),
        ("int8", "growing", Range(1, 4, 4)),
    ],
)
def test_default_ranges_suit_every_model(config, precision, form, beams):
    ranges = default_ranges(config, precision, form)
    check_ranges(ranges, config)
    assert ranges.beam == beams
    assert ranges.source.max == min(config.max_source, 256)


def test_ranges_may_be_left_out(own_bundle, without_building):
    passport = build_engines(own_bundle, flavour="tensorrt_rtx")
    assert passport.ranges == default_ranges(PRESETS["tiny"], "fp32")
    assert (passport.targets, passport.precision, passport.slots) == ((), "fp32", 256)
    assert os.listdir(own_bundle.root / "engines") == [name_of(passport)]


@pytest.mark.parametrize("text", ["sm89", "SM89", "sm_89", "89", "8.9", " 8.9 "])
def test_a_target_as_people_write_it(text):
    assert target_from_text(text) == "sm89"


@pytest.mark.parametrize(("text", "target"), [("12.0", "sm120"), ("120", "sm120"), ("9.0", "sm90"), ("ada", "ada")])
def test_other_targets(text, target):
    assert target_from_text(text) == target


def test_a_gpu_that_rtx_does_not_build_for_gets_an_alternative():
    assert unknown_target("sm90", ["sm89"]).startswith(
        "TensorRT-RTX builds nothing for sm90 (Hopper); use `tensorrt` on"
    )
    assert unknown_target("sm91", ["sm89"]) == "unknown target 'sm91', expected one of sm89"
