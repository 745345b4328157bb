"""Encoder-decoder Transformers from PyTorch to ONNX and TensorRT, proven to say the same thing, faster."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and where they live. Nothing heavy is imported until one of them is used.
PUBLIC = {
    "ModelConfig": "model.config",
    "random_model": "model.checkpoint",
    "load_checkpoint": "model.checkpoint",
    "save_checkpoint": "model.checkpoint",
    "export_checkpoint": "exporting",
    "onnx_from_model": "exporting",
    "open_bundle": "export.artifact.bundle",
    "engines_from_onnx": "export.engines.to_engine",
    "refit_engines": "export.engines.refit",
    "plan_from_lengths": "export.engines.plan",
    "open_session": "runtime.opening",
    "SearchOptions": "runtime.search.options",
    "options_from_session": "runtime.model_options",
    "generate": "runtime.generate",
    "translate": "runtime.text.translate",
    "score_targets": "runtime.text.scoring",
    "translate_many": "runtime.text.continuous_batching",
    "parity_of": "runtime.parity.run",
    "bench_bundle": "benchmarks.runner",
    "package_from_bundle": "packaging.package",
    "Seq2EngineError": "errors",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'seq2engine' has no attribute {name!r}")
    from seq2engine.errors import missing_package

    try:
        return getattr(importlib.import_module(f"seq2engine.{PUBLIC[name]}"), name)
    except ModuleNotFoundError as error:
        if missing := missing_package(error, f"seq2engine.{name}"):
            raise missing from error
        raise
