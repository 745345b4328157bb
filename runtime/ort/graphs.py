"""The graphs of a model as inference sessions of ONNX Runtime: a portable graph, in the form that is wanted, opened."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import GraphSpec
from seq2engine.export.ort_forms.forms import OrtForm, encoder_form, step_form
from seq2engine.model.config import ModelConfig

from ..search.step_output import Shortlist
from .memory import HELD, share_arena
from .providers import arguments_for, check_assignment

# Its errors (Fail, InvalidGraph, NoSuchFile, ...) share no base class but Exception.
ORT_ERRORS = tuple(c for c in vars(ort_state).values() if isinstance(c, type) and issubclass(c, Exception))


@dataclass(frozen=True)
class OrtModel:
    """The portable graphs of a model in one precision."""

    graphs: Mapping[str, Path]
    specs: dict[str, GraphSpec]
    config: ModelConfig
    precision: str
    cache_form: str


def model_from_bundle(bundle: Bundle, precision: str) -> OrtModel:
    if precision == "bf16":
        raise SessionError(
            "ONNX Runtime has no bf16 products on the CPU; run fp16 or fp32 here, --backend torch, or an engine with: "
            "seq2engine build BUNDLE --precision bf16"
        )
    specs = bundle.specs(precision)
    graphs = {name: bundle.graph_path(precision, name) for name in specs}
    return OrtModel(graphs, specs, bundle.config, precision, bundle.cache_form)


@dataclass(frozen=True)
class Placement:
    """Where graphs run, and with how many threads.

    The threads of graphs in `resting` sleep when a call ends. Others wait for the next call in a busy loop, for some 40
    ms, and take a core from the graph that comes next: an encoder's would do so during the first steps of every decode.
    """

    threads: int | None = None  # None: ONNX Runtime's own choice
    provider: str = "cpu"
    resting: tuple[str, ...] = ("encoder",)


@dataclass(frozen=True)
class Decoder:
    """A decoder step in one form, opened."""

    form: OrtForm
    session: ort.InferenceSession


class Decoders:
    """A model's decoder steps: the one with all logits, and the one of the latest shortlist.

    Opening one may take as long as opening a session, so the latest is kept; earlier ones live as long as states that
    are decoded with them. Workers may ask at the same time.
    """

    def __init__(self, model: OrtModel, form: OrtForm, placement: Placement):
        self.model, self.form, self.placement = model, form, placement
        self.whole = self.opened(form)
        self.latest: tuple[Shortlist, Decoder] | None = None
        self.opening = threading.Lock()

    def of(self, shortlist: Shortlist | None) -> Decoder:
        if shortlist is None:
            return self.whole
        with self.opening:
            if self.latest is None or self.latest[0] != shortlist:
                self.latest = None  # first free its memory
                self.latest = shortlist, self.opened(self.form.with_shortlist(shortlist.tokens))
            return self.latest[1]

    def opened(self, form: OrtForm) -> Decoder:
        return Decoder(form, open_graph(self.model, "decoder_step", form, self.placement))


def open_graph(model: OrtModel, name: str, form: OrtForm, placement: Placement) -> ort.InferenceSession:
    path = model.graphs[name]
    HELD.forget()
    return inference_session(path, placement, name in placement.resting, graph_bytes(name, path, form), model.precision)


def graph_bytes(name: str, path: Path, form: OrtForm) -> bytes | None:
    """A graph in the form that is wanted; its weights stay in the graph's folder. None: the file as it is."""
    if name == "decoder_step":
        return step_form(graph_from_file(path), form, path.parent).SerializeToString()
    return encoder_form(graph_from_file(path), form).SerializeToString() if form.changes_encoder else None


def graph_from_file(path: Path) -> onnx.ModelProto:
    """Without its weights."""
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise SessionError(f"cannot load {path}: it is no ONNX graph; export the checkpoint again") from error


def inference_session(
    path: Path, placement: Placement, rests: bool = False, changed: bytes | None = None, precision: str = "fp32"
) -> ort.InferenceSession:
    """Opens a graph; `changed` is another form of it in memory, whose weights are beside `path`."""
    options = ort.SessionOptions()
    if changed is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    options.log_severity_level = 3
    if placement.provider == "cpu":
        share_arena(options)
    # By default it also rounds the activations of products with int8 and int4 weights to int8, without a warning.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if placement.threads is not None:
        options.intra_op_num_threads = placement.threads
    if rests:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = ort.InferenceSession(
            changed or str(path), options, **arguments_for(placement.provider, options, path, precision)
        )
    except ORT_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SessionError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}") from error
    check_assignment(session, placement.provider, path)
    return session
