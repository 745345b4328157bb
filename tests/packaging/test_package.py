"""Packages for GPU machines: what is in them, and that verify.py tells right engines from wrong ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.cudart_stand_in import Cudart
from support.handed_over import forget_scripts, not_a_number, ran, scaled_weight, script, wrong_engine
from support.stand_in_engines import (
    BEAMS,
    FOUR_BEAMS,
    MODEL,
    NARROWER,
    ONE_BEAM,
    copied,
    exported,
    put_engines,
    reference_greedy,
)
from support.tensorrt_stand_in import tensorrt_stand_in

from seq2engine import __version__
from seq2engine.errors import BundleError, RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.packaging.package import PackageOptions, package_from_bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return exported(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def package(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with engines of one beam for `tensorrt`; not to be written to."""
    where = tmp_path_factory.mktemp("package")
    return packaged(copied(bundles["static"], where / "run7"), where / "out")


@pytest.fixture(autouse=True)
def scripts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget_scripts()


def packaged(bundle: Bundle, out: Path, ranges: Any = ONE_BEAM, flavour: str = "tensorrt", **options: Any) -> Path:
    put_engines(bundle, ranges, flavour=flavour, name="one", **options)
    package_from_bundle(bundle, out, PackageOptions("fp32", threads=1))
    return out


def verified(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *argv: str,
    flavour: str = "tensorrt",
    trt: Any = None,
    cudart: Cudart | None = None,
) -> tuple[int, str, str]:
    """verify.py's exit code, output and error output, over the stand-in."""
    return ran(folder, "verify", monkeypatch, capsys, *argv, flavour=flavour, trt=trt, cudart=cudart)


