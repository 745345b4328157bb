"""Runs the scripts of a package in this process, over the stand-ins of TensorRT and of the CUDA runtime library."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cudart_stand_in import Cudart
from tensorrt_stand_in import tensorrt_stand_in

from seq2engine.package import SCRIPTS

BESIDE = tuple(name.removesuffix(".py") for name in SCRIPTS)  # what the scripts import from their own folder


def script(folder: Path, name: str) -> ModuleType:
    """A script of that package, fresh, as is all that it imports from its folder."""
    forget_scripts()
    spec = importlib.util.spec_from_file_location(f"handed_over_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget_scripts() -> None:
    for name in BESIDE:
        sys.modules.pop(name, None)


def ran(
    folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *argv: object,
    flavour: str = "tensorrt",
    trt: Any = None,
    cudart: Cudart | None = None,
) -> tuple[int, str, str]:
    """A script's exit code, output and error output."""
    monkeypatch.setitem(sys.modules, flavour, trt or tensorrt_stand_in(flavour))
    code = script(folder, name).main([str(arg) for arg in argv], cudart or Cudart())
    return (code, *capsys.readouterr())
