"""ONNX Runtime as a session: bound once per shape, the cache written in place.

A State is in host memory whatever the provider: one for GPUs gets and gives back the whole cache in every step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import GraphSpec, TensorSpec
from seq2engine.export.ort_forms.attention_outputs import attention_name
from seq2engine.export.ort_forms.forms import OrtForm, encoder_form, step_form
from seq2engine.export.ort_forms.screened_argmax import MOST, WANTED, worth_screening
from seq2engine.export.ort_forms.top_candidates import CANDIDATES
from seq2engine.export.ort_forms.transposed_keys import KEYS, TURN
from seq2engine.model.config import ModelConfig

from ..search.step_output import Answer, Candidates, Reduced, Shortlist
from ..session import Limits, Session, State
from ..threads import Turns, rows_for_a_lane, sensible_threads
from .memory import HELD, LARGE, giving_back, resized, rows_of, share_arena, trim, zeros
from .providers import arguments_for, check_assignment, check_provider

# Its errors (Fail, InvalidGraph, NoSuchFile, ...) share no base class but Exception.
ORT_ERRORS = tuple(c for c in vars(ort_state).values() if isinstance(c, type) and issubclass(c, Exception))
LOGITS = TensorSpec("logits", "float32", ("B", "K", "W"))  # W: the whole vocabulary, or a shortlist
EVEN = 8  # columns; sums over sources whose lengths are multiples of this have the same bits at any length
# Rows from which on a thread is better off with a decode of its own; measured on two cores (docs/LOG.md).
LANE_ROWS, MOST_LANE_ROWS = {"w8a8": 2}, 32
# Lanes whose encoders are their own. A source in int8 takes many small nodes, which threads cannot share; in fp32 it
# takes a few large ones, which they can, and a second copy of its weights takes four times the memory.
LANE_ENCODERS = ("w8a8",)
ROOM = 4  # times as long as it is at first, a cache grows where it lies
SMALL_INPUTS = ("tokens", "position", "write_index", "self_mask")  # copied into bound buffers every step


class OrtSession(Session):
    """Owns two inference sessions. A State holds numpy arrays; the graph reads and writes their memory directly."""

    wanted = 0  # how many candidates of every beam its answers have, and nothing else; 0: everything
    looks = False  # whether its states keep the cross-attention weights of the latest step
    speculative = False  # whether the tokens of one step may stand at positions of their own
    # Graphs whose threads go to sleep when a call ends. Others wait for the next one in a busy loop, for some 40 ms,
    # and take a core from the graph that comes next: an encoder's would do so during the first steps of every decode.
    resting: tuple[str, ...] = ("encoder",)

    def __init__(
        self,
        graphs: dict[str, Path],
        specs: dict[str, GraphSpec],
        config: ModelConfig,
        precision: str,
        cache_form: str,
        threads: int | None = None,
        deterministic: bool = False,
        provider: str = "cpu",
    ):
        check_provider(provider)
        self.backend = "onnxruntime" if provider == "cpu" else f"onnxruntime {provider}"
        self.config, self.precision, self.cache_form = config, precision, cache_form
        self.deterministic = deterministic
        self.form = OrtForm(
            transposed_keys=provider == "cpu",
            int8_products=precision == "w8a8",
            beam_positions=self.speculative,
            attention_layers=config.decoder_layers if self.looks else 0,
            # The shortcut to the best candidates works for all sources at once, so no bit of their logits may matter.
            screened=provider == "cpu" and not deterministic and worth_screening(config, precision),
        )
        self.plain_form = self.form  # without a shortlist, which views have
        self.specs = self.form.specs(specs)
        self.looked = [attention_name(layer) for layer in range(self.form.attention_layers)]
        longest = config.max_source // EVEN * EVEN if deterministic else config.max_source
        self.limits = Limits(None, None, longest, config.max_target, attention=self.looks)
        self.graphs, self.provider = graphs, provider
        self.threads = sensible_threads(config) if threads is None else threads
        self.sessions = {name: self.inference_session(name) for name in graphs}
        self.turns: Turns | None = Turns()  # lanes that share an encoder use it one by one, each with all threads
        self.view: OrtSession | None = None  # with the latest shortlist
        self.narrow: list[OrtSession] = []  # one of one thread, for lanes, once it is needed; views share it
        self.kept = [specs["encoder"].input("source_mask"), *self.specs["encoder"].outputs]
        step = specs["decoder_step"]
        self.cache_names = [
            tensor.name for tensor in step.inputs if tensor.name.startswith("self_") and "." in tensor.name
        ]

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        threads: int | None = None,
        deterministic: bool = False,
        provider: str = "cpu",
    ) -> OrtSession:
        check_provider(provider)
        check_precision(precision)
        specs = bundle.specs(precision)
        graphs = {name: bundle.graph_path(precision, name) for name in specs}
        return cls(graphs, specs, bundle.config, precision, bundle.cache_form, threads, deterministic, provider)

    def inference_session(self, name: str) -> ort.InferenceSession:
        changed = self.graph_bytes(name)
        rests = name in self.resting
        HELD.forget()
        return inference_session(self.graphs[name], self.threads, changed, self.provider, self.precision, rests)

    def graph_bytes(self, name: str) -> bytes | None:
        """A graph in the form that this session takes; its weights still lie where the graph is. None: as it is."""
        path = self.graphs[name]
        if name == "decoder_step":
            return step_form(graph_from_file(path), self.form, path.parent).SerializeToString()
        return encoder_form(graph_from_file(path), self.form).SerializeToString() if self.form.changes_encoder else None

    def shortlisted(self, shortlist: Shortlist) -> OrtSession:
        if self.view is None or self.view.shortlist != shortlist:
            self.view = None  # first make room: a view has a decoder of its own
            view = copy.copy(self)
            view.shortlist, view.form = shortlist, self.form.with_shortlist(shortlist.tokens)
            view.sessions = {**self.sessions, "decoder_step": view.inference_session("decoder_step")}
            self.view = view
        return self.view

    def unscored(self, wanted: int) -> OrtSession:
        if not self.has_shortcut or wanted > MOST:
            return self
        view = copy.copy(self)
        view.wanted = wanted
        return view

    @property
    def has_shortcut(self) -> bool:
        """Whether its decoder step asks how many candidates are `wanted`."""
        return self.form.screened

    @property
    def as_view(self) -> tuple[int, Shortlist | None]:
        """What sets views of one session apart, which may step the same state."""
        return self.wanted, self.shortlist

    def lanes(self, sources: int, rows: int) -> Sequence[OrtSession]:
        threads = self.threads
        wanted = threads * rows_for_a_lane(self.config, LANE_ROWS.get(self.precision, MOST_LANE_ROWS))
        # Others do more in a step, or have no graphs of their own to open again.
        plain = type(self) in (OrtSession, OrtAttention) and self.provider == "cpu" and not self.deterministic
        if not plain or threads == 1 or sources < threads or rows < wanted:
            return (self,)
        if not self.narrow:  # all lanes may run it at once: their states are their own
            lane = copy.copy(self)
            lane.threads, lane.narrow, lane.view, lane.shortlist, lane.wanted = 1, [], None, None, 0
            # Without a shortlist; and in fp32 without the shortcut, which takes a second copy of the table.
            screened = self.plain_form.screened and self.precision == "w8a8"
            lane.form = dataclasses.replace(self.plain_form, screened=screened)
            own = lane.graphs if self.precision in LANE_ENCODERS else ("decoder_step",)
            lane.sessions = {**self.sessions, **{name: lane.inference_session(name) for name in own}}
            lane.turns = None if "encoder" in own else self.turns
            self.narrow.append(lane)
        lane = self.narrow[0] if self.shortlist is None else self.narrow[0].shortlisted(self.shortlist)
        return (lane.unscored(self.wanted) if self.wanted else lane,) * threads

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        width = self.width(source_ids.shape[1])
        source_ids, source_mask = fitted(source_ids, 1, width), fitted(source_mask, 1, width)
        state: State = {"source_mask": np.array(source_mask, order="C")}
        sizes = dict(zip("BS", source_ids.shape, strict=True))
        for tensor in self.specs["encoder"].outputs:
            state[tensor.name] = zeros(tensor.shape(sizes), tensor.dtype)
        given = {**state, "source_ids": np.ascontiguousarray(source_ids)}
        inner = self.config.d_ff  # the longest a token gets to be
        fits = self.provider != "cpu" or HELD.fits(source_ids.size * inner)
        # A large batch in several calls: one is no faster, and what it works with gets larger than what comes of it.
        rows = len(source_ids) if self.provider != "cpu" else max(1, LARGE // (width * inner))
        with nullcontext() if self.turns is None else self.turns.taken():
            for first in range(0, len(source_ids), rows):
                part = {name: array[first : first + rows] for name, array in given.items()}
                last = first + rows >= len(source_ids)
                self.encode_part(part, giving_back() if last and not fits else None)
        if not fits:
            trim()
        return state

    def encode_part(self, part: State, options: ort.RunOptions | None) -> None:
        """Some sources' rows of a state that is being made, written where they are."""
        binding = self.sessions["encoder"].io_binding()
        for tensor in self.specs["encoder"].inputs:
            bind_input(binding, tensor.name, part[tensor.name])
        for tensor in self.specs["encoder"].outputs:
            bind_output(binding, tensor.name, part[tensor.name])
        self.sessions["encoder"].run_with_iobinding(binding, options)

    def width(self, longest: int) -> int:
        """How many columns a batch has whose longest source is so long."""
        return -(-longest // EVEN) * EVEN if self.deterministic else longest

    def reserve(self, state: State, slots: int) -> None:
        sizes = {"B": len(state["source_mask"]), "L": slots}
        for name in self.cache_names:
            tensor = self.specs["decoder_step"].input(name)
            state[name] = zeros(tensor.shape(sizes), tensor.dtype, ROOM)
        state.pop("binding", None)

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        bound = state.get("binding")
        if bound is None or bound.shape != self_mask.shape or bound.view != self.as_view:
            bound = state["binding"] = StepBinding(self, state, self_mask.shape, bound)
        for name, buffer in bound.inputs.items():
            buffer[...] = given[name]
        self.sessions["decoder_step"].run_with_iobinding(bound.binding)
        state.update(bound.looks)
        if self.cache_form == "growing":
            state.update(bound.grown)
            del state["binding"]
        return Answer(bound.logits, bound.reduced, self.shortlist)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        bound = state.pop("binding", None)
        if bound is not None and slots is not None and slots.shape[1] != state[self.cache_names[0]].shape[2]:
            bound.release()  # first, as it holds on to arrays that are to go
        if rows is not None:
            bound = None
            for name, array in state.items():
                state[name] = rows_of(array, rows)  # one by one: the old ones go as the new ones come
        if slots is not None:
            for name in self.cache_names:
                state[name] = gathered_slots(state[name], slots)
        if bound is not None:
            state["binding"] = bound

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        state.pop("binding", None)
        width = self.width(width)
        for tensor in self.kept:
            axis = tensor.axes.index("S")
            array = state[tensor.name] = fitted(state[tensor.name], axis, width)
            array[rows] = fitted(newcomers[tensor.name], axis, width)

    def tensor(self, state: State, name: str) -> np.ndarray:
        array = state[name]
        tensor = next((kept for kept in self.kept if kept.name == name), None)
        places = array.ndim - 1 if name in self.looked else None if tensor is None else tensor.axes.index("S")
        if places is not None and self.deterministic:
            asked = np.flatnonzero(state["source_mask"].any(axis=0))[-1] + 1  # without the columns that we added
            array = fitted(array, places, asked)
        turned = self.form.transposed_keys and name.startswith(KEYS)
        return np.array(array.transpose(TURN) if turned else array, order="C")

    def dtype_of(self, output: str) -> str:
        """The type of an output of the decoder step that the contract does not have."""
        (kind,) = [one.type for one in self.sessions["decoder_step"].get_outputs() if one.name == output]
        return "float16" if kind == "tensor(float16)" else "float32"

    def attention(self, state: State) -> np.ndarray:
        if not self.looked:
            return super().attention(state)
        return self.tensor(state, self.looked[-1]).astype(np.float64).mean(axis=1)  # [B, H, K, S] -> [B, K, S]

    def close(self) -> None:
        self.sessions.clear()
        self.narrow.clear()
        self.view = None

    def __exit__(self, *exc: object) -> None:
        self.close()


class OrtAttention(OrtSession):
    """The same graphs with more outputs: the cross-attention weights `cross_attention.i` [B,H,K,S] of every layer."""

    looks = True


class StepBinding:
    """The decoder step bound to one state's memory, valid while its shapes and arrays stay; it keeps the arrays alive.

    A static cache is both input and output: the same memory, so that nothing is copied. A growing cache gets new
    arrays every step.
    """

    def __init__(
        self, session: OrtSession, state: State, mask_shape: tuple[int, ...], before: StepBinding | None = None
    ):
        self.shape, self.view = mask_shape, session.as_view
        batch, beams, attended = mask_shape
        spec = session.specs["decoder_step"]
        columns = session.config.target_vocab if session.shortlist is None else len(session.shortlist.tokens)
        best = session.wanted or min(beams + 1, columns)
        columns = best if session.wanted else columns
        sizes = {"B": batch, "K": beams, "M": attended, "L": attended, "W": columns, "C": best}
        self.binding = session.sessions["decoder_step"].io_binding()
        self.inputs: dict[str, np.ndarray] = {}
        self.grown: dict[str, np.ndarray] = {}
        for tensor in spec.inputs:
            if tensor.name in SMALL_INPUTS:
                array = self.inputs[tensor.name] = np.empty(tensor.shape(sizes), dtype=tensor.dtype)
            else:
                array = state[tensor.name]
            bind_input(self.binding, tensor.name, array)
        if session.has_shortcut:
            self.wanted = np.array([session.wanted])
            bind_input(self.binding, WANTED.name, self.wanted)
        shapes = {tensor.name: tensor.shape(sizes) for tensor in (LOGITS, *CANDIDATES)}
        outputs = {} if before is None else before.outputs
        if {name: array.shape for name, array in outputs.items()} != shapes:
            outputs = {tensor.name: zeros(shapes[tensor.name], tensor.dtype) for tensor in (LOGITS, *CANDIDATES)}
        self.outputs: dict[str, np.ndarray] = outputs
        for name, array in outputs.items():
            bind_output(self.binding, name, array)
        candidates = Candidates(outputs["best_tokens"], outputs["best_logits"])
        self.reduced = Reduced(candidates, outputs["exp_sum"])
        self.logits = outputs["logits"][..., :0] if session.wanted else outputs["logits"]
        for name in session.cache_names:
            if session.cache_form == "static":
                cache = state[name]
            else:
                tensor = spec.output(f"new_{name}")
                cache = self.grown[name] = np.empty(tensor.shape(sizes), dtype=tensor.dtype)
            bind_output(self.binding, f"new_{name}", cache)
        shape = (batch, session.config.heads, beams, state["source_mask"].shape[1])
        self.looks = {name: np.zeros(shape, dtype=session.dtype_of(name)) for name in session.looked}
        for name, array in self.looks.items():
            bind_output(self.binding, name, array)

    def release(self) -> None:
        """Lets go of the state's memory, as it moves; what it put out may serve the next binding."""
        self.binding, self.shape, self.grown, self.looks = None, (), {}, {}


def bind_input(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
    """Binds an array's own memory, which a contiguous one is: nothing is copied."""
    assert array.flags.c_contiguous
    binding.bind_cpu_input(name, array)


def bind_output(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
    assert array.flags.c_contiguous
    binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))


def check_precision(precision: str) -> None:
    if precision == "bf16":
        raise SessionError(
            "ONNX Runtime has no bf16 products on the CPU; run fp16 or fp32 here, --backend torch, or an engine with: "
            "seq2engine build BUNDLE --precision bf16"
        )


def graph_from_file(path: Path) -> onnx.ModelProto:
    """Without its weights."""
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise SessionError(f"cannot load {path}: it is no ONNX graph; export the checkpoint again") from error


def inference_session(
    path: Path,
    threads: int | None,
    changed: bytes | None = None,
    provider: str = "cpu",
    precision: str = "fp32",
    rests: bool = False,
) -> ort.InferenceSession:
    """Opens a graph; `changed` is another form of it in memory, whose weights still lie beside `path`.

    With `rests`, its threads sleep between calls.
    """
    options = ort.SessionOptions()
    if changed is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    options.log_severity_level = 3
    if provider == "cpu":
        share_arena(options)
    # Left to itself it rounds the activations of products with int8 and int4 weights to int8 as well, and says nothing.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if rests:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = ort.InferenceSession(
            changed or str(path), options, **arguments_for(provider, options, path, precision)
        )
    except ORT_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SessionError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}") from error
    check_assignment(session, provider, path)
    return session


