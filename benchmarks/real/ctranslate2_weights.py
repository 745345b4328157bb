"""Reads the weights of a CTranslate2 model file.

version u32, kind text, revision u32, count u32
count times: name text, rank u8, rank times a size u32, type u8, bytes u32, that many bytes
count u32 of aliases: name text, name text       (a text is its length u16, then that many bytes)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


@dataclass
class Reader:
    """Bytes, and how far they have been read."""

    data: bytes
    place: int = 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return int(value)

    def taken(self, size: int) -> bytes:
        self.place += size
        return self.data[self.place - size : self.place]

    def text(self) -> str:
        return self.taken(self.number("H")).rstrip(b"\0").decode()


def weights_from_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """Every weight by its name, in fp32: int8 rows are multiplied by their scales."""
    reader = Reader(path.read_bytes())
    reader.number("I")
    reader.text()
    reader.number("I")
    stored: dict[str, np.ndarray] = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        dtype = TYPES[reader.number("B")]
        stored[name] = np.frombuffer(reader.taken(reader.number("I")), dtype).reshape(shape)
    weights = {name: in_fp32(name, stored) for name in stored if not name.endswith("_scale")}
    for _ in range(reader.number("I")):
        alias, name = reader.text(), reader.text()
        if name in weights:
            weights[alias] = weights[name]
    return weights


def in_fp32(name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
    """The stored scale is the factor by which a row was multiplied before rounding."""
    weight, scale = stored[name].astype(np.float32), stored.get(f"{name}_scale")
    return weight if scale is None else weight / scale[:, None]
