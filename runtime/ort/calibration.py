"""Calibration: the fp32 graphs decode texts, and the largest magnitude of every tensor is recorded.

    tensor --Abs--ReduceMax--> one more output of the graph: a number, or one for each channel of what products read

Sources are decoded by beam search, as in use. Padding counts too, because it is computed. A large model decodes fewer
and shorter outputs, so that no export waits for minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.export.contract import graph_specs
from seq2engine.export.graph_index import copy_of
from seq2engine.export.precision.census import types_of
from seq2engine.export.precision.fp32_nodes import Calibration
from seq2engine.export.precision.smoothing import smoothed_inputs
from seq2engine.model.config import ModelConfig
from seq2engine.model.tokenizers.base import Coder

from ..encoder_inputs import listed_sources
from ..generate import generate
from ..search.options import SearchOptions
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Limits, Session, StepForm
from ..text.sources import random_sources, sample_of
from .binding import OrtState, cache_of
from .graphs import Placement, inference_session

MOST_LINES, MOST_SOURCES = 2048, 64  # of a corpus: lines that are read, evenly over it, and sources that are decoded
RANDOM_SOURCES, RANDOM_LENGTH = 32, 128  # without a corpus; tokens of the longest
MOST_FEATURES = 4  # sources of audio or images: every source is as long as the longest text
LONGEST = 64  # output tokens
BATCH, BEAM = 16, 4
BATCH_TOKENS = 4096  # tokens of a batch, padding included: attention scores take memory
WORK = 10**11  # multiplications of all decoder steps together: some ten seconds on one core
FEWEST_SOURCES, FEWEST_STEPS = 4, 16
# Ops that only move values: their outputs are no larger than their inputs, so they are not measured.
MOVES = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "TensorScatter", "Concat")
LARGEST = "largest/"  # prefix of the outputs that are the largest magnitude of a tensor
CHANNELS = "channels/"  # prefix of the outputs that are the largest magnitude of each channel [D] of a tensor


class CalibrationSession(Session):
    """The portable fp32 graphs, recording the largest magnitude of every float tensor. Not optimised for speed.

    It applies no forms: fp16 must hold the tensors of the portable graphs.
    """

    backend, precision = "onnxruntime", "fp32"

    def __init__(self, graphs: dict[str, onnx.ModelProto], config: ModelConfig, cache_form: str):
        self.config, self.cache_form = config, cache_form
        self.limits = Limits(None, None, config.max_source, config.max_target)
        specs = graph_specs(config, "fp32", cache_form)
        self.inputs = specs["decoder_step"].inputs
        self.cache = cache_of(specs["decoder_step"])
        self.source = specs["encoder"].inputs[0].name
        self.kept = [specs["encoder"].input("source_mask"), *specs["encoder"].outputs]
        self.largest: dict[str, dict[str, float]] = {name: {} for name in graphs}
        self.channels: dict[str, dict[str, np.ndarray]] = {name: {} for name in graphs}
        self.steps = 0
        self.folder = tempfile.TemporaryDirectory()
        self.sessions = {name: opened(measuring(graph), Path(self.folder.name)) for name, graph in graphs.items()}

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> OrtState:
        found = self.measured("encoder", {self.source: source, "source_mask": source_mask})
        return OrtState(found, source_mask=np.array(source_mask, order="C"))

    def reserve(self, state: OrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        assert form.shortlist is None, "all tensors are measured"
        state.reserve(self.cache, slots)

    def step(
        self,
        state: OrtState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        self.steps += 1
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask, **state}
        given |= {} if slot_position is None else {"slot_position": slot_position}
        found = self.measured("decoder_step", {tensor.name: given[tensor.name] for tensor in self.inputs})
        output = StepOutput(found.pop("logits"))
        state.update({name.removeprefix("new_"): array for name, array in found.items()})
        return output

    def select(self, state: OrtState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        state.select(self.cache, rows, slots)

    def replace(self, state: OrtState, rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        state.replace(self.kept, rows, newcomers, width)

    def tensor(self, state: OrtState, name: str) -> np.ndarray:
        return state[name].copy()

    def close(self) -> None:
        self.sessions.clear()
        self.folder.cleanup()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def measured(self, graph: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a graph and records its magnitudes; returns the outputs of the contract."""
        session, largest, channels = self.sessions[graph], self.largest[graph], self.channels[graph]
        names = [output.name for output in session.get_outputs()]
        kept = {}
        for name, array in zip(names, session.run(names, feeds), strict=True):
            if name.startswith(LARGEST):
                tensor = name.removeprefix(LARGEST)
                largest[tensor] = float(np.maximum(largest.get(tensor, 0.0), array))
            elif name.startswith(CHANNELS):
                tensor = name.removeprefix(CHANNELS)
                channels[tensor] = np.maximum(channels.get(tensor, np.float32(0.0)), array)
            else:
                kept[name] = array
        return kept


