"""`build` and `plan` as a user types them: profiles, targets that cannot share an engine, and a plan that builds."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil

import pytest

from seq2engine.export.contract import DEVICE_GRAPHS, GRAPHS
from seq2engine.export.engines import jobs as build_jobs
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")

SMALL = dataclasses.replace(PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    model = random_model(SMALL, 1)
    return {form: onnx_from_model(model, folder / form, ("fp16",), form).root for form in ("static", "growing")}


@pytest.fixture
def bundle(bundles, tmp_path):
    return shutil.copytree(bundles["static"], tmp_path / "a bundle")


@pytest.fixture
def built(monkeypatch):
    """Engines that are a few bytes; returns which graphs with weights were built for which targets."""
    calls = []

    def stand_in(trt, model, path, shapes, targets, progress, narrower=(), *_):
        if path.stem in GRAPHS:
            calls.append((path.stem, tuple(targets), 1 + len(narrower)))
        return b"engine"

    monkeypatch.setattr(build_jobs, "build_engine", stand_in)
    return calls


@pytest.fixture
def corpus(tmp_path):
    """Lines of ids: many short ones, some long ones, one that is too long."""
    path = tmp_path / "corpus.txt"
    lengths = [3] * 20 + [6] * 10 + [17] * 5 + [40] * 2 + [99]
    path.write_text("\n".join(" ".join(["7"] * length) for length in lengths))
    return path


def refused(result, *parts, exits=1):
    code, out, error = result
    assert (code, out) == (exits, "")
    assert len(error.strip().split("\n")) == 1
    for part in parts:
        assert part in error


def test_options_with_several_ranges_are_several_profiles(cli, bundle, built):
    code, text, _ = cli(
        "build",
        bundle,
        "--gpu",
        "sm86",
        "--source-length",
        "1:8:16",
        "1:16:64",
        "--batch",
        "1",
        "1:4:8",
        "--max-length",
        "20",
    )
    assert code == 0
    assert "profile 0: batch 1:4:8, beam 1:4:4, source 1:16:64, output 20:20:20" in text
    assert "profile 1: batch 1:1:1, beam 1:4:4, source 1:8:16, output 20:20:20" in text
    assert built == [("encoder", ("sm86",), 2), ("decoder_step", ("sm86",), 2)]
    refused(
        cli("build", bundle, "--source-length", "8", "16", "32", "--batch", "1", "2"),
        "3 profiles need one range or 3 of every option, not 2 of --batch",
    )
    refused(cli("build", bundle, "--source-length", "8", "16"), "none of 2 covers the others")


def test_turing_is_built_apart(cli, bundle, built):
    code, text, _ = cli("build", bundle, "--gpu", "sm75", "sm86", "sm89", "--json", "--no-engine-cache")
    assert code == 0
    assert [passport["targets"] for passport in json.loads(text)] == [["sm86", "sm89"], ["sm75"]]
    names = sorted(path.name.rpartition("-")[0] for path in (bundle / "engines").iterdir())
    assert names == ["sm75-fp16-beam1to4", "sm86-sm89-fp16-beam1to4"]
    assert cli("build", bundle, "--gpu", "sm75,sm86", "--name", "mine", "--quiet")[0] == 0
    assert {path.name for path in (bundle / "engines").iterdir()} >= {"mine-sm75", "mine-sm86"}
    del built[4:]
    assert [targets for _, targets, _ in built] == [("sm86", "sm89")] * 2 + [("sm75",)] * 2


def test_every_target_is_checked_before_the_first_build(cli, bundle, built):
    refused(cli("build", bundle, "--gpu", "sm86", "sm75", "sm90"), "builds nothing for sm90 (Hopper)")
    assert built == []


def test_flags_are_in_the_passport_and_shown(cli, bundle, built):
    code, text, _ = cli("build", bundle, "--weight-streaming", "--workspace", "64M")
    assert code == 0
    assert "built with --weight-streaming --workspace 64M" in text
    code, text, _ = cli("inspect", bundle, "--json")
    (passport,) = json.loads(text)["engines"].values()
    assert passport["flags"] == {"weight_streaming": True, "refit": False, "workspace": 64 << 20}
    assert len(passport["engines"]["encoder"]["key"]) == 64
    refused(cli("build", bundle, "--workspace", "much"), "--workspace 'much' is not a size", exits=2)
    refused(cli("build", bundle, "--refit"), "--refit is for tensorrt only")


def test_the_same_build_is_not_built_again_but_for_rebuild(cli, bundle, built, tmp_path):
    cache = tmp_path / "my cache"
    for options, builds in (((), 2), ((), 2), (("--rebuild",), 4)):
        code, _, error = cli("build", bundle, "--engine-cache", cache, *options)
        assert code == 0
        assert len(built) == builds
    assert len(list(cache.iterdir())) == 2 + len(DEVICE_GRAPHS["static"])
    shutil.rmtree(bundle / "engines")
    code, _, error = cli("build", bundle, "--engine-cache", cache)
    assert "build: encoder fp16: done in 0.0 s, from the cache" in error
    assert len(built) == 4


# --- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["static", "growing"])
def test_a_plan_ends_with_a_command_that_builds_it(cli, bundles, built, corpus, form):
    options = ("--profiles", 3, "--gpu", "sm86", "--beam", 2)
    code, text, _ = cli("plan", corpus, bundles[form], *options, "--ratio", "1.2")
    assert code == 0
    assert "1 requests are longer than the model takes and were left out" in text
    assert "outputs are 1.2 times their sources" in text
    *_, command = text.strip().split("\n")
    assert command.startswith("next: seq2engine build ")
    words = shlex.split(command.removeprefix("next: seq2engine "))
    code, built_text, _ = cli(*words, "--force")
    assert code == 0
    assert built == [("encoder", ("sm86",), 3), ("decoder_step", ("sm86",), 3)]
    assert "profile 0: batch 1:8:32, beam 2:2:2, source 1:40:40" in built_text


def test_a_plan_by_decoding_as_json(cli, bundles, corpus):
    code, text, error = cli("plan", corpus, bundles["growing"], "--json", "--count", 5, "--profiles", 2)
    assert code == 0
    assert "plan: decode: done" in error
    plan = json.loads(text)
    assert (plan["serving"]["instances"], plan["serving"]["rows"]) == (1, 32)
    assert "memory is not known" in plan["serving"]["reason"]
    assert len(plan["profiles"]) == 2
    assert plan["waste"] < plan["one_profile_waste"]
    assert plan["left_out"] == 1
    assert plan["command"].startswith("seq2engine build ")


def test_plans_that_are_refused(cli, bundles, corpus, tmp_path):
    bundle = bundles["static"]
    many = cli("plan", corpus, bundle, "--profiles", 10**9, "--ratio", 1)  # had taken 22 GB
    assert many == cli("plan", corpus, bundle, "--profiles", 100, "--ratio", 1)
    refused(cli("plan", tmp_path / "none.txt", bundle), "cannot read", "none.txt")
    refused(cli("plan", corpus, bundle, "--profiles", 0, "--ratio", 1), "--profiles 0, expected at least 1", exits=2)
    refused(cli("plan", corpus, bundle, "--ratio", 0), "ratio 0.0")
    refused(cli("plan", corpus, bundle, "--precision", "fp32", "--ratio", 1), "holds no fp32 graphs")
    refused(cli("plan", corpus, bundle, "--batch", "many", "--ratio", 1), "--batch 'many' is not a range")
    (tmp_path / "words.txt").write_text("five\n")
    refused(cli("plan", tmp_path / "words.txt", bundle, "--ratio", 1), "line 1: 'five' is not a token id")
