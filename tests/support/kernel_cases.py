"""Models whose graphs get fused operators: the options that change the graphs, and the graphs of one case."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx

from seq2engine.export.ort_forms.attention_outputs import attention_graph
from seq2engine.export.ort_forms.cross_rows import cross_rows
from seq2engine.export.ort_forms.transposed_keys import KEYS, TRANSPOSED, transposed_keys
from seq2engine.export.precision.quantise import quantised_graph
from seq2engine.export.precision.smoothing import graph_with_factors, smoothed_inputs
from seq2engine.model.config import ModelConfig
from support.all_pairs import Case

SMALL = ModelConfig(1, 2, 2, 16, 24, 40, 40, max_source=12, max_target=12)
FACTORS = {
    "norm": ("post", "pre"),
    "norm_kind": ("layer", "rms"),
    "positions": ("sinusoidal", "learned", "rotary", "relative"),
    "activation": ("relu", "gelu", "silu", "gelu_tanh"),
    "gated": ("plain", "gated"),
    "output": ("tied", "tied with bias", "own", "own with bias"),
    "biases": ("biases", "no biases"),
    "embedding": ("scaled embedding", "embedding", "normalised embedding"),
    "scale": ("scaled", "not scaled"),
    "precision": ("fp32", "w8a8", "smoothed w8a8"),
    "cache": ("static", "growing"),
    "keys": ("plain", "transposed", "rows"),
    "weights": ("hidden", "shown"),
    "beams": ("1", "3"),
}


def config_of(case: Case, base: ModelConfig = SMALL) -> ModelConfig:
    named = {name: case[name] for name in ("norm", "norm_kind", "positions", "activation")}
    return dataclasses.replace(
        base,
        gated=case["gated"] == "gated",
        tie_output=case["output"].startswith("tied"),
        output_bias=case["output"].endswith("bias"),
        biases=case["biases"] == "biases",
        scale_attention=case["scale"] == "scaled",
        scale_output=case["scale"] != "scaled",
        scale_embeddings=case["embedding"].startswith("scaled"),
        embedding_norm=case["embedding"].startswith("normalised"),
        **named,
    )


def in_precision(graph: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    if precision == "fp32":
        return graph
    if precision.startswith("smoothed"):
        rng = np.random.default_rng(0)
        widths = {weight.name: weight.dims[0] for weight in graph.graph.initializer if weight.dims}
        chosen = {
            name: np.exp2(rng.integers(-2, 3, widths[name])).astype(np.float32) for name in smoothed_inputs(graph)
        }
        graph = graph_with_factors(graph, chosen)
    return quantised_graph(graph, "w8a8")


def in_form(graph: onnx.ModelProto, case: Case) -> onnx.ModelProto:
    if case["keys"] == "transposed":
        graph = transposed_keys(graph)
    if graph.graph.name == "encoder":
        return graph
    if case["weights"] == "shown":
        graph = attention_graph(graph, SMALL.decoder_layers)
    return cross_rows(graph) if case["keys"] == "rows" else graph


def feeds_of_form(feeds: dict[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    """Inputs of the portable graph -> those of its form, in place."""
    if case["keys"] == "rows":
        feeds["source_mask"][:] = True
    if case["keys"] == "transposed":
        feeds |= {name: array.transpose(TRANSPOSED) for name, array in feeds.items() if name.startswith(KEYS)}
    return feeds


def is_all_ours(case: Case) -> bool:
    """Whether we have an operator for every node of the encoder, and of the step where its states are not scaled."""
    plain = case["gated"] == "plain" and case["activation"] != "gelu_tanh"
    return plain and case["positions"] in ("sinusoidal", "learned") and not case["embedding"].startswith("normalised")
