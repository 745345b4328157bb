"""A passport is read back as it was written, and refused in one line when it is not one."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from seq2engine.errors import BundleError
from seq2engine.export.artifact.build_flags import PLAIN, BuildFlags
from seq2engine.export.artifact.passport import (
    EngineEntry,
    EngineTensor,
    Passport,
    Reduction,
    command_of_passport,
    passport_from_dict,
    read_passport,
)
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.contract import DEVICE_GRAPHS, GRAPHS

ENTRY = EngineEntry(
    file="decoder_step.engine",
    bytes=12345,
    sha256="ab" * 32,
    onnx_fingerprint="cd" * 32,
    inputs=(
        EngineTensor("tokens", "int64", ("B", "K"), ((1, 1), (2, 1), (4, 1))),
        EngineTensor("self_k.0", "float16", ("B", 4, "L", 16), ((1, 4, 32, 16), (2, 4, 32, 16), (4, 4, 32, 16))),
    ),
    outputs=(EngineTensor("new_self_k.0", "float16", ("B", 4, "L", 16)),),
    aliases={"new_self_k.0": "self_k.0"},
    launches=27,
    fused_attentions=4,
    attentions=4,
    build_seconds=1.25,
    peak_memory=5 << 20,
    narrower_launches=(26,),
    key="ef" * 32,
)
PASSPORT = Passport(
    flavour="tensorrt_rtx",
    version="1.7.1",
    targets=("sm86", "sm120"),
    precision="fp16",
    cache_form="static",
    ranges=ShapeRanges(Range(1, 2, 4), Range(1, 1, 1), Range(1, 8, 32), Range(1, 8, 32)),
    slots=32,
    narrower=(ShapeRanges(Range(1, 1, 1), Range(1, 1, 1), Range(1, 8, 16), Range(1, 8, 32)),),
    flags=BuildFlags(weight_streaming=True, workspace=1 << 20),
    device="a GPU",
    reductions={"candidates": Reduction(8, "greedy and beam search")},
    engines={name: dataclasses.replace(ENTRY, file=f"{name}.engine") for name in (*GRAPHS, *DEVICE_GRAPHS["static"])},
)


def test_the_command_that_builds_such_an_engine_tells_profiles_and_flags(tmp_path):
    root = tmp_path / "a bundle"
    assert command_of_passport(root, PASSPORT, ["sm86"], source=Range(1, 8, 40), slots=36) == (
        f"seq2engine build '{root}' --precision fp16 --gpu sm86 --flavour tensorrt_rtx --batch 1:2:4 1 --beam 1 "
        "--source-length 1:8:40 1:8:16 --max-length 1:8:32 --slots 36 --weight-streaming --workspace 1M"
    )
    plain = dataclasses.replace(PASSPORT, narrower=(), flags=PLAIN, flavour="tensorrt")
    assert command_of_passport(root, plain, []) == (
        f"seq2engine build '{root}' --precision fp16 --flavour tensorrt --batch 1:2:4 --beam 1 --source-length 1:8:32 "
        "--max-length 1:8:32"
    )


def refusal(path):
    with pytest.raises(BundleError) as error:
        read_passport(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{path} ")
    assert message.endswith(f"; build the engine again with: seq2engine build {path.parents[2]} --force")
    return message


def test_a_passport_survives_the_round_trip(tmp_path):
    path = tmp_path / "passport.json"
    path.write_text(PASSPORT.to_json())
    assert read_passport(path) == PASSPORT
    # Equal is not enough for a tuple that came back as a list inside a frozen value: it could not be hashed.
    assert hash(read_passport(path).engines["decoder_step"].inputs) == hash(ENTRY.inputs)


def test_the_file_is_plain_json(tmp_path):
    values = json.loads(PASSPORT.to_json())
    assert values["format"] == 3
    assert values["ranges"]["source"] == {"min": 1, "opt": 8, "max": 32}
    assert values["engines"]["decoder_step"]["aliases"] == {"new_self_k.0": "self_k.0"}


def test_a_missing_passport(tmp_path):
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "passport.json")


def changed(**fields):
    return json.dumps({**json.loads(PASSPORT.to_json()), **fields})


def engine(**fields):
    engines = json.loads(PASSPORT.to_json())["engines"]
    return changed(engines={**engines, "encoder": {**engines["encoder"], **fields}})


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "passport.json"
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("[]", "expected an object"),
        ("null", "expected an object"),
        ("{}", "format"),
        (changed(format=1), "format 1, this version reads 3"),
        (changed(colour="green"), "colour"),
        (changed(ranges=[]), "ranges is [], expected an object"),
        (changed(ranges={"batch": {"min": 1}}), "missing"),
        (changed(ranges={"batch": {"min": 1, "opt": 1, "max": 1}}), "missing"),
        (changed(engines=["encoder"]), "engines is ['encoder'], expected an object"),
        (changed(reductions={"candidates": 8}), "reductions.candidates is 8, expected an object"),
        (changed(engines={"encoder": {"file": "encoder.engine"}}), "inputs"),
        (changed(targets=[1]), "targets[0] is 1, expected text"),
        (changed(targets=["sm86; rm"]), "expected such as sm89"),
        (changed(slots=10**30), "slots"),
        (changed(cache_form="paged"), "cache form 'paged'"),
        (engine(build_seconds="x"), "engines.encoder.build_seconds is 'x', expected a number"),
        (engine(file=3), "engines.encoder.file is 3, expected text"),
        (engine(file="../x"), "the file of encoder is '../x', expected a file beside the passport"),
        (engine(inputs=[{"name": "a", "dtype": "complex", "axes": ["Q"]}]), "is of 'complex'"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_passport(content, reason, tmp_path):
    path = tmp_path / "passport.json"
    path.write_text(content)
    message = refusal(path)
    assert "cannot be used (" in message
    assert reason in message


def test_engines_from_before_there_were_candidates_are_refused_with_the_build_that_replaces_them(tmp_path):
    path = tmp_path / "bundle" / "engines" / "mine" / "passport.json"
    path.parent.mkdir(parents=True)
    values = json.loads(changed(format=2))
    del values["reductions"]
    path.write_text(json.dumps(values))
    with pytest.raises(BundleError) as error:
        read_passport(path)
    command = command_of_passport(tmp_path / "bundle", PASSPORT, PASSPORT.targets)
    assert str(error.value) == (
        f"{path} is of format 2, of engines that can only output all logits, expected 3; "
        f"build them again with: {command} --name mine --force"
    )


def test_every_field_is_needed():
    values = json.loads(PASSPORT.to_json())
    for name in values.keys() - {"format"}:
        with pytest.raises((KeyError, ValueError)):
            passport_from_dict({key: value for key, value in values.items() if key != name})
