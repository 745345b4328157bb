"""What is built again and what is not, several profiles and flags, builds side by side, and builds that are killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.builds import build_engines

from seq2engine.errors import BuildError
from seq2engine.export.artifact.build_flags import BuildFlags
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.passport import read_passport
from seq2engine.export.artifact.profiles import Range
from seq2engine.export.contract import DEVICE_GRAPHS, GRAPHS
from seq2engine.export.engines import jobs as build_jobs
from seq2engine.export.engines.reuse import facts_of

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")


NAME = "mine"
ALL = (*GRAPHS, *DEVICE_GRAPHS["static"])


@pytest.fixture
def counted(monkeypatch):
    """Engines that are a few bytes, no two builds the same; returns the graphs with weights that were built."""
    calls, tiny = [], []

    def stand_in(trt, model, path, *_):
        ours = calls if path.stem in GRAPHS else tiny
        ours.append(path.stem)
        return f"engine {len(ours)} of {path.stem}".encode()

    monkeypatch.setattr(build_jobs, "build_engine", stand_in)
    return calls


@pytest.fixture
def build(own_bundle, ranges, tmp_path):
    """Builds of one bundle with a cache of its own, of a few bytes each where `counted` is used."""

    def run(bundle=own_bundle, ranges=ranges, **options):
        place = {"cache": tmp_path / "cache", "targets": ["sm86"], "flavour": "tensorrt_rtx"}
        options = {**place, "precision": "fp16", "name": NAME, **options}
        return build_engines(bundle, ranges=ranges, **options)

    return run


def litter(folder):
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_the_same_build_again_builds_nothing(build, counted):
    reports = []
    first = build()
    assert counted == ["encoder", "decoder_step"]
    assert build(progress=lambda *what: reports.append(what)) == first
    assert reports == [(f"build: {graph} fp16", 1.0, "it was there") for graph in ALL]
    assert len(counted) == 2


def test_engines_without_weights_are_the_same_for_all_weights(build, own_bundle, monkeypatch):
    built = []

    def stand_in(trt, model, path, *_):
        built.append(path.stem)
        return path.stem.encode()

    monkeypatch.setattr(build_jobs, "build_engine", stand_in)
    build()
    assert sorted(built) == sorted(ALL)
    streamed = BuildFlags(weight_streaming=True)
    build(flags=streamed, name="streamed")
    assert built[len(ALL) :] == list(GRAPHS)
    build(precision="fp32", name="other", cache=None)
    assert built[len(ALL) + 2 :] == [*GRAPHS, "gather_slots"]  # which is of the cache's type


def test_a_rebuild_builds_and_replaces_though_all_is_there(build, counted, own_bundle):
    first = build()
    second = build(rebuild=True)
    assert len(counted) == 4
    assert second.keys == first.keys
    assert second.engines["encoder"].sha256 != first.engines["encoder"].sha256
    assert read_passport(own_bundle.root / "engines" / NAME / "passport.json") == second
    assert build() == second


def test_another_bundle_of_the_same_model_is_served_by_the_cache(build, counted, own_bundle, tmp_path):
    first = build()
    twin = open_bundle(shutil.copytree(own_bundle.root, tmp_path / "twin", ignore=lambda *_: ["engines"]))
    reports = []
    assert build(twin, progress=lambda *what: reports.append(what)) == first
    assert [detail for _, _, detail in reports] == ["from the cache"] * len(ALL)
    assert len(counted) == 2
    shutil.rmtree(twin.root / "engines")
    build(twin, cache=None)
    assert len(counted) == 4


def test_damaged_engines_are_not_reused(build, counted, own_bundle, tmp_path):
    build()
    folder = own_bundle.root / "engines" / NAME
    (folder / "encoder.engine").write_bytes(b"damaged")
    build(force=True)
    assert len(counted) == 2  # both from the cache
    assert (folder / "encoder.engine").read_bytes() == b"engine 1 of encoder"
    (folder / "encoder.engine").write_bytes(b"damaged")
    for entry in (tmp_path / "cache").iterdir():
        (entry / "engine").write_bytes(b"damaged as well")
    build(force=True)
    assert counted[2:] == ["encoder"]  # the step of the bundle was sound
    (folder / "passport.json").write_text("{}")
    build(force=True)
    assert counted[3:] == ["decoder_step"]  # which the cache could not give


def test_what_changes_the_engine_is_built(build, counted, ranges):
    build()
    build(slots=40, force=True)
    assert counted[2:] == ["decoder_step"]  # the encoder has no cache
    build(ranges=dataclasses.replace(ranges, batch=Range(1, 2, 8)), force=True)
    assert counted[3:] == ["encoder", "decoder_step"]
    build(targets=["sm89"], name=None)
    build(flags=BuildFlags(weight_streaming=True), force=True)
    assert len(counted) == 9
    build(force=True)
    assert len(counted) == 9  # the first one again, from the cache


def test_a_full_disk_is_an_error_in_one_line(build, own_bundle, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_jobs, "build_engine", full)
    with pytest.raises(BuildError) as caught:
        build()
    folder = own_bundle.root / "engines" / NAME
    assert str(caught.value) == f"cannot write {folder}: No space left on device; make room there and build again"
    assert not folder.parent.exists()


# --- profiles and flags, for real -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_profiles_the_widest_first(build, ranges, own_bundle):
    narrow = dataclasses.replace(ranges, batch=Range(1, 1, 1), source=Range(1, 4, 8))
    passport = build(ranges=narrow, narrower=[ranges])
    assert passport.profiles == (ranges, narrow)
    one = build(ranges=ranges, force=True)
    assert one.keys["encoder"] != passport.keys["encoder"]
    assert one.engines["encoder"].bytes < passport.engines["encoder"].bytes
    for graph, entry in passport.engines.items():
        assert entry.launches == one.engines[graph].launches  # of one profile, not of all together
        assert len(entry.narrower_launches) == 1
        assert abs(entry.narrower_launches[0] - entry.launches) <= 4
        assert entry.fused_attentions == entry.attentions


@pytest.mark.slow
def test_weights_may_stay_on_the_host(build, own_bundle):
    """An engine's header has the bytes of its weights, without those that are streamed."""
    sizes = []
    for streaming in (False, True):
        passport = build(flags=BuildFlags(weight_streaming=streaming), force=True)
        assert passport.flags.weight_streaming is streaming
        engine = (own_bundle.root / "engines" / NAME / "encoder.engine").read_bytes()
        sizes.append(int.from_bytes(engine[56:64], "little"))
    assert sizes[0] > 100_000
    assert sizes[1] == 0


