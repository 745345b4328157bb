"""How many kernels an engine may launch per call: the table that engines are held to.

The numbers are what TensorRT-RTX 1.7.1 makes of the `base` model for sm86, read from the engines, which tests build
again: so many launches around the layers and so many in each. A decoder layer with one beam is

    qkv and part of q, attention, out and part of q, norm and q | attention, out, norm | up, down, norm

and around the layers are the embedding, the output product and in fp16 its cast; a static cache adds the wider mask and
the write of all layers. Beams in fp16 lay out keys, values and queries first; in fp32 they change places with heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.config import PRESETS, ModelConfig
from .trt_fold import WIDEST

# What changes the kernels of a layer, or those around them. Sizes and vocabularies do not.
ALIKE = ("norm", "activation", "scale_embeddings", "output_bias", "embedding_norm", "final_norm")


@dataclass(frozen=True)
class LaunchBudget:
    """Launches of one engine. `cache_form` is empty for the encoder, which has no cache and no beams."""

    graph: str
    precision: str
    cache_form: str
    beams: bool  # more than one
    around: int
    per_layer: int
    fused: bool = True  # every attention is one kernel

    def launches(self, config: ModelConfig) -> int:
        if self.graph == "encoder":  # which also projects the source once for each decoder layer
            return self.around + self.per_layer * config.encoder_layers + config.decoder_layers
        return self.around + self.per_layer * config.decoder_layers


BUDGETS = (
    LaunchBudget("decoder_step", "fp16", "static", beams=False, around=5, per_layer=10),
    LaunchBudget("decoder_step", "fp32", "static", beams=False, around=4, per_layer=10),
    LaunchBudget("decoder_step", "fp16", "growing", beams=False, around=3, per_layer=10),
    LaunchBudget("decoder_step", "fp32", "growing", beams=False, around=2, per_layer=10),
    LaunchBudget("decoder_step", "fp16", "static", beams=True, around=6, per_layer=12),
    LaunchBudget("decoder_step", "fp32", "static", beams=True, around=3, per_layer=14),
    LaunchBudget("decoder_step", "fp16", "growing", beams=True, around=4, per_layer=12),
    LaunchBudget("decoder_step", "fp32", "growing", beams=True, around=3, per_layer=14),
    # Weight-only; what was promised, until it is built.
    LaunchBudget("decoder_step", "int8", "static", beams=False, around=8, per_layer=12),
    LaunchBudget("encoder", "fp16", "", beams=False, around=3, per_layer=8),
    LaunchBudget("encoder", "fp32", "", beams=False, around=2, per_layer=15, fused=False),
)


def budget_for(config: ModelConfig, graph: str, precision: str, cache_form: str, beams: bool) -> LaunchBudget | None:
    """The row of an engine of this model; none where the table says nothing about models of its kind."""
    base = PRESETS["base"]
    if any(getattr(config, name) != getattr(base, name) for name in ALIKE) or config.positions == "rotary":
        return None
    if config.d_model > WIDEST or config.head_dim % 8 or config.head_dim < 16:  # other kernels
        return None
    key = (graph, precision, "" if graph == "encoder" else cache_form, graph != "encoder" and beams)
    return next((row for row in BUDGETS if (row.graph, row.precision, row.cache_form, row.beams) == key), None)


def launches_allowed(config: ModelConfig, graph: str, precision: str, cache_form: str, beams: bool) -> int | None:
    """The number of launches that an engine of this model is held to, if any."""
    row = budget_for(config, graph, precision, cache_form, beams)
    return None if row is None else row.launches(config)
