"""fp32 fallback nodes: those that stay in fp32 when the rest of a graph becomes fp16, chosen by calibration.

Calibration (runtime/ort/calibration.py) records magnitudes in real decode steps: random inputs understate them.
A tensor that fp16 cannot hold, with a margin, stays in fp32, and with it every node that reads or makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from seq2engine.errors import ExportError

from ..graph_index import find_attentions
from .census import types_of
from .smoothing import NORMS

LARGEST, SMALLEST = 65504.0, 2.0**-14  # largest and smallest normal number of fp16
MARGIN = 4.0  # safety margin for texts that were not decoded


@dataclass(frozen=True)
class Calibration:
    """The largest magnitude every float tensor had in real decodes: graph -> tensor -> magnitude.

    `channels` has those of each channel [D] of the tensors that smoothing may change (smoothing.py).
    """

    corpus: str
    sources: int
    steps: int
    largest: dict[str, dict[str, float]]
    channels: dict[str, dict[str, np.ndarray]]


def fp32_nodes_of(model: onnx.ModelProto, largest: Mapping[str, float]) -> dict[str, str]:
    """Node -> why it stays in fp32. Without magnitudes only weights are checked."""
    wide = wide_tensors(model, largest)
    held = {value.name for value in (*model.graph.input, *model.graph.output) if value.name != "logits"}
    if lost := sorted(held & wide.keys()):
        raise ExportError(
            f"fp16 cannot hold {lost[0]} ({wide[lost[0]]}), which passes between the graphs; "
            "export with --precision bf16 or fp32"
        )
    found: dict[str, str] = {}
    for node in model.graph.node:
        reasons = [wide[name] for name in (*node.input, *node.output) if name in wide]
        if node.op_type in NORMS and largest.get(node.input[0], 0.0) ** 2 > LARGEST / MARGIN:
            reasons.append(f"the squares of {node.input[0]} reach {largest[node.input[0]] ** 2:.2g}")
        if reasons:
            found[node.name] = reasons[0]
    for attention in find_attentions(model):  # one kernel in TensorRT: entirely in fp32 or not at all
        names = [model.graph.node[place].name for place in attention.nodes]
        reasons = [found[name] for name in names if name in found]
        found.update(dict.fromkeys(names, reasons[0]) if reasons else {})
    return {node.name: found[node.name] for node in model.graph.node if node.name in found}


def wide_tensors(model: onnx.ModelProto, largest: Mapping[str, float]) -> dict[str, str]:
    """Float tensors that fp16 cannot hold -> why. Weights are known, so they need no margin at the upper end."""
    wide: dict[str, str] = {}
    floats = {name for name, kind in types_of(model).items() if kind == TensorProto.FLOAT}
    for weight in model.graph.initializer:
        if weight.name in floats:
            magnitude = float(np.abs(numpy_helper.to_array(weight)).max(initial=0.0))
            note_range(wide, weight.name, magnitude, LARGEST)
    for node in model.graph.node:
        for name in node.output:
            if node.op_type in ("Where", "Transpose"):  # the value of a masked score is representable in fp16
                source = node.input[1 if node.op_type == "Where" else 0]
                wide.update({name: wide[source]} if source in wide else {})
            else:
                note_range(wide, name, largest.get(name, 0.0), LARGEST / MARGIN)
    return wide


def note_range(wide: dict[str, str], name: str, magnitude: float, limit: float) -> None:
    if not magnitude <= limit:  # not a number is too large as well
        wide[name] = f"{name} reaches {magnitude:.2g}"
    elif 0.0 < magnitude < SMALLEST * MARGIN:
        wide[name] = f"{name} reaches only {magnitude:.2g}"