def test_a_workspace_that_is_too_small_is_reported(build):
    with pytest.raises(BuildError, match=r"could not build encoder.onnx: .*workspace"):
        build(flags=BuildFlags(workspace=1))


# --- side by side -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_side_by_side_is_the_same_as_one_after_another(build, own_bundle, tmp_path):
    reports = []
    passport = build(workers=2, progress=lambda stage, fraction, detail="": reports.append((stage, fraction)))
    both = "build: encoder fp16 + decoder_step fp16"
    assert list(dict.fromkeys(stage for stage, _ in reports)) == [both, *(f"build: {graph} fp16" for graph in ALL[2:])]
    fractions = [fraction for stage, fraction in reports if stage == both]
    assert fractions[-1] == 1.0
    assert len(set(fractions)) > 20
    alone = build(rebuild=True)
    assert alone.keys == passport.keys
    for graph, entry in passport.engines.items():
        assert (entry.launches, entry.bytes) == (alone.engines[graph].launches, alone.engines[graph].bytes)
        # Each of the large ones had a process of its own, in which TensorRT wrote the whole engine at the end.
        assert graph not in GRAPHS or entry.peak_memory >= entry.bytes
    assert litter(own_bundle.root) == litter(tmp_path / "cache") == []


def test_a_worker_reports_why_it_failed(build, own_bundle):
    with pytest.raises(BuildError, match=r"^tensorrt_rtx could not build (encoder|decoder_step).onnx: .*workspace"):
        build(workers=2, flags=BuildFlags(workspace=1))
    assert not (own_bundle.root / "engines").exists()


def test_a_worker_that_crashes_is_an_error_in_one_line(build, own_bundle, monkeypatch, tmp_path):
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nread job\necho Segmentation fault >&2\nexit 139\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(BuildError) as caught:
        build(workers=2)
    assert str(caught.value).endswith(".onnx: its process ended with 139 Segmentation fault")
    assert not (own_bundle.root / "engines").exists()


def test_without_memory_for_both_they_are_built_in_turn(build, counted, monkeypatch):
    monkeypatch.setattr(build_jobs, "available_memory", lambda: 1 << 20)
    build(workers=2)
    assert counted == ["encoder", "decoder_step"]


# --- killed -----------------------------------------------------------------------------------------------------------


def start_build(root, cache, *options):
    """A build in a process of its own, up to the moment in which TensorRT begins."""
    command = [sys.executable, "-m", "seq2engine", "build", root, "--gpu", "sm86", "--batch", "1:2:4"]
    command += [
        "--max-length",
        "16",
        "--engine-cache",
        cache,
        "--rebuild",
        "--json",
        "--precision",
        "fp16",
        "--beam",
        "1",
        "--name",
        NAME,
        *options,
    ]
    build = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert build.stderr.readline().startswith(b"build: encoder fp16")
    return build


def check_whole(root, cache):
    """Whatever is in place is complete: engines by their passport, entries of the cache by their facts."""
    for path in (root / "engines").glob("[!.]*"):
        passport = read_passport(path / "passport.json")
        assert all(facts_of(entry).describe(path / entry.file) for entry in passport.engines.values())
    for path in cache.glob("[!.]*"):
        facts = json.loads((path / "facts.json").read_text())
        assert (path / "engine").stat().st_size == facts["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_build_that_is_killed_leaves_no_half_engine_and_the_next_one_no_litter(own_bundle, tmp_path, how):
    root, cache = own_bundle.root, tmp_path / "cache"
    whole = start_build(root, cache)
    started = time.monotonic()
    whole.communicate()
    assert whole.returncode == 0
    takes = time.monotonic() - started
    chance, killed = random.Random(17), 0
    for until, options in ((0.0, ()), (0.2, ()), (0.6, ("--jobs", "2")), (1.0, ())):  # the first at once, so surely
        build = start_build(root, cache, *options)
        time.sleep(takes * chance.uniform(until / 2, until))
        build.send_signal(getattr(signal, how))
        _, error = build.communicate(timeout=600)
        killed += build.returncode != 0
        check_whole(root, cache)
        if how == "SIGINT" and build.returncode != 0:
            assert build.returncode in (130, -signal.SIGINT)  # the latter while Python still imports, or already ends
            if build.returncode == 130:
                assert error.endswith(b"interrupted; nothing half-written was left\n")
            assert litter(root) == litter(cache) == []
    assert killed
    (root / "engines" / ".sm120-fp16-beam9.new-abc").mkdir()  # of a build that was killed, and is never run again
    last = start_build(root, cache)
    passport = json.loads(last.communicate()[0])
    assert last.returncode == 0
    check_whole(root, cache)
    assert litter(root) == litter(cache) == []
    assert os.listdir(root / "engines") == [NAME]
    assert json.loads((root / "engines" / NAME / "passport.json").read_text()) == passport
