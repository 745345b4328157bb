"""How many kernels an engine may launch per call: the table of launch budgets.

The numbers are those of TensorRT-RTX 1.7.1 for the `base` model on sm86, read from the engines, which tests build
again: a number of launches around the layers, and one in each. A decoder layer with one beam is

    qkv and part of q, attention, out and part of q, norm and q | attention, out, norm | up, down, norm

and around the layers are the embedding, the output product and in fp16 its cast; a static cache adds the wider mask and
the write of all layers. Beams in fp16 lay out keys, values and queries first; in fp32 they change places with heads.
bf16 is as fp16. Where weights are restored (int8, int4, fp8) the query is not folded, and a product that restores its
weight takes no bias and ReLU along: two more a layer.

A T5 (pre-norm, RMS norms, relative positions, no biases) has products that no query can be folded into and a bias and a
mask that are made once a step; a gated feed-forward is one more launch a layer. Models that take audio (Whisper) are
pre-norm and have rows of their own. Their query is not folded, and beams are grouped queries in every precision,
because keys and values of 1,500 positions are not to be copied in every step; where a model is too wide for rows of
beams (trt_forms/beam_rows.py), that is two launches more a layer. Models that take images (TrOCR) have a post-norm
decoder with a step as that of `base`, but beams as for audio: with rows the query is not folded, so that a wide model,
where it is, has one launch more a layer. Their encoder is pre-norm, with a convolution and class tokens before it.

The tiny graphs beside a step (export/device_graphs/) take as many whatever the model. A TopK and a sum are two each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

from ..trt_forms import beam_rows
from ..trt_forms.fold_query import WIDEST

# Config fields that change the kernels of a layer or around the layers. Sizes and vocabularies do not.
ALIKE = (
    "norm",
    "norm_kind",
    "activation",
    "gated",
    "biases",
    "scale_attention",
    "scale_embeddings",
    "output_bias",
    "embedding_norm",
    "final_norm",
)
T5: dict[str, Any] = {
    "norm": "pre",
    "norm_kind": "rms",
    "biases": False,
    "scale_attention": False,
    "scale_embeddings": False,
}


@dataclass(frozen=True)
class LaunchBudget:
    """Launches of one engine. `cache_form` is empty for the encoder, which has no cache and no beams.

    `gated` are launches that each layer has more where the feed-forward is gated, `wide` where the model is too wide
    for beams as rows.
    """

    graph: str
    precision: str
    cache_form: str
    beams: bool  # more than one
    around: int
    per_layer: int
    fused: bool  # every attention is one kernel
    gated: int = 0
    wide: int = 0

    def launches(self, config: ModelConfig) -> int:
        per_layer = self.per_layer + (self.gated if config.gated else 0)
        per_layer += self.wide if config.d_model > beam_rows.WIDEST else 0
        if self.graph == "encoder":  # which also projects the source once for each decoder layer
            return self.around + per_layer * config.encoder_layers + config.decoder_layers
        return self.around + per_layer * config.decoder_layers


Rows = tuple[LaunchBudget, ...]
HALVES, RESTORED = ("fp16", "bf16"), ("int8", "int4", "fp8")
# graph, precisions, cache form, beams, launches around the layers, in each, whether every attention is one kernel
TABLE = (
    ("decoder_step", HALVES, "static", False, 5, 10, True),
    ("decoder_step", ("fp32",), "static", False, 4, 10, True),
    ("decoder_step", RESTORED, "static", False, 5, 12, True),
    ("decoder_step", HALVES, "growing", False, 3, 10, True),
    ("decoder_step", ("fp32",), "growing", False, 2, 10, True),
    ("decoder_step", RESTORED, "growing", False, 3, 12, True),
    ("decoder_step", HALVES, "static", True, 6, 12, True),
    ("decoder_step", ("fp32",), "static", True, 3, 14, True),
    ("decoder_step", RESTORED, "static", True, 6, 14, True),
    ("decoder_step", HALVES, "growing", True, 4, 12, True),
    ("decoder_step", ("fp32",), "growing", True, 3, 14, True),
    ("decoder_step", RESTORED, "growing", True, 4, 14, True),
    ("encoder", HALVES, "", False, 3, 8, True),
    ("encoder", ("fp32",), "", False, 2, 15, False),
    ("encoder", RESTORED, "", False, 2, 10, True),
)
DEVICE_LAUNCHES = {
    "candidates": 4,
    "gather_slots": 1,
    "next_greedy": 6,
    "next_greedy_unscored": 4,
    "tree_mask": 1,
}
# Cache form -> what becomes of the logits (Passport.reductions) -> the engines that run for each token, in their order.
TOKENS = {
    "static": {
        "next_greedy": ("decoder_step", "next_greedy"),
        "candidates": ("tree_mask", "decoder_step", "candidates"),
        "logits": ("tree_mask", "decoder_step"),
    },
    "growing": {"candidates": ("decoder_step", "candidates"), "logits": ("decoder_step",)},
}
AUDIO_TABLE = (
    ("decoder_step", HALVES, "static", False, 5, 11, True),
    ("decoder_step", ("fp32",), "static", False, 4, 11, True),
    ("decoder_step", HALVES, "static", True, 4, 13, True),
    ("decoder_step", ("fp32",), "static", True, 3, 13, True),
    ("encoder", HALVES, "", False, 4, 8, True),
    ("encoder", ("fp32",), "", False, 3, 12, False),
)

IMAGE_TABLE = (
    ("decoder_step", HALVES, "static", False, 5, 10, True),
    ("decoder_step", ("fp32",), "static", False, 4, 10, True),
    ("decoder_step", HALVES, "static", True, 4, 13, True),
    ("decoder_step", ("fp32",), "static", True, 3, 13, True),
    ("encoder", HALVES, "", False, 4, 8, True),
    ("encoder", ("fp32",), "", False, 3, 15, False),
)

T5_TABLE = (
    ("decoder_step", HALVES, "static", False, 5, 11, True),
    ("decoder_step", ("fp32",), "static", False, 4, 11, True),
    ("decoder_step", HALVES, "growing", False, 4, 11, True),
    ("decoder_step", ("fp32",), "growing", False, 3, 11, True),
    ("decoder_step", HALVES, "static", True, 7, 12, True),
    ("decoder_step", ("fp32",), "static", True, 3, 16, True),
    ("decoder_step", HALVES, "growing", True, 5, 12, True),
    ("decoder_step", ("fp32",), "growing", True, 3, 15, True),
    ("encoder", HALVES, "", False, 4, 8, True),
    ("encoder", ("fp32",), "", False, 3, 14, False),
)


def rows_of(
    table: Iterable[tuple[str, tuple[str, ...], str, bool, int, int, bool]], gated: int = 0, wide: int = 0
) -> Rows:
    return tuple(
        LaunchBudget(graph, precision, cache_form, beams, around, per_layer, fused, gated, wide if beams else 0)
        for graph, precisions, cache_form, beams, around, per_layer, fused in table
        for precision in precisions
    )


BUDGETS, T5_BUDGETS = rows_of(TABLE), rows_of(T5_TABLE, gated=1)
AUDIO_BUDGETS, IMAGE_BUDGETS = rows_of(AUDIO_TABLE, wide=2), rows_of(IMAGE_TABLE, wide=1)


def budget_for(config: ModelConfig, graph: str, precision: str, cache_form: str, beams: bool) -> LaunchBudget | None:
    """The row of an engine of this model; None where the table has no row for such models."""
    alike, rows = PRESETS["base"], BUDGETS
    if config.relative:
        alike, rows = dataclasses.replace(alike, **T5), T5_BUDGETS
        if (config.activation, config.gated) in (("relu", False), ("gelu_tanh", True)):
            alike = dataclasses.replace(alike, activation=config.activation, gated=config.gated)
    elif config.takes_audio:
        if config.heads < 4:  # other kernels; no Whisper has so few
            return None
        alike, rows = dataclasses.replace(alike, norm="pre", activation="gelu", scale_embeddings=False), AUDIO_BUDGETS
    elif config.takes_images:
        if config.heads < 4 or config.encoder_norm != "pre" or config.project_states:
            return None
        alike, rows = alike_of_images(config), IMAGE_BUDGETS
    if any(getattr(config, name) != getattr(alike, name) for name in ALIKE) or config.positions == "rotary":
        return None
    folded = not config.takes_audio  # for audio, the rows of the table have `wide` launches
    wide = folded and (config.d_model > WIDEST or config.attention_width > WIDEST)
    if wide or config.head_dim % 8 or config.head_dim < 16:  # other kernels
        return None
    key = (graph, precision, "" if graph == "encoder" else cache_form, graph != "encoder" and beams)
    return next((row for row in rows if (row.graph, row.precision, row.cache_form, row.beams) == key), None)


def alike_of_images(config: ModelConfig) -> ModelConfig:
    """What such a model is compared with: its decoder may have any of these, which change no kernel."""
    own = {name: getattr(config, name) for name in ("scale_embeddings", "embedding_norm")}
    activation = config.activation if config.activation in ("relu", "gelu") else "relu"
    return dataclasses.replace(PRESETS["base"], activation=activation, **own)


def launches_allowed(config: ModelConfig, graph: str, precision: str, cache_form: str, beams: bool) -> int | None:
    """The launch budget of an engine of this model, if it has one."""
    if graph in DEVICE_LAUNCHES:
        return DEVICE_LAUNCHES[graph]
    row = budget_for(config, graph, precision, cache_form, beams)
    return None if row is None else row.launches(config)


def launches_of_token(config: ModelConfig, reduction: str, precision: str, cache_form: str, beams: bool) -> int | None:
    """The same for all engines that run for a token, by what becomes of its logits."""
    engines = TOKENS[cache_form][reduction]
    allowed = [launches_allowed(config, engine, precision, cache_form, beams) for engine in engines]
    return None if None in allowed else sum(number for number in allowed if number is not None)
