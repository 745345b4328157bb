"""ONNX Runtime as a session: steps are bound once per shape, and the cache is written in place.

A State is in host memory whatever the provider: a GPU provider gets and gives back the whole cache in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import attention_name
from seq2engine.export.ort_forms.forms import OrtForm
from seq2engine.export.ort_forms.screened_argmax import worth_screening
from seq2engine.export.ort_forms.transposed_keys import KEYS, TRANSPOSED

from ..fitting import fitted
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Limits, Session, StepForm
from ..threads import Turns, Workers, rows_per_worker, sensible_threads
from .binding import OrtState, StepBinding, StepLayout, cache_of
from .encoder import Encoder
from .graphs import Decoders, OrtModel, Placement, model_from_bundle, open_graph
from .providers import check_provider

EVEN = 8  # columns; sums over sources whose lengths are multiples of this have the same bits at any length
# Rows from which on a thread is faster with a decode of its own; measured on two cores (docs/LOG.md).
WORKER_ROWS, MOST_WORKER_ROWS = {"w8a8": 2}, 32
# Precisions whose workers have their own encoder. An int8 encoder is many small nodes, which threads cannot share; in
# fp32 it is a few large ones, which they can, and a second copy of its weights takes four times the memory.
WORKER_ENCODERS = ("w8a8",)
# Precisions whose workers have the shortcut to the best candidates: in fp32 it takes a second copy of the output table.
WORKER_SHORTCUTS = ("w8a8",)


@dataclass(frozen=True)
class OrtSettings:
    """How a session runs its model."""

    threads: int | None = None  # None: what suits the model and this machine
    provider: str = "cpu"
    attention: bool = False  # the step puts out its cross-attention weights, [B,H,K,S] of every layer
    deterministic: bool = False
    beam_positions: bool = False  # the tokens of one step have positions of their own, [B,K]: speculative decoding
    shortcut: bool = True  # to the best candidates, where that is worth it
    resting: tuple[str, ...] = ("encoder",)  # as in Placement

    def form(self, model: OrtModel) -> OrtForm:
        on_cpu = self.provider == "cpu"
        # The shortcut to the best candidates works for all sources at once, so it is not bitwise batch-invariant.
        screened = on_cpu and self.shortcut and not self.deterministic
        return OrtForm(
            transposed_keys=on_cpu,
            int8_products=model.precision == "w8a8",
            beam_positions=self.beam_positions,
            attention_layers=model.config.decoder_layers if self.attention else 0,
            screened=screened and worth_screening(model.config, model.precision),
        )


DEFAULT_SETTINGS = OrtSettings()


class OrtSession(Session):
    """Runs a model's graphs in the form that its settings ask for. A state is numpy arrays, which the graphs read and
    write in place. `encoder` is another session's, where they share one."""

    def __init__(self, model: OrtModel, settings: OrtSettings = DEFAULT_SETTINGS, encoder: Encoder | None = None):
        check_provider(settings.provider)
        config, self.form = model.config, settings.form(model)
        self.threads = sensible_threads(config) if settings.threads is None else settings.threads
        self.model, self.settings, self.config = model, settings, config
        self.backend = "onnxruntime" if settings.provider == "cpu" else f"onnxruntime {settings.provider}"
        self.precision, self.cache_form, self.deterministic = model.precision, model.cache_form, settings.deterministic
        longest = config.max_source // EVEN * EVEN if self.deterministic else config.max_source
        self.limits = Limits(None, None, longest, config.max_target, attention=settings.attention)
        specs = self.form.specs(model.specs)
        self.kept = (specs["encoder"].input("source_mask"), *specs["encoder"].outputs)
        placement = Placement(self.threads, settings.provider, settings.resting)
        on_cpu = settings.provider == "cpu"
        if encoder is None:
            opened = open_graph(model, "encoder", self.form, placement)
            shared = self.threads > 1
            encoder = Encoder(opened, specs["encoder"], config.d_ff, on_cpu, Turns() if shared else None)
        self.encoder: Encoder | None = encoder
        self.decoders: Decoders | None = Decoders(model, self.form, placement)
        self.layout = self.step_layout(self.decoders)
        if on_cpu and self.threads > 1 and not self.deterministic:
            least = rows_per_worker(config, WORKER_ROWS.get(model.precision, MOST_WORKER_ROWS))
            self.workers = Workers(self.threads, self.threads * least, worker_of(model, settings, encoder))

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        threads: int | None = None,
        attention: bool = False,
        deterministic: bool = False,
        provider: str = "cpu",
    ) -> OrtSession:
        check_provider(provider)
        settings = OrtSettings(threads, provider, attention, deterministic)
        return cls(model_from_bundle(bundle, precision), settings)

    def step_layout(self, decoders: Decoders) -> StepLayout:
        spec = self.form.specs(self.model.specs)["decoder_step"]
        types = {output.name: output.type for output in decoders.whole.session.get_outputs()}
        names = [attention_name(layer) for layer in range(self.form.attention_layers)]
        attention = {name: "float16" if types[name] == "tensor(float16)" else "float32" for name in names}
        grows = self.cache_form == "growing"
        return StepLayout(spec, cache_of(spec), grows, self.config.target_vocab, self.config.heads, attention)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> OrtState:
        width = self.width(source_ids.shape[1])
        if self.encoder is None:
            raise closed()
        return self.encoder(fitted(source_ids, 1, width), fitted(source_mask, 1, width))

    def width(self, longest: int) -> int:
        """How many columns a batch has whose longest source is so long."""
        return -(-longest // EVEN) * EVEN if self.deterministic else longest

    def reserve(self, state: OrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        self.take(state, form)
        state.reserve(self.layout.cache, slots)

    def take(self, state: OrtState, form: StepForm) -> None:
        """Has a state decoded by this session's step in that form."""
        if self.decoders is None:
            raise closed()
        state.form, state.decoder = form, self.decoders.of(form.shortlist)

    def step(
        self, state: OrtState, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> StepOutput:
        bound = state.bound
        if bound is None or bound.shape != self_mask.shape:
            bound = state.bound = StepBinding(self.layout, state, self_mask.shape)
            state.update(bound.attention)
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        output = bound.run(given)
        if self.layout.grows:
            state.update(bound.grown)
            state.bound = None
        return output

    def select(self, state: OrtState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        state.select(self.layout.cache, rows, slots)

    def replace(self, state: OrtState, rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        state.replace(self.kept, rows, newcomers, self.width(width))

    def tensor(self, state: OrtState, name: str) -> np.ndarray:
        array = state[name]
        tensor = next((kept for kept in self.kept if kept.name == name), None)
        axis = -1 if name in self.layout.attention else None if tensor is None else tensor.axes.index("S")
        if axis is not None and self.deterministic:
            asked = np.flatnonzero(state["source_mask"].any(axis=0))[-1] + 1  # without the columns that were added
            array = fitted(array, axis % array.ndim, asked)
        transposed = self.form.transposed_keys and name.startswith(KEYS)
        return np.array(array.transpose(TRANSPOSED) if transposed else array, order="C")

    def close(self) -> None:
        """Ends the session. Memory of graphs is freed when the last state that is decoded with them dies."""
        self.encoder = self.decoders = self.workers = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def worker_of(model: OrtModel, settings: OrtSettings, encoder: Encoder) -> Callable[[], OrtSession]:
    """Opens a session of one thread with the same outputs, for parallel decodes."""
    alone = dataclasses.replace(settings, threads=1, shortcut=model.precision in WORKER_SHORTCUTS)
    return partial(OrtSession, model, alone, None if model.precision in WORKER_ENCODERS else encoder)


def closed() -> SessionError:
    return SessionError("this session is closed; open it again with: open_session")