def measuring(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with one more output for every float tensor that a node computes (not merely moves)."""
    made = copy_of(model)
    kinds = types_of(model)
    computed = [name for node in model.graph.node if node.op_type not in MOVES for name in node.output]
    for name in [name for name in computed if kinds[name] == TensorProto.FLOAT]:
        magnitude, output = f"magnitude/{name}", f"{LARGEST}{name}"
        made.graph.node.append(helper.make_node("Abs", [name], [magnitude], name=magnitude))
        made.graph.node.append(helper.make_node("ReduceMax", [magnitude], [output], name=output, keepdims=0))
        made.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    add_channels(made)
    return made


def add_channels(made: onnx.ModelProto) -> None:
    """One more output [D] for every tensor [B,Q,D] that smoothing may change, in place."""
    rows = "channels/axes"
    made.graph.initializer.append(numpy_helper.from_array(np.array([0, 1]), rows))
    for name in sorted(set(smoothed_inputs(made).values())):
        output = f"{CHANNELS}{name}"
        node = helper.make_node("ReduceMax", [f"magnitude/{name}", rows], [output], name=output, keepdims=0)
        made.graph.node.append(node)
        made.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [None]))


def opened(model: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    """A session of a graph whose weights may exceed protobuf's limit: they are saved to a file in the folder."""
    path = folder / f"{model.graph.name}.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)
    return inference_session(path, Placement())


def with_moved(model: onnx.ModelProto, largest: dict[str, float]) -> dict[str, float]:
    """Magnitudes with those of tensors that are only moved: the largest of what they are made of."""
    found = dict(largest)
    for node in model.graph.node:
        known = [found[name] for name in node.input if name in found] if node.op_type in MOVES else []
        found.update(dict.fromkeys(node.output, max(known)) if known else {})
    return found


def effort_for(step: onnx.ModelProto, sources: int) -> tuple[int, int]:
    """How many of the sources are decoded, and to how many tokens, so that the total work stays within WORK."""
    weights = sum(prod(weight.dims) for weight in step.graph.initializer if len(weight.dims) > 1)
    outputs = WORK // (max(1, weights) * BEAM)  # tokens of all sources together
    steps = min(LONGEST, max(FEWEST_STEPS, outputs // BATCH))
    return min(sources, max(FEWEST_SOURCES, outputs // steps)), steps


def batches_of(sources: list[list[int]]) -> Iterator[list[list[int]]]:
    """Sources by length, as many at once as their padding allows."""
    batch: list[list[int]] = []
    for source in sorted(sources, key=len):
        if batch and (len(batch) == BATCH or (len(batch) + 1) * len(source) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(source)
    if batch:
        yield batch


def sources_from_corpus(path: Path, coder: Coder) -> list[list[int]]:
    """The sources of a file: one a line, up to a tab if targets follow it."""
    try:
        lines = [line.split("\t")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({error}); name a UTF-8 file of source lines") from error
    lines = [line for line in lines if line.strip()]
    return [coder.encode_source(line) for line in lines[:: max(1, len(lines) // MOST_LINES)]]


def calibration_of(
    sources: Sequence[Sequence[int]] | None,
    corpus: str,
    config: ModelConfig,
    cache_form: str = "static",
    progress: Progress = silent,
) -> Callable[[dict[str, onnx.ModelProto]], Calibration]:
    """A calibration for `onnx_from_model`: decodes at most 64 of these sources (None: random ones), of all lengths."""
    count = MOST_FEATURES if config.takes_features else RANDOM_SOURCES
    given = random_sources(config, count, longest=RANDOM_LENGTH) if sources is None else sources
    if config.takes_features:
        chosen = listed_sources(given, config)[:MOST_FEATURES]
    else:
        chosen = sample_of([list(source)[: config.max_source] for source in given if source], MOST_SOURCES)
    if not chosen:
        raise RequestError(f"{corpus} has no source to decode; name a UTF-8 file of source lines")

    def calibrate(graphs: dict[str, onnx.ModelProto]) -> Calibration:
        count, steps = effort_for(graphs["decoder_step"], len(chosen))
        options = SearchOptions(max_length=min(config.max_target, steps), beam=min(BEAM, config.target_vocab - 1))
        session = CalibrationSession(graphs, config, cache_form)
        with session:
            done = 0
            for batch in batches_of(sample_of(chosen, count)):
                progress("export: calibration", done / count)
                generate(session, batch, options)
                done += len(batch)
            progress("export: calibration", 1.0)
            largest = {name: with_moved(graphs[name], found) for name, found in session.largest.items()}
            return Calibration(corpus, count, session.steps, largest, session.channels)

    return calibrate
