"""What an engine will launch, read from the engine file itself, with no GPU.

A TensorRT-RTX engine carries its kernel program as text: blocks `main { ... }` with one statement per launch. The
format is not documented; a test holds that what is read here still makes sense for the installed version.
"""

from __future__ import annotations

import re
from collections import Counter
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


def kernels_from_engine(engine: bytes) -> KernelProgram:
    statements = []
    for block in re.finditer(rb"\nmain \{\n", engine):
        text = engine[block.end() : engine.find(b"\n}\n", block.end())]
        for statement in re.finditer(rb"\n? +(\w+)=\{ name=\"?([^\s\"]+)", text):
            statements.append((statement[1].decode(), statement[2].decode()))
    return KernelProgram(tuple(statements))
