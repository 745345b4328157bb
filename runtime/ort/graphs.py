"""Opens the graphs of a model as ONNX Runtime inference sessions, in the form that is asked for."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from seq2engine.errors import ExportError, GraphError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import GraphSpec
from seq2engine.export.ort_form import FormedGraph, OrtForm, formed_from_bytes
from seq2engine.export.ort_forms.interface import STATES
from seq2engine.export.ort_forms.narrow_table import NarrowTable
from seq2engine.model.config import ModelConfig

from ..defaults import defaults_of
from ..kernels.library import library
from ..kernels.mapped_weights import share_weights
from ..search.step_output import Shortlist
from ..session import EVERYTHING, StepForm
from .device import Replays
from .graph_cache import GraphCache
from .memory import HELD, share_arena
from .providers import PROVIDERS, arguments_for, check_assignment

if TYPE_CHECKING:
    import onnx

# Exceptions of a form on a graph that our export did not write: forms rely on its structure.
FORM_ERRORS = (AssertionError, LookupError, StopIteration, TypeError, ValueError, RuntimeError)
NODE = re.compile(r"Name:'([^']*)'")  # the node in an error message of ONNX Runtime
IMPORTING = threading.Lock()

# Microseconds for which an idle thread spins before it sleeps. The next node of a step comes within that
# time; ONNX Runtime's default is some 40 ms, which takes a shared core from other threads (docs/LOG.md).
WAIT = 50
# Its errors (Fail, InvalidGraph, NoSuchFile, ...) share no base class but Exception. One whose text is not UTF-8
# arrives as a UnicodeDecodeError.
ORT_ERRORS: tuple[type[Exception], ...] = (
    UnicodeDecodeError,
    *(c for c in vars(ort_state).values() if isinstance(c, type) and issubclass(c, Exception)),
)
RUN_ERRORS: tuple[type[Exception], ...] = (RuntimeError, *ORT_ERRORS)  # with bound arrays it is a RuntimeError


@dataclass(frozen=True)
class OrtModel:
    """The portable graphs of a model in one precision.

    `fingerprints` are hashes of graphs and their weights, by which `kept` has them in the forms that were run before.
    """

    graphs: Mapping[str, Path]
    specs: dict[str, GraphSpec]
    config: ModelConfig
    precision: str
    cache_form: str
    beam: int = 1  # of the model's own decoding defaults
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    kept: GraphCache | None = None


def model_from_bundle(bundle: Bundle, precision: str) -> OrtModel:
    if precision == "bf16":
        raise SessionError(
            "ONNX Runtime has no bf16 products on the CPU; run fp16 or fp32 here, --backend torch, or an engine with: "
            "seq2engine build BUNDLE --precision bf16"
        )
    specs = bundle.specs(precision)
    with ThreadPoolExecutor(len(specs)) as pool:  # each is hashed, unless that was done before
        paths = pool.map(partial(bundle.graph_path, precision), specs)
        graphs = dict(zip(specs, paths, strict=True))
    return OrtModel(
        graphs,
        specs,
        bundle.config,
        precision,
        bundle.cache_form,
        defaults_of(bundle).values.get("beam", 1),
        {name: bundle.graph(precision, name).fingerprint for name in specs},
        None if bundle.kept is None else GraphCache(bundle.kept / "graphs"),
    )


@dataclass(frozen=True)
class Placement:
    """Where graphs run, and with how many threads.

    The threads of graphs in `resting` sleep when a call ends. Others wait for the next call in a busy loop (`WAIT`; in
    older versions of ONNX Runtime some 40 ms), and take a core from the graph that comes next: an encoder's would do so
    during the first steps of every decode.
    """

    threads: int | None = None  # None: ONNX Runtime's own choice
    provider: str = "cpu"
    resting: tuple[str, ...] = ("encoder",)
    profiled: Path | None = None  # the beginning of the names of files with the time of every node


@dataclass(frozen=True)
class GraphKind:
    """Properties of a graph that affect how it is opened."""

    rests: bool = False  # its threads sleep when a call ends
    strict: bool = False  # no node may run on the CPU, not even one that computes a shape
    kernels: bool = False  # it has operators of the kernel library
    replayed: bool = False  # its shapes repeat from call to call, so that a CUDA graph serves many
    precision: str = "fp32"


ENCODER = GraphKind()


@dataclass(frozen=True)
class Decoder:
    """A decoder step in one form, opened. `replays`: CUDA graphs of it, where its shapes repeat."""

    form: OrtForm
    session: ort.InferenceSession
    replays: Replays | None = None

    @cached_property
    def flat_logits(self) -> bool:
        """Whether its logits are [B*K,V], as a Gemm makes them (ort_forms/gemm_projection.py)."""
        return any(output.name == "logits" and len(output.shape) == 2 for output in self.session.get_outputs())

    @cached_property
    def state_width(self) -> int:
        """Numbers of a state that it puts out, to narrow its table (ort_forms/draft_step.py); 0: it puts out none."""
        return next((output.shape[-1] for output in self.session.get_outputs() if output.name == STATES), 0)


class Decoders:
    """A model's decoder steps: one for all searches so far, and the one of the latest shortlist.

    Opening one takes as long as opening a session. So the first has what its search needs, all logits or the best
    candidates alone; where both are asked for, one that has both takes its place. An earlier one lives as long as
    states that are decoded with it. Workers may ask at the same time.
    """

    def __init__(self, model: OrtModel, form: OrtForm, placement: Placement):
        self.model, self.form, self.placement = model, form, placement
        self.latest: tuple[Shortlist, Decoder] | None = None
        self.chooser: Decoder | None = None
        self.opening = threading.Lock()
        self.first: Decoder | None = self.opened(form.for_candidates(1 if model.beam == 1 else 0))
        # Of every step; what ONNX Runtime returns would keep its session alive.
        self.output_types = {output.name: str(output.type) for output in self.first.session.get_outputs()}

    @property
    def whole(self) -> Decoder:
        """The step with all logits."""
        return self.of(EVERYTHING)

    def of(self, step: StepForm) -> Decoder:
        shortlist = step.shortlist
        with self.opening:
            if shortlist is None:
                if self.first is None or self.first.form not in (self.form, self.form.for_candidates(step.candidates)):
                    self.first = None  # first free its memory
                    self.first = self.opened(self.form)
                return self.first
            if self.latest is None or self.latest[0] != shortlist:
                self.latest = None  # first free its memory
                self.latest = shortlist, self.opened(self.form.with_shortlist(shortlist.tokens))
            return self.latest[1]

    def narrow_table(self, states: np.ndarray) -> None:
        """Opens the step that drafts anew, with a table that is as narrow as these states [N,D] allow, if any is."""
        with self.opening:
            graph = narrow_graph(self.model, self.form, states)
            if graph is not None:
                self.first = None  # first free its memory
                self.first = Decoder(self.form, open_step(self.model, self.placement, graph, self.form.kernels))

    def of_chain(self) -> Decoder:
        """The step that chooses the next tokens itself, greedily; it has its own copy of the weights."""
        with self.opening:
            if self.chooser is None:
                form = dataclasses.replace(self.form, greedy=True, counted=False, attention_layers=0)
                self.chooser = self.opened(form)
            return self.chooser

    def opened(self, form: OrtForm) -> Decoder:
        return Decoder(
            form, open_graph(self.model, "decoder_step", form, self.placement), Replays() if form.keeps_mask else None
        )


def open_graph(model: OrtModel, name: str, form: OrtForm, placement: Placement) -> ort.InferenceSession:
    HELD.forget()
    if name == "decoder_step":
        return open_step(model, placement, kept_graph(model, name, form), form.kernels)
    kind = GraphKind(name in placement.resting, precision=model.precision, kernels=form.kernels)
    return inference_session(model.graphs[name], placement, kind, kept_graph(model, name, form))


def open_step(
    model: OrtModel, placement: Placement, graph: FormedGraph | None, kernels: bool = False
) -> ort.InferenceSession:
    name = "decoder_step"
    kind = GraphKind(name in placement.resting, True, kernels, model.cache_form == "static", model.precision)
    return inference_session(model.graphs[name], placement, kind, graph)


def kept_graph(model: OrtModel, name: str, form: OrtForm) -> FormedGraph | None:
    """As `graph_in_form`, and kept for the next session where the model has a folder for that."""
    make = partial(graph_in_form, name, model.graphs[name], form)
    if model.kept is None or (name == "encoder" and not form.changes_encoder):
        return make()
    is_draft = form.drafts and name == "decoder_step"
    if is_draft and (narrow := model.kept.found(about_narrow(model, form))) is not None:
        return formed_from_bytes(narrow)

    def made() -> bytes:
        graph = make()
        assert graph is not None
        return graph.to_bytes()

    return formed_from_bytes(model.kept.graph(about_graph(model, name, form), made))


def about_graph(model: OrtModel, name: str, form: OrtForm) -> dict[str, Any]:
    return {"graph": name, "hash": model.fingerprints[name], "form": dataclasses.asdict(form)}


def about_narrow(model: OrtModel, form: OrtForm) -> dict[str, Any]:
    """Of a step that drafts with a narrow table. Which columns it has depends on what was decoded: any will do."""
    return {**about_graph(model, "decoder_step", form), "narrow": True}


def narrow_graph(model: OrtModel, form: OrtForm, states: np.ndarray) -> FormedGraph | None:
    """The step that drafts, with a table that is as narrow as these states allow, kept for later sessions; None where
    none finds their best tokens."""
    path = model.graphs["decoder_step"]
    table = late_forms().narrow_table_of(path, states)
    if table is None:
        return None
    graph = graph_in_form("decoder_step", path, form, table)
    assert graph is not None
    if model.kept is not None:
        model.kept.keep(about_narrow(model, form), graph.to_bytes())
    return graph


def late_forms() -> ModuleType:
    """What changes graphs; imported late, because a graph that was kept needs no onnx.

    By one thread at a time: where the import fails, Python gives half a module to the threads that wait for it.
    """
    with IMPORTING:
        from seq2engine.export import forms

        return forms


def open_tiny_graph(model: OrtModel, graph: onnx.ModelProto, placement: Placement) -> ort.InferenceSession:
    """A device graph: no weights, moves a state."""
    path = model.graphs["decoder_step"].with_name(f"{graph.graph.name}.onnx")  # not a real file: the name in messages
    placement = dataclasses.replace(placement, provider=PROVIDERS[placement.provider].moves)
    return inference_session(
        path, placement, GraphKind(rests=True, strict=True), FormedGraph(graph.SerializeToString())
    )


def graph_in_form(name: str, path: Path, form: OrtForm, narrow: NarrowTable | None = None) -> FormedGraph | None:
    """A graph in the requested form; its weights stay in the graph's folder. None: the file unchanged."""
    formed_graph = late_forms().formed_graph
    try:
        return formed_graph(name, path, form, narrow)
    except ExportError as error:
        raise GraphError(
            f"{path} cannot be put into ONNX Runtime's form: {error}", name, node_in(str(error))
        ) from error
    except FORM_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GraphError(
            f"{path} cannot be put into ONNX Runtime's form ({reason}): it is not a graph of this model; export the "
            "checkpoint again with: seq2engine export CHECKPOINT DIR",
            name,
            node_in(reason),
        ) from error


