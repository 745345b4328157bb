"""The TensorRT package that is installed. The only place that imports it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..errors import BuildError

FLAVOURS = ("tensorrt", "tensorrt_rtx")  # tried in this order: a machine with `tensorrt` has the GPU it builds for


def load_tensorrt(flavour: str | None = None) -> Any:
    """The module of that flavour, or of the first that is installed."""
    if flavour is not None and flavour not in FLAVOURS:
        raise BuildError(f"unknown TensorRT flavour {flavour!r}, expected one of {', '.join(FLAVOURS)}")
    wanted = [flavour] if flavour else list(FLAVOURS)
    for name in wanted:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise BuildError(
        f"{' or '.join(wanted)} is not installed; install it with: pip install 'seq2engine[rtx]' "
        "(builds without a GPU) or 'seq2engine[gpu]'"
    )
