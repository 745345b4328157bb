"""Opens a bundle on a backend, in a given or the fastest precision."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path

from seq2engine.errors import SessionError, missing_package
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.profiles import Workload

from .auto_precision import open_fastest
from .backends import BACKENDS, SessionOptions, check_session, measured_for, with_defaults
from .session import Session


def open_session(
    bundle: Bundle | str | os.PathLike[str],
    backend: str = "onnxruntime",
    precision: str | None = None,
    threads: int | None = None,
    engine: str | None = None,
    attention: bool = False,
    deterministic: bool = False,
    provider: str | None = None,
    draft: str | None = None,
    workload: Workload | None = None,
    tokens_per_wait: int | None = None,
    measured: Path | None = None,
    cache: Path | None = None,
) -> Session:
    """Opens a bundle's graphs on a backend, by default in the most precise of its precisions that the backend runs.

    `threads` is for CPU backends, `engine` names one of several engines, `provider` is where ONNX Runtime
    computes: cpu (the default), cuda, tensorrt or nv_tensorrt_rtx. Precision "auto" is the fastest of fp32, fp16 and
    w8a8 on this machine, by timing short decodes: see the session's `chosen`.

    With `attention`, the session keeps its cross-attention weights, for alignments and the coverage penalty.
    `deterministic` is bitwise batch-invariant; it adds padding. `draft` is for speculative decoding of single sources
    with one beam, the same tokens, sooner: a cheaper precision of the bundle, or "quantised", which is fp32's own
    weights in 8 and 4 bits. "auto" is the latter for fp32, for as long as that is faster. `workload` is the largest
    request to come, as far as it is known: of several engines the one that suits it is opened. `tokens_per_wait` is
    for GPUs: greedy search runs that many tokens (8) there before the host reads them; with 1 they come one by one,
    which is slower. `measured` is a folder that keeps what precision "auto" and draft "auto" measured on this machine
    for the next session of the same bundle; None: they measure every time. `cache` is a folder that keeps the graphs
    that ONNX Runtime ran, and which files had their hash; None: graphs are made and files hashed every time.
    """
    options = SessionOptions(
        backend,
        precision,
        threads,
        engine,
        attention,
        deterministic,
        provider,
        draft,
        workload,
        tokens_per_wait,
        measured,
        cache,
    )
    check_session(options)
    return session_with(bundle if isinstance(bundle, Bundle) else open_bundle(bundle), options)


def session_with(bundle: Bundle, options: SessionOptions) -> Session:
    """The session that checked options ask for."""
    if options.cache is not None:
        bundle = dataclasses.replace(bundle, kept=options.cache)
    if options.precision == "auto":

        def open_precision(precision: str) -> Session:
            return session_with(bundle, dataclasses.replace(options, precision=precision))

        kept = measured_for(bundle, options, {"what": "precision"})
        return open_fastest(bundle, options.backend, options.provider, open_precision, kept)
    precision = options.precision
    if precision is None:
        precision = default_precision(bundle, options.backend, options.engine)
    if options.deterministic and bundle.cache_form != "static":
        raise SessionError(
            f"deterministic with a {bundle.cache_form} cache, expected a static one; export with: "
            "seq2engine export CHECKPOINT BUNDLE --cache-form static"
        )
    try:
        module = importlib.import_module(f".{BACKENDS[options.backend]}", __package__)
    except ModuleNotFoundError as error:
        if missing := missing_package(error, f"backend {options.backend}"):
            raise missing from error
        raise
    return with_defaults(module.session_from_bundle(bundle, precision, options), bundle)
