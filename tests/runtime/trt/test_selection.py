"""Opening engines: every refusal before and while one is opened."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.builds import build_engines
from support.host_device import HostDevice
from support.stand_in_engines import (
    BEAMS,
    ONE_BEAM,
    copied,
    put_engines,
    session_over,
)
from support.tensorrt_stand_in import tensorrt_stand_in

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import BundleError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import PASSPORT, EngineEntry, Passport, read_passport
from seq2engine.export.artifact.profiles import Range, Workload
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.trt import session as trt_session
from seq2engine.runtime.trt.device import NO_GPU
from seq2engine.runtime.trt.session import TrtSession

BUILD = "seq2engine build {root} --precision fp32"


REBUILD = (
    f"rebuild with: {BUILD} --gpu sm86 sm89 --flavour tensorrt_rtx "
    "--batch 1:2:4 --beam 1 --source-length 1:8:16 --max-length 1:8:12 --force"
)


@pytest.fixture
def bundle(bundles: dict[str, Path], tmp_path: Path) -> Bundle:
    return copied(bundles["static"], tmp_path / "run7")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and TensorRT, as far as a session can tell."""
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    monkeypatch.setattr(trt_session, "load_tensorrt", tensorrt_stand_in)


def refusal(bundle: Bundle, engine: str | None = None, kind: type[Exception] = SessionError) -> str:
    """The message with which opening fails, one line, with the bundle's folder as {root}."""
    with pytest.raises(kind) as caught:
        open_session(bundle, "tensorrt", "fp32", engine=engine)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(bundle.root), "{root}")


def change_passport(folder: Path, change: Callable[[Passport], Passport]) -> None:
    (folder / PASSPORT).write_text(change(read_passport(folder / PASSPORT)).to_json())


def change_entry(folder: Path, graph: str, **values: Any) -> None:
    def change(passport: Passport) -> Passport:
        entry: EngineEntry = dataclasses.replace(passport.engines[graph], **values)
        return dataclasses.replace(passport, engines={**passport.engines, graph: entry})

    change_passport(folder, change)


def test_no_engine(bundle: Bundle) -> None:
    expected = f"no fp32 engine in {{root}}; build one with: {BUILD} --gpu sm89"
    assert refusal(bundle) == expected
    put_engines(bundle, precision="fp16", name="half")
    assert refusal(bundle) == expected


def test_several_engines(bundle: Bundle, gpu: None) -> None:
    put_engines(bundle, name="one")
    put_engines(bundle, BEAMS, name="more")
    put_engines(bundle, precision="fp16", name="half")
    with open_session(bundle, "tensorrt", engine="one") as session:
        assert session.limits.beam == 1
    with open_session(bundle, "tensorrt") as session:  # what serves most, as nothing is known of what is to come
        assert (session.precision, session.limits.beam) == ("fp32", 3)
    assert refusal(bundle, "half") == "engine half of {root} is fp16, not fp32; ask for it with: --precision fp16"


@pytest.mark.parametrize(
    ("workload", "chosen"),
    [
        (Workload(), "beams"),
        (Workload(beam=1), "long"),  # for most of what may come
        (Workload(beam=2), "beams"),
        (Workload(beam=3), "beams"),
        (Workload(beam=4), "beams"),  # which none takes: the widest says so
        (Workload(beam=1, source=16), "one"),
        (Workload(beam=1, source=17), "long"),
        (Workload(source=17, target=30), "long"),
        (Workload(batch=1, beam=1, source=8, target=8), "one"),
    ],
)
def test_the_engine_is_chosen_by_shape(bundle: Bundle, gpu: None, workload: Workload, chosen: str) -> None:
    put_engines(bundle, name="one")
    put_engines(bundle, BEAMS, name="beams")
    long = dataclasses.replace(ONE_BEAM, source=Range(1, 8, 32), target=Range(1, 8, 30), batch=Range(1, 1, 1))
    put_engines(bundle, long, name="long")
    with open_session(bundle, "tensorrt", workload=workload) as session:
        assert cast(TrtSession, session).folder.name == chosen


