"""ONNX Runtime as a session: steps are bound once per shape, and the cache is written in place.

A state is in the memory that the provider computes in. On the CPU it is numpy's arrays; elsewhere it is a device's, and
of a step only its small inputs and its candidates cross.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.transfers import TOKENS_PER_WAIT
from seq2engine.export.contract import PRECISIONS, attention_name
from seq2engine.export.ort_form import CHAIN_CANDIDATES, OrtForm
from seq2engine.export.ort_forms.interface import CHOSEN, KEYS, TRANSPOSED, worth_screening
from seq2engine.model.config import ModelConfig

from ..fitting import fitted
from ..kernels.library import library
from ..machine_speed import WORKER_SHORTCUTS, rows_of_threads, rows_of_worker, sensible_threads
from ..search.ahead.beam_plan import BeamPlan, BeamRows, BeamsAhead
from ..search.ahead.greedy_plan import ChosenTokens, GreedyPlan, ahead_columns, outputs_of
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Limits, RunAhead, Session, StepForm
from ..threads import EncoderLock, Workers, both
from .binding import OrtState, StepBinding, StepLayout, cache_of
from .chain import BannedTokens, Chain
from .device import Device
from .device_state import DeviceEncoder, DeviceState, Moves
from .encoder import Encoder
from .graphs import Decoders, OrtModel, Placement, model_from_bundle, open_graph, open_tiny_graph
from .host_chain import AHEAD, KEPT_ROWS, MOST_CANDIDATES, HostBeams, HostChain, chain_shape
from .providers import PROVIDERS, check_provider

AnyEncoder = Encoder | DeviceEncoder

EVEN = 8  # columns; with lengths that are multiples of this, sums over sources are bitwise independent of the padding
# Precisions whose workers have their own encoder. An int8 encoder is many small nodes, which threads cannot share; in
# fp32 it is a few large ones, which they can, and a second copy of its weights takes four times the memory.
WORKER_ENCODERS = ("w8a8",)


@dataclass(frozen=True)
class OrtSettings:
    """How a session runs its model."""

    threads: int | None = None  # None: chosen from the model and this machine
    provider: str = "cpu"
    attention: bool = False  # the step outputs its cross-attention weights, [B,H,K,S] of every layer
    deterministic: bool = False
    beam_positions: bool = False  # every token of a step has its own position [B,K]: speculative decoding
    shortcut: bool = True  # shortcut to the best candidates, where it pays
    drafts: bool = False  # its steps only draft tokens for another session of the same model, in fp32
    resting: tuple[str, ...] = ("encoder",)  # as in Placement
    tokens_per_wait: int = TOKENS_PER_WAIT  # tokens of greedy search on a device between two waits of the host
    profiled: Path | None = None  # as in Placement
    kernels: bool = True  # fused operators of the kernel library, where it is there and has them
    on_device: bool = False  # treats the CPU like a GPU: same forms, same memory; always so for other providers

    @property
    def host(self) -> bool:
        """Whether states are numpy's arrays."""
        return self.provider == "cpu" and not self.on_device

    def form(self, model: OrtModel) -> OrtForm:
        on_cpu = self.host
        # The shortcut to the best candidates works for all sources at once, so it is not bitwise batch-invariant.
        screened = on_cpu and self.shortcut and not self.deterministic
        unpadded = on_cpu and has_no_padding(model)
        kernels = on_cpu and self.kernels and not self.deterministic and has_kernels(model)
        return OrtForm(
            transposed_keys=on_cpu and not unpadded,
            flash_heads=model.config.encoder_config.heads if unpadded else 0,
            int8_products=model.precision == "w8a8",
            beam_positions=self.beam_positions or model.config.takes_audio,  # a prompt is read at once
            attention_layers=model.config.decoder_layers if self.attention else 0,
            cross_rows=unpadded,
            screened=screened and worth_screening(model.config, model.precision) and not self.drafts,
            drafts=self.drafts,
            gemm=on_cpu and model.precision == "fp32" and not kernels,
            counted=not on_cpu,
            invariant_sums=self.deterministic,
            kernels=kernels,
            program=kernels and self.profiled is None,  # a profile shows every node
            keeps_mask=not on_cpu and model.cache_form == "static",
        )


DEFAULT_SETTINGS = OrtSettings()


