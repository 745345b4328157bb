"""The checkpoint that is part of the package: English spelling to phonemes, trained on the CMU dictionary."""

from __future__ import annotations

from pathlib import Path

from seq2engine.errors import RequestError

SHIPPED = ("g2p",)
TEST_SPLIT = "test.tsv"  # next to the weights: words the model has not seen, with their pronunciations


def shipped_checkpoint(name: str) -> Path:
    """The folder of a shipped checkpoint."""
    if name not in SHIPPED:
        raise RequestError(f"no shipped checkpoint {name!r}, expected one of {', '.join(SHIPPED)}")
    return Path(__file__).parent / name
