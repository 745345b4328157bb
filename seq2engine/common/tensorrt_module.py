"""The TensorRT package that is installed, for builds and for sessions. The only place that imports it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seq2engine.errors import SessionError

from .cuda_memory import Cuda, CudaError

# Flavour -> our extra that installs it. Tried in this order: a machine with `tensorrt` has the GPU it builds for.
FLAVOURS = {"tensorrt": "gpu", "tensorrt_rtx": "rtx"}


def load_tensorrt(flavour: str | None = None) -> Any:
    """The module of that flavour, or of the first that can be imported. Nothing else is ever imported by name."""
    if flavour is not None and flavour not in FLAVOURS:
        raise SessionError(f"unknown TensorRT flavour {flavour!r}, expected one of {', '.join(FLAVOURS)}")
    wanted = (flavour,) if flavour else tuple(FLAVOURS)
    reasons = []
    for name in wanted:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    extras = " or ".join(f"'seq2engine[{FLAVOURS[name]}]'" for name in wanted)
    raise SessionError(
        f"{' or '.join(wanted)} cannot be imported ({'; '.join(reasons)}); install it with: pip install {extras}"
    )


def gpu_name() -> str:
    """The GPU that `tensorrt` builds for: the first of this machine, or nothing where there is none."""
    try:
        with Cuda() as cuda:
            return cuda.name
    except CudaError:
        return ""


@contextmanager
def collector_held() -> Iterator[None]:
    """Disables garbage collection inside the block, for calls into TensorRT that log to Python.

    TensorRT logs under a lock. If the collector ran then and freed an old builder, its destructor would wait for the
    same lock: a deadlock.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