class OrtSession(Session):
    """Runs a model's graphs in the form that its settings ask for.

    `device` is where its states are; None: they are numpy's arrays. `encoder` is another session's, where they share
    one.
    """

    def __init__(self, model: OrtModel, settings: OrtSettings = DEFAULT_SETTINGS, encoder: AnyEncoder | None = None):
        check_provider(settings.provider)
        config, self.form = model.config, settings.form(model)
        self.threads = sensible_threads(config) if settings.threads is None else settings.threads
        self.model, self.settings, self.config = model, settings, config
        self.backend = "onnxruntime" if settings.provider == "cpu" else f"onnxruntime {settings.provider}"
        self.precision, self.cache_form, self.deterministic = model.precision, model.cache_form, settings.deterministic
        padded = self.deterministic and not config.takes_features
        longest = config.max_source // EVEN * EVEN if padded else config.max_source
        if not longest:
            raise SessionError(
                f"deterministic pads sources to {EVEN} tokens, and this model takes {config.max_source}; leave "
                "--deterministic out"
            )
        self.keeps_mask, self.fewer_beams = self.form.keeps_mask, settings.host
        ordered = PROVIDERS[settings.provider].ordered and not self.deterministic
        # The chain of steps feeds itself neither slot positions nor a position for every beam.
        plain = not config.relative and not self.form.beam_positions
        if self.keeps_mask and ordered and plain and settings.tokens_per_wait > 1:
            self.ahead = RunAhead(settings.tokens_per_wait, CHAIN_CANDIDATES, config.max_target)
        self.limits = Limits(None, None, longest, config.max_target, attention=settings.attention)
        self.prefills = self.form.beam_positions
        self.prefills_rows = self.prefills and settings.host and model.cache_form == "static"
        specs = self.form.specs(model.specs)
        self.kept = (specs["encoder"].input("source_mask"), *specs["encoder"].outputs)
        placement = Placement(self.threads, settings.provider, settings.resting, settings.profiled)
        self.device = None if settings.host else Device(PROVIDERS[settings.provider].device)
        opening = partial(Decoders, model, self.form, placement)
        if encoder is None:
            opened, decoders = both(partial(open_graph, model, "encoder", self.form, placement), opening)
            if self.device is None:
                lock = EncoderLock() if self.threads > 1 else None
                window = config.max_source if config.takes_features else 0
                encoder = Encoder(opened, specs["encoder"], widest_of(config), EVEN if padded else 1, lock, window)
            else:
                moves = Moves(self.device, partial(open_tiny_graph, model, placement=placement))
                encoder = DeviceEncoder(opened, specs["encoder"], moves)
        else:
            decoders = opening()
        self.encoder: AnyEncoder | None = encoder
        self.bans: BannedTokens | None = None
        self.host_chain: HostChain | None = None
        self.host_beams: HostBeams | None = None
        self.decoders: Decoders | None = decoders
        self.layout = self.step_layout(decoders)
        if CHOSEN[0].name in decoders.output_types:  # its steps are a program that takes a plan
            self.ahead = RunAhead(AHEAD, MOST_CANDIDATES, config.max_target, undisturbed=True)
        if settings.host and self.threads > 1 and not self.deterministic:
            self.workers = workers_of(model, settings, self.threads, encoder)

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        threads: int | None = None,
        attention: bool = False,
        deterministic: bool = False,
        provider: str = "cpu",
        tokens_per_wait: int = TOKENS_PER_WAIT,
    ) -> OrtSession:
        check_provider(provider)
        settings = OrtSettings(threads, provider, attention, deterministic, tokens_per_wait=tokens_per_wait)
        return cls(model_from_bundle(bundle, precision), settings)

    def step_layout(self, decoders: Decoders) -> StepLayout:
        spec = self.form.specs(self.model.specs)["decoder_step"]
        types = decoders.output_types
        names = [attention_name(layer) for layer in range(self.form.attention_layers)]
        attention = {name: "float16" if types[name] == "tensor(float16)" else "float32" for name in names}
        grows = self.cache_form == "growing"
        return StepLayout(spec, cache_of(spec), grows, self.config.target_vocab, self.config.heads, attention)

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> OrtState:
        if self.encoder is None:
            raise closed()
        if self.config.takes_features:  # of one length: no columns are added
            return self.encoder(source, source_mask)
        width = self.width(source.shape[1])
        return self.encoder(fitted(source, 1, width), fitted(source_mask, 1, width))

    def width(self, longest: int) -> int:
        """The columns of a batch whose longest source has this length."""
        even = self.deterministic and not self.config.takes_features
        return -(-longest // EVEN) * EVEN if even else longest

    def reserve(self, state: OrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        self.take(state, form)
        state.reserve(self.layout.cache, slots)

    def take(self, state: OrtState, form: StepForm) -> None:
        """Binds a state to this session's step in that form."""
        if self.decoders is None:
            raise closed()
        state.form, state.decoder = form, self.decoders.of(form)

    def step(
        self,
        state: OrtState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        bound = state.bound
        if bound is None or bound.shape != self_mask.shape:
            bound = state.bound = StepBinding(self.layout, state, self_mask.shape)
            state.attend(bound.attention, self.layout.attention)
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        if self.form.beam_positions and position.ndim == 1:  # all beams of a source have the same position
            given["position"] = position[:, None]
        if slot_position is not None:
            given["slot_position"] = slot_position
        output = bound.run(given, state.parents)
        state.parents = None
        if self.layout.grows:
            state.update(bound.grown)
            bound.release()
        return output

    def descend(self, state: OrtState, parents: np.ndarray) -> None:
        state.parents = parents

    def prefill(
        self,
        state: OrtState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        row: int | None = None,
    ) -> StepOutput:
        bound = StepBinding(self.layout, state if row is None else state.of_row(row), self_mask.shape)
        output = bound.run({"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask})
        if self.layout.grows:
            state.update(bound.grown)
            state.bound = None
        return output

    def choose(
        self, state: OrtState, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> list[StepOutput]:
        if self.decoders is None:
            raise closed()
        assert isinstance(state, DeviceState)
        assert self.device is not None
        chain = state.chain
        if chain is None or chain.plan is not plan:
            self.bans = self.bans or BannedTokens(self.device)
            chain = state.chain = Chain(self.decoders.of_chain(), state, self.layout.cache, plan, self.bans)
            chain.begin(tokens, position)
        columns = ahead_columns(position, plan.limit, count)
        return outputs_of(chain.run(columns), columns, len(tokens))

    def choose_alone(
        self, state: OrtState, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> ChosenTokens:
        if self.decoders is None:
            raise closed()
        shape = chain_shape(state, self.layout)
        chain, self.host_chain = self.host_chain, None  # another thread may decode with this session
        if chain is None or chain.shape != shape or chain.session is not state.decoder.session:
            chain = HostChain(state.decoder.session, shape)
        chain.attach(state, self.layout)
        chain.follow(plan)
        found = chain.run(tokens, position, count)
        if shape.batch <= KEPT_ROWS:  # its binding keeps the arrays of the latest state
            self.host_chain = chain
        return found

    def choose_beams(
        self, state: OrtState, rows: BeamRows, mask: np.ndarray, plan: BeamPlan, room: int, count: int
    ) -> BeamsAhead:
        if self.decoders is None:
            raise closed()
        shape = chain_shape(state, self.layout, mask.shape[1])
        steps, self.host_beams = self.host_beams, None  # as above
        if steps is None or steps.shape != shape or steps.session is not state.decoder.session:
            steps = HostBeams(state.decoder.session, shape)
        steps.attach(state, self.layout)
        steps.follow(plan)
        found = steps.run(rows, mask, room, count)
        if shape.batch <= KEPT_ROWS:
            self.host_beams = steps
        return found

    def select(self, state: OrtState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        state.select(self.layout.cache, rows, slots)

    def replace(self, state: OrtState, rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        state.replace(self.kept, rows, newcomers, self.width(width))

    def tensor(self, state: OrtState, name: str) -> np.ndarray:
        array = state.memory.numpy(state[name])
        tensor = next((kept for kept in self.kept if kept.name == name), None)
        axis = -1 if name in self.layout.attention else None if tensor is None else tensor.axes.index("S")
        if axis is not None and self.deterministic:
            mask = state.memory.numpy(state["source_mask"])
            asked = np.flatnonzero(mask.any(axis=0))[-1] + 1  # without the columns that were added
            array = fitted(array, axis % array.ndim, asked)
        transposed = self.form.transposed_keys and name.startswith(KEYS)
        return np.array(array.transpose(TRANSPOSED) if transposed else array, order="C")

    def close(self) -> None:
        """Ends the session. Memory of graphs is freed when the last state that is decoded with them dies."""
        self.encoder = self.decoders = self.workers = self.host_chain = self.host_beams = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def workers_of(model: OrtModel, settings: OrtSettings, threads: int, encoder: AnyEncoder) -> Workers[Session]:
    """For batches that workers of one thread decode faster than all threads together."""
    config, precision, kernels = model.config, model.precision, settings.form(model).kernels
    # Few rows of a small model have one thread, unless a number of threads is asked for.
    few = rows_of_threads(config, threads, precision, kernels) if settings.threads is None else 1
    # On two cores one thread is left beside a neighbour. Without kernels it would take as much memory again in fp32.
    follows = threads == 2 and (precision in WORKER_SHORTCUTS or kernels) and not settings.drafts
    opening = worker_of(model, settings, encoder, whole=few > 1 or kernels)
    return Workers(
        threads, lambda: threads * rows_of_worker(config, threads, precision, kernels), opening, few, follows
    )


def worker_of(model: OrtModel, settings: OrtSettings, encoder: AnyEncoder, whole: bool) -> Callable[[], OrtSession]:
    """Opens a single-threaded session with the same outputs; `whole`: with all that this one has, as that is small, or
    kernels share its weights."""
    alone = dataclasses.replace(settings, threads=1, shortcut=whole or model.precision in WORKER_SHORTCUTS)
    return partial(OrtSession, model, alone, None if whole or model.precision in WORKER_ENCODERS else encoder)


def has_kernels(model: OrtModel) -> bool:
    """Whether fused operators compute in this model's precision, and the library is there."""
    return model.precision in ("fp32", "w8a8") and library() is not None


def has_no_padding(model: OrtModel) -> bool:
    """Whether forms may leave out the source mask: features have no padding. They are for fp32 activations."""
    return model.config.takes_features and PRECISIONS[model.precision] == "float32"


def widest_of(config: ModelConfig) -> int:
    """The largest activation width per encoder position: of the feed-forward or, where sources are long, of the
    scores."""
    encoder = config.encoder_config
    return max(encoder.d_ff, encoder.heads * config.max_source if config.takes_features else 0)


def closed() -> SessionError:
    return SessionError("this session is closed; open it again with: open_session")