def test_an_engine_that_is_stale_or_of_another_gpu_stands_back(bundle: Bundle, gpu: None) -> None:
    for name in ("a stale one", "for another GPU"):
        put_engines(bundle, BEAMS, name=name)
    change_entry(bundle.root / "engines" / "a stale one", "encoder", onnx_fingerprint="0" * 64)
    change_passport(
        bundle.root / "engines" / "for another GPU", lambda passport: dataclasses.replace(passport, targets=("sm120",))
    )
    put_engines(bundle, name="ours")
    with open_session(bundle, "tensorrt") as session:
        assert cast(TrtSession, session).folder.name == "ours"


def test_an_engine_that_is_not_there(bundle: Bundle) -> None:
    built = f"build one with: {BUILD} --gpu sm89"
    assert refusal(bundle, "big") == f"{{root}} has no engine 'big', none; {built}"
    put_engines(bundle, name="one")
    assert refusal(bundle, "big") == f"{{root}} has no engine 'big', only one; {built}"
    assert refusal(bundle, "../engines/one") == f"{{root}} has no engine '../engines/one', only one; {built}"


def test_a_build_that_was_killed_is_not_an_engine(bundle: Bundle) -> None:
    (bundle.root / "engines" / ".one.x7k2").mkdir(parents=True)
    (bundle.root / "engines" / "note.txt").write_text("")
    assert refusal(bundle).startswith("no fp32 engine in")


