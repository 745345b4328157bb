"""Which class opens a bundle on which backend, and what does not go together in any bundle."""

from __future__ import annotations

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle

from .defaults import defaults_of
from .session import Session

ATTENTION = {  # those that can put out their cross-attention weights
    "torch": ("torch_attention", "TorchAttention"),
    "onnxruntime": ("ort.session", "OrtAttention"),
}


BACKENDS = {  # name -> module and the class in it
    "torch": ("torch_session", "TorchSession"),
    "onnxruntime": ("ort.session", "OrtSession"),
    "tensorrt": ("trt.session", "TrtSession"),
}


def with_defaults(session: Session, bundle: Bundle) -> Session:
    """The session, which from now on knows how its model is decoded by default."""
    session.defaults = defaults_of(bundle)
    return session


def check_session(
    backend: str,
    threads: int | None = None,
    engine: str | None = None,
    attention: bool = False,
    deterministic: bool = False,
    provider: str | None = None,
    draft: str | None = None,
) -> None:
    """Refuses what does not go together in any bundle; `open_session` says what each means."""
    if backend not in BACKENDS:
        raise SessionError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    if provider is not None and backend != "onnxruntime":
        raise SessionError(f"a provider is a choice of onnxruntime, not of {backend}; leave --provider out")
    if engine is not None and backend != "tensorrt":
        raise SessionError(f"an engine is a choice of tensorrt, not of {backend}; leave --engine out")
    if threads is not None and threads < 1:
        raise SessionError(f"threads {threads}, expected at least 1; leave --threads out for the backend's own choice")
    if draft is not None and (backend != "onnxruntime" or provider not in (None, "cpu") or attention or deterministic):
        raise SessionError(
            "drafts are for onnxruntime on the CPU, without alignments, coverage penalty or deterministic; "
            "leave --draft out"
        )
    if attention and backend not in ATTENTION:
        raise SessionError(
            f"backend {backend} does not tell where it looks; for alignments or a coverage penalty run on: "
            f"{' or '.join(ATTENTION)}"
        )
