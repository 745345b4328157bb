"""The ONNX Runtime session of a bundle: one graph pair, or two for speculative decoding."""

from __future__ import annotations

from seq2engine.export.artifact.bundle import Bundle

from ..backends import SessionOptions
from ..session import Session
from .session import OrtSession
from .speculative import SpeculativeSession


def session_from_bundle(bundle: Bundle, precision: str, options: SessionOptions) -> Session:
    """The session of a bundle that the options ask for."""
    if options.draft is not None:
        return SpeculativeSession.from_bundle(bundle, precision, options.draft, options.threads)
    return OrtSession.from_bundle(
        bundle, precision, options.threads, options.attention, options.deterministic, options.provider or "cpu"
    )
