"""A session: the two graphs of a model, opened on one backend. All backends look alike from here on.

Arrays at the edge are numpy; what a session keeps between calls (cross K/V, the cache) is its own kind of tensor in a
`State`, which only that session reads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import RequestError, SessionError, missing_package
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.profiles import Workload
from seq2engine.model.config import ModelConfig

from .defaults import Defaults, defaults_of
from .search.option_checks import problems_with_prefix
from .search.step import SearchOptions
from .search.step_output import Answer, Shortlist

State = dict[str, Any]  # named tensors of one batch: source_mask, cross_k.0, ..., self_k.0, ...

ATTENTION = {  # those that can put out their cross-attention weights
    "torch": ("torch_attention", "TorchAttention"),
    "onnxruntime": ("ort.session", "OrtAttention"),
}

BACKENDS = {  # name -> module and the class in it
    "torch": ("torch_session", "TorchSession"),
    "onnxruntime": ("ort.session", "OrtSession"),
    "tensorrt": ("trt.session", "TrtSession"),
}


@dataclass(frozen=True)
class Limits:
    """The largest request a session takes. `slots` is the cache length where it is fixed (engines), else None."""

    batch: int | None
    beam: int | None
    source: int
    target: int
    slots: int | None = None
    attention: bool = False  # whether it tells where it looks


class Session(AbstractContextManager["Session"], Protocol):
    """Who owns what: a session owns its graphs; a State belongs to the caller and dies with it or with the session."""

    backend: str
    precision: str
    cache_form: str
    config: ModelConfig
    limits: Limits
    deterministic: bool = False  # shapes are such that no bit of an output depends on other sources
    defaults: Defaults = Defaults()  # the model's own way of decoding; what its bundle says, if it was opened from one
    chosen: str = ""  # which precision `auto` has chosen, and why
    shortlist: Shortlist | None = None  # what its answers are about, where that is not the whole vocabulary

    def shortlisted(self, shortlist: Shortlist) -> Session:
        """This session with answers about these tokens alone, as if the model knew no others.

        It is a view, which shares states with this session and ends with it. Where the backend can, it computes no
        other logits; the latest view is kept, as making one may take as long as opening a session.
        """

    def unscored(self, wanted: int) -> Session:
        """This session with answers that have so many candidates of every beam and nothing else, if that is less work.

        Such an answer's normaliser is a number where the model's logits are, but not what makes probabilities of them.
        It is a view, which shares states with this session and ends with it.
        """
        return self

    def lanes(self, sources: int, rows: int) -> Sequence[Session]:
        """Sessions to decode so many sources with, rows of them in all, at the same time; one: this session alone."""
        return (self,)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        """ids int64 and mask bool [B,S] -> a state with `source_mask`, `cross_k/v.i` and `encoder_states`."""

    def slots_for(self, beams: int) -> int | None:
        """How long the cache of a decode with so many beams is, where that is fixed (engines), else None."""
        return self.limits.slots

    def reserve(self, state: State, slots: int) -> None:
        """Puts an empty cache of that many slots, all zero, into the state."""

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        """One `decoder_step`: tokens [B,K], position [B], write_index [B], self_mask [B,K,M] -> an answer in fp32.

        The state's cache then holds the K new slots. The answer is valid until the next call.
        """

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """Keeps these sources [B'] (None: all) and of their caches these slots [B',L'] (None: as they are)."""

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        """Gives these rows [N] to the sources of another state, which was only encoded, and makes all S `width` long.

        `width` holds every source that still matters. The rows' caches keep what the sources before left there: finite
        numbers, for a mask to hide.
        """

    def tensor(self, state: State, name: str) -> np.ndarray:
        """A copy of one tensor of the state, for parity."""

    def attention(self, state: State) -> np.ndarray:
        """Where the latest step looked: the last layer's cross-attention, mean of its heads, fp64 [B,K,S]."""
        raise SessionError("this session does not keep where it looks; open it with attention=True")

    def close(self) -> None: ...


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
        from .auto_precision import open_fastest

        return open_fastest(opened, backend, threads, attention, deterministic, provider)
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


def problems_with_limits(limits: Limits, config: ModelConfig, options: SearchOptions) -> list[str]:
    """What a session with these limits cannot do, whatever the sources."""
    problems = options.problems_with(config.target_vocab, config.end_id)
    if limits.beam is not None and options.width > limits.beam:
        name = "nbest" if options.sample else "nbest times beam" if options.alternatives else "beam"
        problems.append(f"{name} {options.width}, at most {limits.beam}")
    if options.needs_attention and not limits.attention:
        wish = "alignments" if options.alignments else "coverage penalty"
        problems.append(f"{wish} asked for, but the session does not keep where it looks; open it with attention=True")
    if options.max_length > limits.target:
        problems.append(f"max length {options.max_length}, at most {limits.target}")
    return problems


def check_request(
    limits: Limits,
    config: ModelConfig,
    sources: list[list[int]],
    options: SearchOptions,
    first: int = 0,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Refuses what the graphs could not run, with every problem in one message, before anything is run.

    Of sources that cannot be decoded the first five are named; `first` is the number of the first of these sources,
    where they are some of many. `prefixes` are what the output of each begins with.
    """
    problems = problems_with_limits(limits, config, options)
    if prefixes is not None and options.prefix:
        problems.append("a prefix of all sources and one of each, expected either")
    if prefixes is not None and len(prefixes) != len(sources):
        problems.append(f"{len(prefixes)} prefixes for {len(sources)} sources, expected one for each")
    if not sources:
        problems.append("the batch is empty; give at least one source")
    if limits.batch is not None and len(sources) > limits.batch:
        problems.append(f"{len(sources)} sources in a batch, at most {limits.batch}")
    refused = []
    for row, source in enumerate(sources, start=first):
        if not source:
            refused.append(f"source {row} is empty")
        elif len(source) > limits.source:
            refused.append(f"source {row} has {len(source)} tokens, at most {limits.source}")
        if wrong := [token for token in source if not 0 <= token < config.source_vocab]:
            refused.append(f"source {row} has token {wrong[0]}, the vocabulary has {config.source_vocab}")
    for row, prefix in enumerate(prefixes or (), start=first):
        wrong_prefix = problems_with_prefix(options, prefix, config.target_vocab, config.end_id)
        refused += [f"source {row}: {problem}" for problem in wrong_prefix]
    if len(refused) > 5:
        refused[5:] = [f"and {len(refused) - 5} more"]
    if problems or refused:
        raise RequestError("; ".join(problems + refused))
