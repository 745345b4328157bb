"""The kernel launches of an engine, read from the engine file itself, without a GPU.

A TensorRT-RTX engine carries its kernel program as text: blocks `main { ... }` with one statement per launch. The
format is not documented; a test holds that what is read here still makes sense for the installed version.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LAUNCHES = ("function", "fully_connected", "copy")  # a runtime_fusion names its product as a fully_connected of its own
FUSED_ATTENTION = "_mha_v"  # _gemv_mha_v1 for one query, _gemm_mha_v2 for more


@dataclass(frozen=True)
class KernelProgram:
    """The kernel statements of an engine, in order: kind and name."""

    statements: tuple[tuple[str, str], ...]

    @property
    def launches(self) -> int:
        counts = Counter(kind for kind, _ in self.statements)
        return sum(counts[kind] for kind in LAUNCHES)

    @property
    def fused_attentions(self) -> int:
        return sum(FUSED_ATTENTION in name for _, name in self.statements)


# What the program calls a type -> what numpy does.
TYPES = {
    "float": "float32",
    "half": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "fp8_e4m3": "float8_e4m3fn",
}


def kernels_from_engine(engine: bytes) -> KernelProgram:
    """All statements of an engine; one of several profiles has as many programs, see `kernels_by_profile`."""
    return joined(blocks_of(engine))


def kernels_by_profile(engine: bytes, profiles: int) -> list[KernelProgram]:
    """The program of every profile, in their order: each is a long block, followed by short ones of its fusions."""
    blocks = blocks_of(engine)
    longest = sorted(range(len(blocks)), key=lambda i: len(blocks[i]), reverse=True)[:profiles]
    starts = sorted(longest)
    if not starts or starts[0] != 0:
        return [joined(blocks)]
    return [joined(blocks[start:end]) for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True)]


def blocks_of(engine: bytes) -> list[bytes]:
    starts = [match.end() for match in re.finditer(rb"\nmain \{\n", engine)]
    return [engine[start : engine.find(b"\n}\n", start)] for start in starts]


def joined(blocks: Sequence[bytes]) -> KernelProgram:
    statements = []
    for text in blocks:
        for statement in re.finditer(rb"\n? +(\w+)=\{ name=\"?([^\s\"]+)", text):
            statements.append((statement[1].decode(), statement[2].decode()))
    return KernelProgram(tuple(statements))


def weights_from_engine(engine: bytes) -> dict[str, int]:
    """Bytes of an engine's constants by the type they are stored in; types that no weight has are left out."""
    found: Counter[str] = Counter()
    for constant in re.finditer(rb"\bconst_payload_size=(\d+) [^\n]* type=(\w+) \}", engine):
        kind = constant[2].decode()
        if kind in TYPES:
            found[TYPES[kind]] += int(constant[1])
    return dict(found)