def test_a_passport_that_is_missing_or_unreadable(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    (folder / PASSPORT).write_text("{")
    assert "passport.json cannot be used (" in refusal(bundle, kind=BundleError)
    (folder / PASSPORT).unlink()
    assert "passport.json cannot be read (No such file" in refusal(bundle, kind=BundleError)


def test_a_passport_of_half_the_engines(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    change_passport(folder, lambda p: dataclasses.replace(p, engines={"encoder": p.engines["encoder"]}))
    message = refusal(bundle, kind=BundleError)
    assert message.startswith(f"{{root}}/engines/{folder.name}/passport.json cannot be used (")
    assert "reduction 'candidates' without its engine" in message
    assert message.endswith("; build the engine again with: seq2engine build {root} --force")


def test_a_missing_engine_file(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    (folder / "decoder_step.engine").unlink()
    path = f"{{root}}/engines/{folder.name}/decoder_step.engine"
    assert refusal(bundle) == f"{path} is missing, though its passport lists it; {REBUILD}"


def test_a_truncated_engine_file(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    path = folder / "decoder_step.engine"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:1000])
    shown = f"{{root}}/engines/{folder.name}/decoder_step.engine"
    assert refusal(bundle) == f"{shown} has 1000 bytes, its passport has {size}; copy it again, or {REBUILD}"


def test_a_damaged_engine_file(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    path = folder / "encoder.engine"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    shown = f"{{root}}/engines/{folder.name}/encoder.engine"
    assert refusal(bundle) == (
        f"{shown} is not the file its passport describes (its hash differs); copy it again, or {REBUILD}"
    )


def test_an_engine_of_other_graphs(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    change_entry(folder, "decoder_step", onnx_fingerprint="0" * 64)
    shown = f"{{root}}/engines/{folder.name}/decoder_step.engine"
    assert refusal(bundle) == (
        f"{shown} is stale: it was built from another decoder_step graph than the bundle now holds; {REBUILD}"
    )


def test_an_engine_file_outside_the_bundle(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    change_entry(folder, "encoder", file="../../../secret.engine")
    assert refusal(bundle, kind=BundleError) == (
        f"{{root}}/engines/{folder.name}/passport.json cannot be used (the file of encoder is "
        "'../../../secret.engine', expected a file beside the passport); "
        "build the engine again with: seq2engine build {root} --force"
    )


def test_no_gpu(bundle: Bundle) -> None:
    put_engines(bundle)
    assert refusal(bundle) == NO_GPU
    assert NO_GPU == (
        "no NVIDIA GPU on this machine, which running a TensorRT engine needs; "
        "use --backend onnxruntime, or copy the bundle to a GPU machine"
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["static", "growing"])
def test_a_real_build_has_the_passport_that_sessions_are_tested_with(
    form: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    bundle = copied(bundles[form], tmp_path / "run7")
    real = build_engines(bundle, ["sm86", "sm89"], ONE_BEAM, "fp32", flavour="tensorrt_rtx")
    assert refusal(bundle) == NO_GPU  # its files are in order
    stand_in = read_passport(put_engines(bundle, name="stand-in") / PASSPORT)
    for graph, entry in real.engines.items():
        for part in ("file", "onnx_fingerprint", "inputs", "outputs", "aliases"):
            assert getattr(entry, part) == getattr(stand_in.engines[graph], part)
    for part in ("flavour", "targets", "precision", "cache_form", "ranges", "slots"):
        assert getattr(real, part) == getattr(stand_in, part)


def test_files_are_checked_before_the_gpu(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    (folder / "encoder.engine").write_bytes(b"")
    assert "has 0 bytes" in refusal(bundle)


def test_a_flavour_that_is_not_installed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(trt_session, "load_tensorrt", load_tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    put_engines(bundle)
    assert refusal(bundle) == (
        "tensorrt_rtx cannot be imported (import of tensorrt_rtx halted; None in sys.modules); "
        "install it with: pip install 'seq2engine[rtx]'"
    )


def test_nothing_but_tensorrt_is_imported(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(trt_session, "load_tensorrt", load_tensorrt)
    folder = put_engines(bundle)
    change_passport(folder, lambda p: dataclasses.replace(p, flavour="antigravity"))
    assert "(flavour 'antigravity', expected one of tensorrt, tensorrt_rtx)" in refusal(bundle, kind=BundleError)


def test_another_version(bundle: Bundle, gpu: None) -> None:
    folder = put_engines(bundle)
    change_passport(folder, lambda p: dataclasses.replace(p, version="1.6.0"))
    assert refusal(bundle) == (
        f"engine {folder.name} was built with tensorrt_rtx 1.6.0, installed is 1.7.1.116; {REBUILD}"
    )


def test_another_gpu(bundle: Bundle, gpu: None) -> None:
    put_engines(bundle, targets=("sm120",), name="blackwell", slots=20)
    assert refusal(bundle) == (
        "engine blackwell was built for sm120, this GPU is sm89 (stand-in GPU); build one for it with: "
        f"{BUILD} --gpu sm89 --flavour tensorrt_rtx "
        "--batch 1:2:4 --beam 1 --source-length 1:8:16 --max-length 1:8:12 --slots 20"
    )


@pytest.mark.parametrize(
    ("flavour", "targets", "capability", "runs"),
    [
        ("tensorrt_rtx", (), "sm80", True),
        ("tensorrt_rtx", (), "sm120", True),
        ("tensorrt_rtx", (), "sm75", False),
        ("tensorrt_rtx", ("sm75",), "sm75", True),
        ("tensorrt", (), "sm90", True),
    ],
)
def test_which_engine_runs_where(
    flavour: str,
    targets: tuple[str, ...],
    capability: str,
    runs: bool,
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    gpu: None,
) -> None:
    monkeypatch.setattr(trt_session, "CudaDevice", lambda: HostDevice(capability))
    put_engines(bundle, flavour=flavour, targets=targets, name="one")
    if runs:
        open_session(bundle, "tensorrt", "fp32").close()
    else:
        assert f"this GPU is {capability} (stand-in GPU); build one for it with: " in refusal(bundle)


def test_an_engine_of_tensorrt_runs_on_the_gpu_it_was_built_on(bundle: Bundle, gpu: None) -> None:
    folder = put_engines(bundle, flavour="tensorrt", targets=(), name="local")
    change_passport(folder, lambda p: dataclasses.replace(p, device="stand-in GPU"))
    open_session(bundle, "tensorrt", "fp32").close()
    change_passport(folder, lambda p: dataclasses.replace(p, device="NVIDIA H100"))
    assert refusal(bundle) == (
        "engine local was built for NVIDIA H100, this GPU is sm89 (stand-in GPU); build one for it with: "
        f"{BUILD} --flavour tensorrt --batch 1:2:4 --beam 1 --source-length 1:8:16 --max-length 1:8:12 --force"
    )


def test_an_engine_that_tensorrt_will_not_open(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    (folder / "encoder.engine").write_bytes(b"not an engine")
    trt = tensorrt_stand_in()
    with pytest.raises(SessionError) as caught:
        session_over(folder, trt)
    assert str(caught.value).replace(str(bundle.root), "{root}") == (
        f"{{root}}/engines/{folder.name}/encoder.engine cannot be opened by tensorrt_rtx 1.7.1.116 "
        f"(Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.); {REBUILD}"
    )


def test_the_real_tensorrt_rtx_takes_our_logger(bundle: Bundle) -> None:
    """As far as it goes without a GPU: the real bindings read the file, refuse it, and tell our logger why."""
    tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    folder = put_engines(bundle)
    with pytest.raises(SessionError, match=r"encoder.engine cannot be opened by tensorrt_rtx 1[.0-9]+ \(.+\); rebuild"):
        session_over(folder, tensorrt_rtx)


def test_a_gpu_without_room(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    trt = tensorrt_stand_in()
    trt.has_room = False
    with pytest.raises(SessionError, match=r"stand-in GPU cannot run it \(.*OutOfMemory\); free some GPU memory, or "):
        session_over(folder, trt)
    assert not trt.broken


def test_a_second_engine_that_fails_closes_the_first(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    (folder / "decoder_step.engine").write_bytes(b"not an engine")
    trt = tensorrt_stand_in()
    with pytest.raises(SessionError, match=r"decoder_step.engine cannot be opened"):
        session_over(folder, trt)
    assert not trt.contexts
    assert not trt.broken


@pytest.mark.parametrize("what", ["dtype", "name", "shapes"])
def test_an_engine_that_differs_from_its_passport(what: str, bundle: Bundle) -> None:
    folder = put_engines(bundle)
    inputs = read_passport(folder / PASSPORT).engines["decoder_step"].inputs
    wrong = {"dtype": "int32", "name": "token", "shapes": ((1, 1), (2, 1), (8, 1))}[what]
    changed = (dataclasses.replace(inputs[0], **{what: wrong}), *inputs[1:])
    change_entry(folder, "decoder_step", inputs=changed)
    named = r"\(token, tokens\)" if what == "name" else r"\(tokens\)"
    with pytest.raises(SessionError, match=rf"decoder_step.engine is not what its passport records {named}; rebuild"):
        session_over(folder)


def test_aliases_that_differ_from_the_passport(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    change_entry(folder, "decoder_step", aliases={"new_self_k.0": "self_v.0"})
    with pytest.raises(SessionError, match=r"wants new_self_k.0 in the memory of self_k.0, its passport has self_v.0"):
        session_over(folder)


def test_a_tensorrt_that_cannot_tell_aliases_goes_by_the_passport(bundle: Bundle) -> None:
    folder = put_engines(bundle, flavour="tensorrt")
    with session_over(folder, tensorrt_stand_in("tensorrt", tells_aliases=False)) as session:
        aliases = session.engines["decoder_step"].aliases
    assert aliases == {f"new_self_{part}.{layer}": f"self_{part}.{layer}" for layer in range(2) for part in "kv"}


def test_run_names_in_one_line_what_to_build(bundle: Bundle, gpu: None, cli: Any) -> None:
    """Of an option that the engine cannot serve, and of an engine from before there were candidates."""
    folder = put_engines(bundle, name="mine")
    flags = ("--backend", "tensorrt", "--precision", "fp32", "--max-length", 4, "--quiet")
    assert cli("run", bundle.root, "5 6", *flags)[0] == 0
    for wanted, at_most in (("--beam 8", "beam 8, at most 1"), ("--max-length 20", "max length 20, at most 12")):
        code, out, error = cli("run", bundle.root, "5 6", *flags, *wanted.split())
        assert (code, out, error.count("\n")) == (1, "", 1)
        assert error.startswith(f"error: search options: {at_most}; rebuild with: seq2engine build {bundle.root} "), (
            error
        )
        option = wanted.replace("--max-length 20", "--max-length 1:8:20")
        assert re.search(rf" {option} (.* )?--force\n", error), error
    code, out, error = cli("run", bundle.root, "5 6", *flags, "--max-length", 500)
    assert "build" not in error  # the model itself has not so many positions
    older = {**json.loads((folder / PASSPORT).read_text()), "format": 2}
    del older["reductions"]
    (folder / PASSPORT).write_text(json.dumps(older))
    for command in (("run", bundle.root, "5 6", *flags), ("inspect", bundle.root)):
        code, out, error = cli(*command)
        assert (code, error.count("\n")) == (1, 1)
        assert "engines that can only output all logits" in error
        assert f"build them again with: seq2engine build {bundle.root}" in error
        assert error.endswith("--name mine --force\n")
