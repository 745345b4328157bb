"""The fused operators of the kernel library: their domain, their names, and a builder for a node of each.

An input that a node does without is "". All attributes are always written: the library has no defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import NodeProto, helper

from ..ort_forms.int8_matmul import SIGNED, Steps

DOMAIN = "seq2engine"
VERSION = 1
LINEAR, LINEAR_INT8 = "Linear", "LinearInt8"
SELF_ATTENTION, CROSS_ATTENTION, ENCODER_ATTENTION = "SelfAttention", "CrossAttention", "EncoderAttention"
CANDIDATES, CANDIDATES_INT8 = "Candidates", "CandidatesInt8"
EMBEDDING, EMBEDDING_INT8 = "Embedding", "EmbeddingInt8"
SOURCE_HEADS = "SourceHeads"
PROGRAMS = STEP_PROGRAM, ENCODER_PROGRAM = "StepProgram", "EncoderProgram"  # program.py
RELU, GELU, SILU = "relu", "gelu", "silu"  # values of the attribute `activation`; "" is none


def linear(
    name: str,
    output: str,
    *,
    x: str,
    weight: str,
    scale: str = "",
    bias: str = "",
    smoothing: str = "",
    residual: str = "",
    norm_weight: str = "",
    norm_bias: str = "",
    input_norm_weight: str = "",
    input_norm_bias: str = "",
    activation: str = "",
    epsilon: float = 0.0,
    rms: bool = False,
    input_epsilon: float = 0.0,
    input_rms: bool = False,
    steps: Steps = SIGNED,
    quantised: bool = False,
) -> NodeProto:
    """norm(residual + activation((input_norm(x) * smoothing) @ weight + bias)); int8 where there is a `scale` of the
    weight.

    `steps`: how rows of x are rounded in int8. `quantised`: a float weight is rounded to int8 by the library.
    """
    inputs = [x, weight, scale, bias, smoothing, residual, norm_weight, norm_bias, input_norm_weight, input_norm_bias]
    own: dict[str, Any] = steps_of(steps) if scale else {"quantised": int(quantised)}
    own |= {"epsilon": epsilon, "rms": int(rms), "input_epsilon": input_epsilon, "input_rms": int(input_rms)}
    return node(LINEAR_INT8 if scale else LINEAR, inputs, [output], name, activation=activation, **own)


def self_attention(
    name: str,
    outputs: Sequence[str],
    *,
    qkv: str,
    self_k: str,
    self_v: str,
    write_index: str,
    self_mask: str,
    heads: int,
    scale: float,
) -> NodeProto:
    """`outputs`: context [B,K,D], and the caches with K slots written."""
    return node(
        SELF_ATTENTION, [qkv, self_k, self_v, write_index, self_mask], outputs, name, heads=heads, scale=float(scale)
    )


def cross_attention(
    name: str,
    outputs: Sequence[str],
    *,
    q: str,
    k: str,
    v: str,
    source_mask: str = "",
    heads: int,
    scale: float,
    transposed: bool,
) -> NodeProto:
    """`outputs`: context [B,K,D], and the weights [B,H,K,S] where they are wanted. Without a mask there is no padding.

    `transposed`: keys are [B,H,E,S].
    """
    sizes = {"heads": heads, "scale": float(scale), "transposed": int(transposed)}
    return node(CROSS_ATTENTION, [q, k, v, source_mask], outputs, name, **sizes)


def encoder_attention(
    name: str, output: str, *, qkv: str, source_mask: str = "", heads: int, scale: float
) -> NodeProto:
    """softmax(scale * q k^T) v of every head: [B,S,3D] -> [B,S,D]. Without a mask there is no padding."""
    return node(ENCODER_ATTENTION, [qkv, source_mask], [output], name, heads=heads, scale=float(scale))


def candidates(
    name: str,
    outputs: Sequence[str],
    *,
    x: str,
    table: str,
    scale: str = "",
    bias: str = "",
    wanted: str,
    smoothing: str = "",
    by_rows: bool,
    screened: bool,
    words: bool = False,
    steps: Steps = SIGNED,
) -> NodeProto:
    """`outputs`: logits, exp_sum, best_logits and best_tokens; int8 where there is a `scale` of the table.

    `by_rows`: the table is [V,D], else [D,V]. `screened`: a float table has an int8 copy that finds the best tokens.
    `words`: it has one in 16 bits where sums are asked for as well.
    """
    inputs = [x, table, scale, bias, wanted, smoothing]
    own: dict[str, Any] = steps_of(steps) if scale else {"screened": int(screened), "words": int(words)}
    return node(CANDIDATES_INT8 if scale else CANDIDATES, inputs, outputs, name, by_rows=int(by_rows), **own)


def embedding(
    name: str,
    output: str,
    *,
    tokens: str,
    table: str,
    scale: str = "",
    positions: str = "",
    place: str = "",
    factor: float = 1.0,
) -> NodeProto:
    """table[tokens] * factor + positions[place]; int8 where there is a `scale` of the table's rows.

    `place` are the rows of `positions` for tokens [B,Q]: [B or 1, Q or 1], or [B]; "": the tokens' columns.
    """
    inputs = [tokens, table, scale, positions, place]
    return node(EMBEDDING_INT8 if scale else EMBEDDING, inputs, [output], name, factor=float(factor))


def source_heads(name: str, outputs: Sequence[str], *, kv: str, heads: int, transposed: bool) -> NodeProto:
    """`outputs`: keys and values [B,H,S,E] of kv [B,S,2HE]. `transposed`: keys are [B,H,E,S]."""
    return node(SOURCE_HEADS, [kv], outputs, name, heads=heads, transposed=int(transposed))


def steps_of(steps: Steps) -> dict[str, Any]:
    return {"above": steps.above, "zero": steps.zero, "least": float(steps.least)}


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any) -> NodeProto:
    """A node of our domain; absent inputs at its end are left out."""
    given = list(inputs)
    while given and not given[-1]:
        given.pop()
    return helper.make_node(kind, given, list(outputs), name=name, domain=DOMAIN, **attributes)