def node_in(reason: str) -> str:
    """The node that a message is about: ONNX Runtime's messages quote it, ours begin with its name."""
    named = NODE.findall(reason)  # the last one is inside of those before
    first = reason.partition(" ")[0].rstrip(":")
    return named[-1] if named else first if "/" in first else ""


def run_bound(session: ort.InferenceSession, binding: ort.IOBinding, options: ort.RunOptions | None = None) -> None:
    """Runs a graph over bound arrays; where it cannot, the error names the node."""
    try:
        session.run_with_iobinding(binding, options)
    except RUN_ERRORS as error:
        name = "decoder_step" if any(given.name == "tokens" for given in session.get_inputs()) else "encoder"
        raise run_error(name, error) from error


def run_arrays(
    session: ort.InferenceSession, outputs: Sequence[str], given: Mapping[str, np.ndarray], name: str
) -> list[np.ndarray]:
    """Runs a graph of that name over arrays; where it cannot, the error names the node."""
    try:
        return session.run(list(outputs), dict(given))
    except RUN_ERRORS as error:
        raise run_error(name, error) from error


def reason_of(error: Exception) -> str:
    """The text of ONNX Runtime's error, in one line."""
    text = error.object.decode("utf-8", "replace") if isinstance(error, UnicodeDecodeError) else str(error)
    return " ".join(text.split())


