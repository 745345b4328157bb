"""Opens a bundle on a backend, in one precision or the fastest of them."""

from __future__ import annotations

import importlib
import os
from typing import Any

from seq2engine.errors import SessionError, missing_package
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.profiles import Workload

from .auto_precision import open_fastest
from .backends import ATTENTION, BACKENDS, check_session, with_defaults
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
) -> Session:
    """Opens a bundle's graphs on a backend, by default in the most precise of its precisions that serves it.

    `threads` is for CPU backends, `engine` names one of several engines, `provider` says where ONNX Runtime
    computes: cpu (as by default), cuda, tensorrt or nv_tensorrt_rtx. Precision "auto" is the fastest of fp32, fp16 and
    w8a8 on this machine, by timing short decodes: see the session's `chosen`.

    With `attention`, the session keeps where it looks, for alignments and the coverage penalty. With `deterministic` a
    source gets the same bits whatever its neighbours, at the price of some padding. `draft` is another precision of the
    bundle, a cheaper one, that guesses ahead where a single source is decoded with one beam: the same tokens, sooner.
    `workload` is the largest request to come, as far as it is known: of several engines that which suits it is opened.
    """
    check_session(backend, threads, engine, attention, deterministic, provider, draft)
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if precision == "auto":
        if draft is not None:
            raise SessionError(
                "a draft for precision auto, expected one for a precision that is named; leave --draft out"
            )

        def open_precision(name: str) -> Session:
            return open_session(
                opened, backend, name, threads, attention=attention, deterministic=deterministic, provider=provider
            )

        return open_fastest(opened, backend, provider, open_precision)
    precision = default_precision(opened, backend, engine) if precision is None else precision
    if draft is not None:
        from .ort.speculative import DraftedSession

        return with_defaults(DraftedSession.with_drafts(opened, precision, draft, threads), opened)
    module, name = (ATTENTION if attention else BACKENDS)[backend]
    try:
        session_class = getattr(importlib.import_module(f".{module}", __package__), name)
    except ModuleNotFoundError as error:
        if missing := missing_package(error, f"backend {backend}"):
            raise missing from error
        raise
    options: dict[str, Any] = (
        {"engine": engine, "workload": workload} if backend == "tensorrt" else {"threads": threads}
    )
    if deterministic:
        if backend != "onnxruntime" or opened.cache_form != "static":
            raise SessionError(
                f"deterministic asked of backend {backend} with a {opened.cache_form} cache, expected onnxruntime with "
                "a static one; export with: seq2engine export CHECKPOINT BUNDLE --cache static"
            )
        options["deterministic"] = True
    if provider is not None:
        options["provider"] = provider
    return with_defaults(session_class.from_bundle(opened, precision, **options), opened)
