"""The graph contract: what goes into and comes out of the two graphs, declared once.

Shape alphabet: B sources, K beams, S source length, L cache slots, M slots attended to (L in the static cache, L+K in
the growing one), H heads, E head dim, D model, V vocab, F frames of audio features (2S). Axes named by a letter are
dynamic; numbers are fixed, as are all sizes of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from seq2engine.errors import ConfigError
from seq2engine.model.config import ModelConfig

OPSET = {"static": 24, "growing": 20}  # the lowest that has the cache's ops: TensorScatter is in 24
RMS_OPSET = 23  # the first with RMSNormalization
# Precision -> the type its graphs compute in, which is that of the caches, and the type its products' weights have.
PRECISIONS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "float16",
    "int4": "float16",
    "fp8": "float16",
    "w8a8": "float32",
}
HALF = ("float16", "bfloat16")  # types that a model is not exported in before calibration
DEFAULT_PRECISIONS = ("fp32", "fp16")  # what an export writes
STORED = {**PRECISIONS, "int8": "int8", "w8a8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}
# Type of embeddings and output projection, often one table, which decides between tokens: at least int8.
VOCABULARY = {**STORED, "int4": "int8"}
QUANTISED = tuple(name for name, stored in STORED.items() if stored != PRECISIONS[name])
FOR_CPUS = ("w8a8",)  # no engines are built of these
CACHE_FORMS = tuple(OPSET)
GRAPHS = ("encoder", "decoder_step")
# Cache form -> device graphs without weights that engines have in addition (export/device_graphs/).
DEVICE_GRAPHS = {
    "static": ("candidates", "gather_slots", "next_greedy", "next_greedy_unscored", "tree_mask"),
    "growing": ("candidates", "gather_slots"),
}


class Census(TypedDict):
    """What a graph is made of, by type (precision/census.py)."""

    nodes: int
    weight_bytes: dict[str, int]
    tensors: dict[str, int]
    products: dict[str, int]
    product_weights: dict[str, int]
    attentions: int


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. `dtype` is a numpy name; `axes` are letters (dynamic) and numbers (fixed)."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The concrete shape for given sizes of the dynamic axes."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(map(str, self.axes))}]"


@dataclass(frozen=True)
class GraphSpec:
    """One graph: its inputs and outputs in order. They are bound by name, never by position.

    `fixed` are letters whose axes have one size in every call of this graph: all images have as many positions.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fixed: tuple[tuple[str, int], ...] = ()

    def input(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.inputs if tensor.name == name)

    def output(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.outputs if tensor.name == name)


def attention_name(layer: int) -> str:
    """The name of the output with one layer's cross-attention weights, in sessions that have it."""
    return f"cross_attention.{layer}"


def graph_specs(config: ModelConfig, precision: str = "fp32", cache_form: str = "static") -> dict[str, GraphSpec]:
    """Both graphs of a model, by name."""
    check_choices(precision, cache_form)
    real = PRECISIONS[precision]
    heads, head_dim = config.heads, config.head_dim
    cross = layer_tensors(config, "cross", real, ("B", heads, "S", head_dim))
    cache = layer_tensors(config, "self", real, ("B", heads, "L", head_dim))
    attended = "L" if cache_form == "static" else "M"
    updated = layer_tensors(config, "new_self", real, ("B", heads, attended, head_dim))
    source = TensorSpec("source_ids", "int64", ("B", "S"))
    if config.takes_audio:
        source = TensorSpec("features", "float32", ("B", config.mels, "F"))
    elif config.takes_images:
        source = TensorSpec("features", "float32", ("B", *config.features_shape))
    source_mask = TensorSpec("source_mask", "bool", ("B", "S"))
    encoder = GraphSpec(
        "encoder",
        inputs=(source, source_mask),
        outputs=(*cross, TensorSpec("encoder_states", real, ("B", "S", config.state_width))),
        fixed=(("S", config.max_source),) if config.takes_images else (),
    )
    decoder_step = GraphSpec(
        "decoder_step",
        inputs=(
            TensorSpec("tokens", "int64", ("B", "K")),
            TensorSpec("position", "int64", ("B",)),
            # The growing cache appends, so it needs no write index.
            *([TensorSpec("write_index", "int64", ("B",))] if cache_form == "static" else []),
            TensorSpec("self_mask", "bool", ("B", "K", attended)),
            # The position of the token in every slot, the new ones included: distances are relative positions.
            *([TensorSpec("slot_position", "int64", ("B", attended))] if config.relative else []),
            source_mask,
            *cross,
            *cache,
        ),
        outputs=(TensorSpec("logits", "float32", ("B", "K", config.target_vocab)), *updated),
    )
    return {"encoder": encoder, "decoder_step": decoder_step}


def opset_for(config: ModelConfig, cache_form: str) -> int:
    """The opset of a model's graphs: the lowest that has all their ops."""
    return max(OPSET[cache_form], RMS_OPSET) if config.norm_kind == "rms" else OPSET[cache_form]


def layer_tensors(config: ModelConfig, prefix: str, dtype: str, axes: tuple[str | int, ...]) -> list[TensorSpec]:
    """Keys and values of every decoder layer: prefix_k.0, prefix_v.0, prefix_k.1, ..."""
    return [TensorSpec(f"{prefix}_{part}.{i}", dtype, axes) for i in range(config.decoder_layers) for part in "kv"]


def oracle_of(precision: str) -> str:
    """What the oracle of a precision computes in: fp64, over that precision's own weights where they were quantised."""
    return f"fp64:{precision}" if precision in QUANTISED else "fp64"


def check_choices(precision: str, cache_form: str) -> None:
    problems = []
    if precision not in PRECISIONS:
        problems.append(f"precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if cache_form not in CACHE_FORMS:
        problems.append(f"cache form {cache_form!r}, expected one of {', '.join(CACHE_FORMS)}")
    if problems:
        raise ConfigError("unknown " + "; unknown ".join(problems))
