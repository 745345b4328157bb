"""Calibration: the fp32 graphs decode texts, and the largest magnitude of every tensor is recorded.

    tensor --Abs--ReduceMax--> one more output of the graph

Sources are decoded by beam search, as in use. Padding counts too, because it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, shape_inference

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.export.contract import graph_specs
from seq2engine.export.precision.fp32_nodes import Calibration
from seq2engine.model.config import ModelConfig
from seq2engine.model.tokenizers.base import Coder

from .generate import generate
from .ort.binding import OrtState, cache_of
from .ort.graphs import Placement, inference_session
from .search.options import SearchOptions
from .search.step_output import StepOutput
from .session import EVERYTHING, Limits, Session, StepForm
from .text.sources import random_sources, sample_of

MOST_LINES, MOST_SOURCES = 2048, 64  # of a corpus: lines that are read, evenly over it, and sources that are decoded
RANDOM_SOURCES = 32  # without a corpus
LONGEST = 64  # output tokens
BATCH, BEAM = 16, 4
LARGEST = "largest/"  # prefix of the outputs that are the largest magnitude of a tensor


class CalibrationSession(Session):
    """The portable fp32 graphs, keeping the largest magnitude of every float tensor. It is not made for speed.

    It takes no forms: what fp16 must hold are the tensors that the portable graphs have.
    """

    backend, precision = "onnxruntime", "fp32"

    def __init__(self, graphs: dict[str, onnx.ModelProto], config: ModelConfig, cache_form: str):
        self.config, self.cache_form = config, cache_form
        self.limits = Limits(None, None, config.max_source, config.max_target)
        specs = graph_specs(config, "fp32", cache_form)
        self.inputs = specs["decoder_step"].inputs
        self.cache = cache_of(specs["decoder_step"])
        self.kept = [specs["encoder"].input("source_mask"), *specs["encoder"].outputs]
        self.largest: dict[str, dict[str, float]] = {name: {} for name in graphs}
        self.steps = 0
        self.sessions = {
            name: inference_session(Path(f"{name}.onnx"), Placement(), changed=measuring(graph).SerializeToString())
            for name, graph in graphs.items()
        }

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> OrtState:
        found = self.measured("encoder", {"source_ids": source_ids, "source_mask": source_mask})
        return OrtState(found, source_mask=np.array(source_mask, order="C"))

    def reserve(self, state: OrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        assert form == EVERYTHING, "all tensors are measured"
        state.reserve(self.cache, slots)

    def step(
        self, state: OrtState, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> StepOutput:
        self.steps += 1
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask, **state}
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

    def __exit__(self, *exc: object) -> None:
        self.close()

    def measured(self, graph: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a graph and records its magnitudes; returns the outputs of the contract."""
        session, largest = self.sessions[graph], self.largest[graph]
        names = [output.name for output in session.get_outputs()]
        kept = {}
        for name, array in zip(names, session.run(names, feeds), strict=True):
            if name.startswith(LARGEST):
                tensor = name.removeprefix(LARGEST)
                largest[tensor] = float(np.maximum(largest.get(tensor, 0.0), array))
            else:
                kept[name] = array
        return kept


def measuring(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with one more output for every float tensor that a node computes."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    inferred = shape_inference.infer_shapes(made).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    for name in [name for node in model.graph.node for name in node.output if kinds[name] == TensorProto.FLOAT]:
        magnitude, output = f"magnitude/{name}", f"{LARGEST}{name}"
        made.graph.node.append(helper.make_node("Abs", [name], [magnitude], name=magnitude))
        made.graph.node.append(helper.make_node("ReduceMax", [magnitude], [output], name=output, keepdims=0))
        made.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    return made


def sources_from_corpus(path: Path, coder: Coder) -> list[list[int]]:
    """The sources of a file: one a line, up to a tab where targets stand behind it."""
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
    given = random_sources(config, RANDOM_SOURCES) if sources is None else sources
    chosen = sample_of([list(source)[: config.max_source] for source in given if source], MOST_SOURCES)
    if not chosen:
        raise RequestError(f"{corpus} has no source to decode; name a UTF-8 file of source lines")

    def calibrate(graphs: dict[str, onnx.ModelProto]) -> Calibration:
        options = SearchOptions(max_length=min(config.max_target, LONGEST), beam=min(BEAM, config.target_vocab - 1))
        ordered = sorted(chosen, key=len)
        session = CalibrationSession(graphs, config, cache_form)
        with session:
            for first in range(0, len(ordered), BATCH):
                progress("export: calibration", first / len(ordered))
                generate(session, ordered[first : first + BATCH], options)
            progress("export: calibration", 1.0)
            return Calibration(corpus, len(chosen), session.steps, session.largest)

    return calibrate
