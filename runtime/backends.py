"""How a session is opened: which backend, with which options, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.measured import Measured
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.profiles import Workload

from .defaults import defaults_of
from .session import Session

BACKENDS = {  # name -> the module whose `session_from_bundle` opens it
    "torch": "torch_session",
    "onnxruntime": "ort.opening",
    "tensorrt": "trt.session",
}
AUTO = "auto"  # speculative decoding in fp32, as long as it is faster
QUANTISED = "quantised"  # the draft is the fp32 model itself with its weights in 8 and 4 bits
MOST_THREADS = 4096  # of one session; what is more than any machine has is a mistake
WITH_ATTENTION = ("torch", "onnxruntime")  # those that can output their cross-attention weights


@dataclass(frozen=True)
class SessionOptions:
    """The options of `open_session`, which documents them."""

    backend: str = "onnxruntime"
    precision: str | None = None
    threads: int | None = None
    engine: str | None = None
    attention: bool = False
    deterministic: bool = False
    provider: str | None = None
    draft: str | None = None
    workload: Workload | None = None
    tokens_per_wait: int | None = None
    measured: Path | None = None
    cache: Path | None = None


def check_session(options: SessionOptions) -> None:
    """Refuses options that contradict each other whatever the bundle."""
    backend, threads = options.backend, options.threads
    if backend not in BACKENDS:
        raise SessionError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    if options.provider is not None and backend != "onnxruntime":
        raise SessionError(f"a provider is an option of onnxruntime, not of {backend}; leave --provider out")
    if options.engine is not None and backend != "tensorrt":
        raise SessionError(f"an engine is an option of tensorrt, not of {backend}; leave --engine out")
    on_gpu = backend == "tensorrt" or options.provider not in (None, "cpu")
    if options.tokens_per_wait is not None and (not on_gpu or options.tokens_per_wait < 1):
        raise SessionError(
            f"tokens_per_wait {options.tokens_per_wait} of {backend}, expected at least 1, and a GPU; leave it out"
        )
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        expected = "at least 1" if threads < 1 else f"at most {MOST_THREADS}"
        raise SessionError(f"threads {threads}, expected {expected}; leave --threads out for the backend's own choice")
    if options.draft not in (None, AUTO):
        check_speculative(options)
    if options.attention and backend not in WITH_ATTENTION:
        raise SessionError(
            f"backend {backend} has no cross-attention weights; for alignments or a coverage penalty run on: "
            f"{' or '.join(WITH_ATTENTION)}"
        )
    if options.deterministic and backend != "onnxruntime":
        raise SessionError(f"deterministic is an option of onnxruntime, not of {backend}; leave --deterministic out")


def check_speculative(options: SessionOptions) -> None:
    on_cpu = options.backend == "onnxruntime" and options.provider in (None, "cpu")
    if not on_cpu or options.attention or options.deterministic:
        raise SessionError(
            "speculative decoding is for onnxruntime on the CPU, without alignments, coverage penalty or "
            "deterministic; leave --draft out"
        )
    if options.precision == "auto":
        raise SessionError("speculative decoding with precision auto, expected a named precision; leave --draft out")


def measured_for(bundle: Bundle, options: SessionOptions, about: Mapping[str, Any]) -> Measured:
    """Earlier measurements of this bundle with these options on this machine."""
    graphs = {
        precision: {name: entry.sha256 for name, entry in entries.items()}
        for precision, entries in bundle.manifest.graphs.items()
    }
    asked = {"backend": options.backend, "provider": options.provider, "threads": options.threads}
    return Measured(
        options.measured, {**about, **asked, "checkpoint": bundle.manifest.checkpoint_sha256, "graphs": graphs}
    )


def with_defaults(session: Session, bundle: Bundle) -> Session:
    """The session, with its model's own decoding options."""
    session.defaults = defaults_of(bundle)
    return session
