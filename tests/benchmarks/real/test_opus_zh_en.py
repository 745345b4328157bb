"""Weights of a CTranslate2 file under Marian's names: read as written, rows restored by their scales."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from seq2engine.benchmarks.real.ctranslate2_weights import TYPES, weights_from_ctranslate2


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def ctranslate2_file(arrays: dict[str, np.ndarray], aliases: dict[str, str]) -> bytes:
    found = struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<II", 7, len(arrays))
    for name, array in arrays.items():
        found += text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        found += struct.pack("<BI", TYPES.index(array.dtype.type), array.nbytes) + array.tobytes()
    found += struct.pack("<I", len(aliases))
    return found + b"".join(text(alias) + text(name) for alias, name in aliases.items())


def test_rows_are_restored_and_aliases_followed(tmp_path: Path) -> None:
    stored = {
        "a/weight": np.array([[127, -64], [1, 2]], np.int8),
        "a/weight_scale": np.array([127, 2], np.float32),
        "b/bias": np.array([0.5, 2], np.float32),
        "flag": np.array(1, np.int8),
    }
    (tmp_path / "model.bin").write_bytes(ctranslate2_file(stored, {"c/weight": "a/weight"}))
    found = weights_from_ctranslate2(tmp_path / "model.bin")
    assert found["c/weight"].tolist() == np.array([[1, -64 / 127], [0.5, 1]], np.float32).tolist()
    assert found["b/bias"].tolist() == [0.5, 2]
    assert set(found) == {"a/weight", "b/bias", "c/weight", "flag"}
