"""Builds with the options of a test, whichever they are."""

from __future__ import annotations

from seq2engine.common.progress import silent
from seq2engine.export.engines.build_options import BuildOptions
from seq2engine.export.engines.to_engine import engines_from_onnx


def build_engines(bundle, targets=(), ranges=None, precision=None, progress=silent, **options):
    """`engines_from_onnx` with the fields of BuildOptions among its own arguments."""
    return engines_from_onnx(bundle, targets, ranges, precision, BuildOptions(**options), progress)
