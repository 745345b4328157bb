"""Runs the scripts of a package in this process, over the stand-ins of TensorRT and of the CUDA runtime library."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from seq2engine.packaging.package import SCRIPTS
from support.cudart_stand_in import Cudart
from support.tensorrt_stand_in import engine_bytes, tensorrt_stand_in

BESIDE = tuple(name.removesuffix(".py") for name in SCRIPTS)  # what the scripts import from their own folder

# One option of a model's own each, that every search of a package obeys.
OWN_OPTIONS: list[dict[str, Any]] = [
    {"forced_bos": 7},
    {"forced_eos": 2},
    {"min_length": 9},
    {"max_length": 6},
    {"banned": [[0], [2], [5, 6], *([token] for token in range(40, 120))]},
    {"first_banned": list(range(100, 250))},
    {"allowed": list(range(3, 90))},
    {"no_repeat_ngram": 1},
    {"source_no_repeat_ngram": 1},
    {"repetition_penalty": 1.7},
]


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


def wrong_engine(folder: Path, graph: str, change: Callable[[onnx.ModelProto], None]) -> None:
    """Puts an engine of a changed graph in the place of a right one."""
    package = json.loads((folder / "package.json").read_text())
    model = onnx.load(folder / package["graphs"][graph]["file"])
    change(model)
    blob = engine_bytes(model, package["graphs"][graph]["profiles"], "tensorrt")
    engines = folder / "engines" / "tensorrt"
    (engines / f"{graph}.engine").write_bytes(blob)
    described = json.loads((engines / "engines.json").read_text())
    described["engines"][graph]["sha256"] = hashlib.sha256(blob).hexdigest()
    (engines / "engines.json").write_text(json.dumps(described))


def scaled_weight(model: onnx.ModelProto) -> None:
    """One weight a thousandth larger than it should be."""
    weight = max(model.graph.initializer, key=lambda w: len(w.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.001), weight.name))


def not_a_number(model: onnx.ModelProto) -> None:
    weight = next(w for w in model.graph.initializer if len(w.dims) == 2)
    values = numpy_helper.to_array(weight).copy()
    values[:] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
