"""What each GPU generation cannot run in TensorRT-RTX, found by trial, so that it is refused before a build."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..contract import FOR_CPUS, STORED, Census

# Target -> what a graph may not hold there -> why. "float32" is meant of products: other fp32 nodes run everywhere.
LACKS = {
    "sm75": {
        "float32": "Turing has no fp32 matrix kernel in TensorRT-RTX",
        "bfloat16": "Turing has no bf16",
        "int4": "Turing has no int4",
        "float8_e4m3fn": "fp8 begins with Ada, sm89",
    },
    "sm80": {"float8_e4m3fn": "fp8 begins with Ada, sm89"},
    "sm86": {"float8_e4m3fn": "fp8 begins with Ada, sm89"},
}
NEAREST = {
    "fp32": "fp16",
    "bf16": "fp16",
    "fp8": "int8",
    "int4": "int8",
    "w8a8": "int8",
}  # every target runs these
# GPUs that TensorRT-RTX does not build for.
SERVERS = {"sm90": "Hopper", "sm100": "Blackwell of data centres", "sm103": "Blackwell Ultra"}
PORTABLE = ("sm80", "sm86", "sm89", "sm120", "sm121")  # what TensorRT-RTX builds for when no target is named


def target_from_text(text: str) -> str:
    """A compute capability as people write it (sm89, SM89, sm_89, 89, 8.9) as we do: sm89. Others stay as they are."""
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3}|\d{1,2}\.\d)", text.strip(), re.IGNORECASE | re.ASCII)
    return text if found is None else f"sm{found[1].replace('.', '')}"


def unknown_target(target: str, known: Sequence[str]) -> str:
    """Why there is no engine for a target, and what to do instead."""
    if target in SERVERS:
        return (
            f"TensorRT-RTX builds nothing for {target} ({SERVERS[target]}); use `tensorrt` on a machine with that GPU: "
            "install it there with pip install 'seq2engine[gpu]' and build without --gpu, or take along what "
            "`seq2engine package` writes and run its build.py"
        )
    return f"unknown target {target!r}, expected one of {', '.join(known)}"


def unsupported(target: str, precision: str, censuses: Sequence[Census] = ()) -> str | None:
    """Why a target cannot run a precision, or graphs with these censuses: fp32 fallback nodes need kernels, too."""
    if precision in FOR_CPUS:
        return "it is a form for CPUs"
    lacks = LACKS.get(target, {})
    held = {name for census in censuses for name in (*census["products"], *census["product_weights"])}
    if STORED[precision] in lacks:
        return lacks[STORED[precision]]
    return next((f"{lacks[name]}, and some of its nodes stay in fp32" for name in sorted(held) if name in lacks), None)