@pytest.mark.each_value
@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("form", ["static", "growing"])
def test_right_engines_pass(
    form: str,
    flavour: str,
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    narrower = NARROWER if form == "static" else ()
    out = packaged(copied(bundles[form], tmp_path / "run7"), tmp_path / "out", FOUR_BEAMS, flavour, narrower=narrower)
    trt, cudart = tensorrt_stand_in(flavour), Cudart()
    result = tmp_path / "result.json"
    code, printed, errors = verified(
        out, monkeypatch, capsys, "--json", str(result), flavour=flavour, trt=trt, cudart=cudart
    )
    assert (code, errors) == (0, "")
    checks = json.loads((out / "package.json").read_text())["budgets"].keys()
    machine, *lines = printed.splitlines()
    assert machine.startswith(f"{flavour} {trt.__version__} on ")
    assert " (sm89), driver " in machine
    assert f"seq2engine {__version__}, fp32, {form} cache, graphs " in machine
    assert [line.split("  ")[1].strip() for line in lines[:-1]] == [*checks, "tokens"]
    assert all(line.startswith("PASS") for line in lines)
    assert {"encoder encoder_states", "decoder_step logits, step 7", "decoder_step self_v.1"} <= set(checks)
    assert lines[-1] == f"PASS: {flavour} {trt.__version__} on sm89: {len(lines) - 1} of {len(lines) - 1} checks passed"
    assert json.loads(result.read_text())["passed"] is True
    assert not trt.broken
    assert not trt.contexts
    assert not cudart.memory
    assert cudart.streams == 0


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_engines_in_other_precisions_pass(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several profiles; of int8 the reference has the same rounded weights, so rounding them is no error."""
    bundle = onnx_from_model(MODEL, tmp_path / "run7", (precision,))
    put_engines(bundle, FOUR_BEAMS, precision, "tensorrt", name="one", narrower=NARROWER)
    package_from_bundle(bundle, tmp_path / "out", PackageOptions(precision, threads=1))
    code, printed, errors = verified(tmp_path / "out", monkeypatch, capsys)
    assert (code, errors) == (0, ""), printed
    values = json.loads((tmp_path / "out" / "package.json").read_text())
    assert values["precision"] == precision
    assert len(values["ranges"]) == 1 + len(NARROWER)


def test_outputs_are_those_of_pytorch(package: Path) -> None:
    values = json.loads((package / "package.json").read_text())
    with np.load(package / "samples" / "batch0.npz") as arrays:
        sources = [ids[mask].tolist() for ids, mask in zip(arrays["source_ids"], arrays["source_mask"], strict=True)]
    assert len({len(source) for source in sources}) > 1
    expected = [reference_greedy(MODEL, source, values["steps"]) for source in sources]
    assert values["outputs"][: len(sources)] == expected


@pytest.mark.parametrize(
    ("graph", "change", "failing"),
    [
        ("encoder", scaled_weight, "encoder "),
        ("decoder_step", scaled_weight, "decoder_step "),
        ("decoder_step", not_a_number, "decoder_step logits, step 0"),
    ],
)
def test_wrong_engines_fail(
    graph: str,
    change: Callable[[onnx.ModelProto], None],
    failing: str,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of(package, tmp_path)
    wrong_engine(folder, graph, change)
    trt = tensorrt_stand_in("tensorrt")
    code, printed, errors = verified(folder, monkeypatch, capsys, trt=trt)
    failed = [line for line in printed.splitlines() if line.startswith("FAIL  ")]
    assert (code, errors) == (1, "")
    assert any(failing in line for line in failed)
    assert printed.splitlines()[-1].startswith("FAIL: tensorrt")
    if graph == "decoder_step":
        assert not any("encoder " in line for line in failed)
    if change is not_a_number:
        assert any("tokens" in line and "0 of 16 sources" in line for line in failed)
    assert not trt.broken


def copy_of(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "copy"))


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


REBUILD = "rebuild with: python build.py --force --flavour tensorrt --gpu sm86 sm89"
REFUSALS: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: (p / "package.json").unlink(), "{p}/package.json cannot be read (No such file or directory); copy the"),
    (lambda p: (p / "package.json").write_text("{"), "{p}/package.json is damaged (Expecting property name"),
    (lambda p: (p / "samples/batch0.npz").unlink(), "{p}/samples/batch0.npz is missing; copy the package again"),
    (lambda p: damage(p / "samples/batch1.npz"), "{p}/samples/batch1.npz is damaged (its hash differs); copy the"),
    (
        lambda p: (p / "engines/tensorrt/encoder.engine").unlink(),
        f"{{p}}/engines/tensorrt/encoder.engine is missing; {REBUILD}",
    ),
    (
        lambda p: damage(p / "engines/tensorrt/decoder_step.engine"),
        f"{{p}}/engines/tensorrt/decoder_step.engine is damaged (its hash differs); {REBUILD}",
    ),
    (
        lambda p: (p / "engines/tensorrt/engines.json").unlink(),
        "no engines here; build them with: python build.py",
    ),
    (
        lambda p: edit(p / "engines/tensorrt/engines.json", version="10.15.0"),
        f"the engines were built with tensorrt 10.15.0, installed is 10.16.1.11; {REBUILD}",
    ),
    (
        lambda p: edit(p / "engines/tensorrt/engines.json", made_from="elsewhere"),
        f"{{p}}/engines/tensorrt was built from other graphs than these; {REBUILD}",
    ),
    (
        lambda p: edit(p / "engines/tensorrt/engines.json", flavour="tensorrt_nowhere"),
        "tensorrt_nowhere cannot be imported (No module named 'tensorrt_nowhere'); install it with: pip install",
    ),
]


def test_what_cannot_be_verified_is_reported_in_one_line(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (spoil, expected) in enumerate(REFUSALS):
        folder = copy_of(package, tmp_path / str(number))
        spoil(folder)
        code, printed, errors = verified(folder, monkeypatch, capsys)
        assert (code, printed) == (1, "")
        assert errors.count("\n") == 1
        assert errors.startswith("error: " + expected.replace("{p}", str(folder))), errors


def test_machines_that_cannot_verify(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = verified(package, monkeypatch, capsys, cudart=Cudart(gpus=0))
    assert nobody == (1, "", "error: no NVIDIA GPU on this machine; run this on the one the engines are for\n")
    trt = tensorrt_stand_in("tensorrt")
    code, _, errors = verified(package, monkeypatch, capsys, trt=trt, cudart=Cudart(room=1000))
    assert (code, errors) == (1, "error: cudaMalloc failed: out of memory (CUDA error 2)\n")
    assert not trt.broken
    trt.has_room = False
    code, _, errors = verified(package, monkeypatch, capsys, trt=trt)
    assert code == 1
    assert "encoder.engine cannot be run on this GPU (IExecutionContext" in errors
    other = verified(package, monkeypatch, capsys, "--flavour", "tensorrt_rtx")
    wanted = "error: no tensorrt_rtx engines here; build them with: python build.py --flavour tensorrt_rtx\n"
    assert other == (1, "", wanted)


def test_a_machine_without_the_cuda_runtime(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(package, "verify")
    cuda_memory = sys.modules["cuda_memory"]
    monkeypatch.setattr(cuda_memory, "library_names", lambda: iter(["/nowhere/libcudart.so.13"]))
    with pytest.raises(cuda_memory.CudaError, match=r"^no CUDA runtime library found; install it with: pip install "):
        cuda_memory.Cuda()


def test_the_cuda_runtime_of_a_wheel_is_found(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(package, "verify")
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(library) in list(sys.modules["cuda_memory"].library_names())


def test_engines_of_both_flavours(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(package, tmp_path)
    (folder / "engines" / "tensorrt_rtx").mkdir()
    edit_target = folder / "engines" / "tensorrt_rtx" / "engines.json"
    edit_target.write_text((folder / "engines" / "tensorrt" / "engines.json").read_text())
    code, _, errors = verified(folder, monkeypatch, capsys)
    choose = "error: engines of tensorrt and tensorrt_rtx; choose with: --flavour tensorrt\n"
    assert (code, errors) == (1, choose)
    assert verified(folder, monkeypatch, capsys, "--flavour", "tensorrt")[0] == 0


@pytest.mark.slow
def test_build_py_builds_here(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real TensorRT-RTX, which needs no GPU to build; verify.py then gets as far as finding none."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    result = package_from_bundle(
        copied(bundles["static"], tmp_path / "run7"), tmp_path / "out", PackageOptions("fp32", ranges=BEAMS)
    )
    assert result.engines == "none"
    build = script(tmp_path / "out", "build")
    assert build.main(["--flavour", "tensorrt_rtx", "--gpu", "sm89"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: python run_all.py"
    folder = tmp_path / "out" / "engines" / "tensorrt_rtx"
    described = json.loads((folder / "engines.json").read_text())
    assert (described["flavour"], described["targets"]) == ("tensorrt_rtx", ["sm89"])
    assert {path.name for path in folder.iterdir()} == {
        *("encoder.engine", "decoder_step.engine", "candidates.engine", "engines.json")
    }
    assert script(tmp_path / "out", "verify").main([], Cudart(gpus=0)) == 1
    assert "no NVIDIA GPU" in capsys.readouterr().err
    (tmp_path / "out" / "graphs" / "decoder_step.onnx").write_bytes(b"nonsense")
    assert build.main(["--flavour", "tensorrt_rtx", "--gpu", "sm89", "--force"]) == 1
    assert "decoder_step.onnx is damaged (its hash differs); copy the package again" in capsys.readouterr().err


def test_build_py_without_tensorrt(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert script(package, "build").main(["--flavour", "tensorrt"]) == 1
    assert "tensorrt cannot be imported (" in capsys.readouterr().err


def test_the_command(cli: Any, bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = copied(bundles["static"], tmp_path / "run7")
    out = tmp_path / "out"
    words = ("package", bundle.root, out, "--precision", "fp16", "--beam", "2", "--max-length", "6", "--quiet")
    code, printed, _ = cli(*words)
    assert code == 0
    assert printed.splitlines()[-1] == "next, on the GPU machine: pip install -r requirements.txt && python run_all.py"
    values = json.loads((out / "package.json").read_text())
    assert (values["precision"], values["beams"], values["steps"], values["slots"]) == ("fp16", 2, 6, 12)
    assert values["graphs"]["decoder_step"]["profiles"][0]["tokens"] == [[1, 2], [8, 2], [32, 2]]
    code, _, errors = cli(*words)
    assert (code, errors) == (1, f"error: {out} exists; name another folder, or add --force to replace it\n")
    code, printed, _ = cli(*words, "--force", "--json")
    assert (code, json.loads(printed)["engines"]) == (0, "none")


def test_what_cannot_be_packaged(bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copied(bundles["static"], tmp_path / "run7")
    put_engines(bundle, name="one")
    put_engines(bundle, BEAMS, name="more")
    out = tmp_path / "out"
    with pytest.raises(SessionError, match=r"has no engine 'other', only more, one; build one with: "):
        package_from_bundle(bundle, out, PackageOptions("fp32", engine="other"))
    with pytest.raises(RequestError, match="engine one has its own shape ranges; leave either --engine or the ranges"):
        package_from_bundle(bundle, out, PackageOptions("fp32", engine="one", ranges=BEAMS))
    with pytest.raises(BundleError, match="holds no bf16 graphs"):
        package_from_bundle(bundle, out, PackageOptions("bf16"))

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seq2engine.packaging.package.write_engines", broken)
    with pytest.raises(KeyboardInterrupt):
        package_from_bundle(bundle, out, PackageOptions("fp32", engine="one", threads=1))
    assert [path.name for path in tmp_path.iterdir()] == ["run7"]
