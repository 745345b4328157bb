"""Flags of a TensorRT build. They are part of an engine's key and of its passport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seq2engine.errors import BuildError

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class BuildFlags:
    """`weight_streaming` lets weights stay on the host and be sent as they are needed; `refit` lets them be swapped
    later; `workspace` is the most scratch memory in bytes that a kernel may ask for."""

    weight_streaming: bool = False
    refit: bool = False
    workspace: int | None = None

    def options(self) -> list[str]:
        """The same as options of `seq2engine build`."""
        words = ["--weight-streaming"] if self.weight_streaming else []
        words += ["--refit"] if self.refit else []
        return words if self.workspace is None else [*words, "--workspace", text_of_bytes(self.workspace)]


PLAIN = BuildFlags()


def check_flags(trt: Any, flags: BuildFlags) -> None:
    if flags.refit and trt.__name__ != "tensorrt":
        raise BuildError(
            f"--refit is for tensorrt only: {trt.__name__} compiles refittable weights with a CUDA driver, and none of "
            "its builds needs one; leave --refit out and build again for new weights, which takes seconds"
        )
    if flags.workspace is not None and flags.workspace < 1:
        raise BuildError(f"--workspace {flags.workspace} is not a size; write bytes, or for example 512M or 2G")


def bytes_from_text(text: str) -> int:
    """`512M` -> 536870912."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not (number.isascii() and number.isdigit()):
        raise BuildError(f"--workspace {text!r} is not a size; write bytes, or for example 512M or 2G")
    return int(number) * unit


def text_of_bytes(size: int) -> str:
    """The shortest text that `bytes_from_text` reads as exactly this size."""
    for letter, unit in reversed(UNITS.items()):
        if size and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)