def run_error(name: str, error: Exception) -> GraphError:
    reason = reason_of(error)
    return GraphError(f"ONNX Runtime {ort.__version__} cannot run the {name}: {reason}", name, node_in(reason))


def inference_session(
    path: Path, placement: Placement, kind: GraphKind = ENCODER, changed: FormedGraph | None = None
) -> ort.InferenceSession:
    """Opens a graph; `changed` is another form of it in memory, whose weights are beside `path`."""
    options = ort.SessionOptions()
    if changed is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    options.log_severity_level = 4  # its errors are raised as well: one line is enough
    if placement.provider == "cpu":
        share_arena(options)
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(WAIT))
    # By default it also rounds the activations of products with int8 and int4 weights to int8, without a warning.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if placement.profiled is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(placement.profiled)
    if placement.threads is not None:
        options.intra_op_num_threads = placement.threads
    if kind.rests:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    held: list[object] = []
    if kind.kernels:
        assert changed is not None
        options.register_custom_ops_library(str(library()))
        held = share_weights(options, changed.weights, path.parent)
    try:
        session = ort.InferenceSession(
            str(path) if changed is None else changed.graph,
            options,
            **arguments_for(placement.provider, options, path, kind.precision, kind.replayed),
        )
    except ORT_ERRORS as error:
        reason = reason_of(error)
        raise GraphError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}", path.stem, node_in(reason)
        ) from error
    session.held_weights = held  # which it reads as long as it lives
    if changed is not None:
        session._model_bytes = b""  # it would keep the graph for `set_providers`, which is never called
    check_assignment(session, placement.provider, path, kind.strict)
    return session
