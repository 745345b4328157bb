"""Kernel counts of another exporter's decoder step, built for the same target and ranges as ours.

Any ONNX file with named dynamic axes works, such as Optimum's `decoder_with_past_model.onnx`. The meaning of an axis
is read from its name.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import onnx

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import BuildError, GraphError

from ..artifact.graph_files import graph_from_file
from ..artifact.passport import Passport
from ..artifact.profiles import KINDS, ShapeRanges, Shapes
from .build import build_engine
from .kernels import kernels_from_engine

FLAVOUR = "tensorrt_rtx"
# Part of an axis' name -> what it counts, the first that fits. An axis of none of these is the step's own: one token.
AXES = (("batch", "rows"), ("past", "past"), ("encoder", "source"), ("source", "source"))


@dataclass(frozen=True)
class ForeignStep:
    """What TensorRT builds from another exporter's decoder step."""

    path: str
    launches: int
    fused_attentions: int
    attentions: int


def foreign_step_of(path: Path, engines: dict[str, Passport], root: Path) -> ForeignStep:
    """Builds the graph as the first of our engines was built and reads its kernels. The engine is not kept.

    By TensorRT-RTX, which needs no GPU for it and whose engines can be read.
    """
    ours = next((passport for passport in engines.values() if passport.flavour == FLAVOUR), None)
    if ours is None:
        command = f"seq2engine build {shlex.quote(str(root))} --flavour {FLAVOUR}"
        raise BuildError(f"{root} has no engine of {FLAVOUR} to compare {path} with; build one with: {command}")
    try:
        model = graph_from_file(path)
    except GraphError as error:
        reason = str(error).removesuffix("; export the checkpoint again")
        raise BuildError(f"{reason}; give the decoder of another exporter as .onnx") from error
    shapes = shapes_from_symbols(model, path, ours.ranges)
    engine = build_engine(load_tensorrt(FLAVOUR), model, path, shapes, ours.targets, lambda fraction: None)
    kernels = kernels_from_engine(engine)
    attentions = sum(node.op_type in ("Softmax", "Attention") for node in model.graph.node)
    return ForeignStep(str(path), kernels.launches, kernels.fused_attentions, attentions)


def shapes_from_symbols(model: onnx.ModelProto, path: Path, ranges: ShapeRanges) -> Shapes:
    """The min, opt and max shape of every input, its named axes within our ranges. Others fold beams into the batch."""
    weights = {weight.name for weight in model.graph.initializer}
    shapes: Shapes = {}
    for value in model.graph.input:
        if value.name in weights:  # old exporters list weights as inputs with a default
            continue
        dims = value.type.tensor_type.shape.dim
        if not all(dim.dim_param or dim.HasField("dim_value") for dim in dims):
            raise BuildError(
                f"input {value.name} of {path} has an axis without a size and without a name, expected one of them; "
                "export it with named dynamic axes"
            )
        least, usual, most = (
            tuple(size_of(dim.dim_param, ranges, kind) if dim.dim_param else dim.dim_value for dim in dims)
            for kind in KINDS
        )
        shapes[value.name] = (least, usual, most)
    return shapes


def size_of(axis: str, ranges: ShapeRanges, kind: str) -> int:
    """How long a named axis is at min, opt or max."""
    meaning = next((meaning for part, meaning in AXES if part in axis), "token")
    batch, beam = getattr(ranges.batch, kind), getattr(ranges.beam, kind)
    sizes = {
        "rows": batch * beam,
        "past": max(1, getattr(ranges.target, kind) - 1),
        "source": getattr(ranges.source, kind),
        "token": 1,
    }
    return sizes[meaning]
