"""The ONNX Runtime session of a bundle: one graph pair, or two for speculative decoding."""

from __future__ import annotations

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.transfers import TOKENS_PER_WAIT

from ..backends import AUTO, SessionOptions, measured_for
from ..session import Session
from .drafting import Drafting
from .session import OrtSession
from .speculative import SpeculativeSession, drafts_for


def session_from_bundle(bundle: Bundle, precision: str, options: SessionOptions) -> Session:
    """The session of a bundle that the options ask for."""
    if options.draft == AUTO:
        plain = options.provider in (None, "cpu") and not options.attention and not options.deterministic
        draft = drafts_for(bundle, precision) if plain else None
        if draft is not None:
            kept = measured_for(bundle, options, {"what": "drafts", "precision": precision, "draft": draft})
            return SpeculativeSession.from_bundle(bundle, precision, draft, options.threads, Drafting(kept))
    elif options.draft is not None:
        return SpeculativeSession.from_bundle(bundle, precision, options.draft, options.threads)
    return OrtSession.from_bundle(
        bundle,
        precision,
        options.threads,
        options.attention,
        options.deterministic,
        options.provider or "cpu",
        TOKENS_PER_WAIT if options.tokens_per_wait is None else options.tokens_per_wait,
    )