def fitted(array: np.ndarray, axis: int, width: int) -> np.ndarray:
    """Cut to a width along one axis, or filled up with zeros."""
    if array.shape[axis] == width:
        return array
    front = (*[slice(None)] * axis, slice(min(width, array.shape[axis])))
    result = np.zeros((*array.shape[:axis], width, *array.shape[axis + 1 :]), dtype=array.dtype)
    result[front] = array[front]
    return result


def gathered_slots(cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """cache [B,H,L,E], slots [B,L'] -> [B,H,L',E]; the same array, where as many slots stay: few of them move."""
    batch, heads, length, width = cache.shape
    if slots.shape[1] == length:
        for row, moves in enumerate(slots != np.arange(length)):
            if moves.any():
                first, last = np.flatnonzero(moves)[[0, -1]]
                cache[row, :, first : last + 1] = np.take(cache[row], slots[row, first : last + 1], axis=1)
        return cache
    shape = (batch, heads, slots.shape[1], width)
    result = resized(cache, shape)
    if result is None:
        result = zeros(shape, cache.dtype, ROOM)
        for row in range(batch):
            np.take(cache[row], slots[row], axis=1, out=result[row], mode="clip")  # clip mode writes without a buffer
        return result
    # In the same memory: rows of a longer cache lie behind where they were, so the last one goes first.
    for row in range(batch) if slots.shape[1] < length else reversed(range(batch)):
        result[row] = np.take(cache[row], slots[row], axis=1)
    return result
