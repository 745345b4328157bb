"""How many kernels an engine may launch per call: the table that engines are held to.

The numbers are what TensorRT-RTX 1.7.1 makes of the `base` model for sm86, read from the engines, which tests build
again: so many launches around the layers and so many in each. A decoder layer with one beam is

    qkv and part of q, attention, out and part of q, norm and q | attention, out, norm | up, down, norm

and around the layers are the embedding, the output product and in fp16 its cast; a static cache adds the wider mask and
the write of all layers. Beams in fp16 lay out keys, values and queries first; in fp32 they change places with heads.
bf16 is as fp16. Where weights are restored (int8, int4, fp8) the query is not folded, and a product that restores its
weight takes no bias and ReLU along: two more a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from seq2engine.model.config import PRESETS, ModelConfig

from ..trt_forms.fold_query import WIDEST

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
    fused: bool  # every attention is one kernel

    def launches(self, config: ModelConfig) -> int:
        if self.graph == "encoder":  # which also projects the source once for each decoder layer
            return self.around + self.per_layer * config.encoder_layers + config.decoder_layers
        return self.around + self.per_layer * config.decoder_layers


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
BUDGETS = tuple(
    LaunchBudget(graph, precision, cache_form, beams, around, per_layer, fused)
    for graph, precisions, cache_form, beams, around, per_layer, fused in TABLE
    for precision in precisions
)


def budget_for(config: ModelConfig, graph: str, precision: str, cache_form: str, beams: bool) -> LaunchBudget | None:
    """The row of an engine of this model; None where the table has no row for such models."""
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
