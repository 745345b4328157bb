"""Defects in what a graph stores, or that no sample need show: each with where it is and the name of its cause."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from support.mutations import LEARNED, ROTARY, Mutation, instead, node, put, values_of

Edit = Callable[[onnx.GraphProto], None]


def table_of(graph: onnx.GraphProto, ids: str) -> str:
    """The table that these ids are looked up in."""
    (found,) = [n.input[0] for n in graph.node if n.op_type == "Gather" and ids in n.input]
    return found


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """One stored tensor, changed. Weights of products are stored [in, out]."""
    return lambda graph: put(graph, name, change(values_of(graph, name)))


def with_rows(places: list[int], change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def edit(values: np.ndarray) -> np.ndarray:
        values[places] = change(values[places])
        return values

    return edit


def with_columns(places: list[int], change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def edit(values: np.ndarray) -> np.ndarray:
        values[:, places] = change(values[:, places])
        return values

    return edit


def rare_row_negated(graph: onnx.GraphProto) -> None:
    """One token's row of the embedding: no sample need hold the token."""
    name = table_of(graph, "source_ids")
    put(graph, name, with_rows([57], np.negative)(values_of(graph, name)))


def output_rows_swapped(graph: onnx.GraphProto) -> None:
    name = table_of(graph, "tokens")
    put(graph, name, with_rows([40, 41], lambda rows: rows[::-1])(values_of(graph, name)))


def cross_swapped(graph: onnx.GraphProto) -> None:
    """Cross-attention of one layer reads keys as values, and values as keys: ONNX Runtime's form cannot run it."""
    swapped = {"cross_k.1": "cross_v.1", "cross_v.1": "cross_k.1"}
    for n in graph.node:
        if n.name.startswith("decoder.1.cross_attn"):
            n.input[:] = [swapped.get(name, name) for name in n.input]


def halves_swapped(values: np.ndarray) -> np.ndarray:
    first, second = np.split(values, 2, axis=-1)
    return np.concatenate((second, first), axis=-1)


def shifted_from(first: int) -> Callable[[np.ndarray], np.ndarray]:
    """From one position on, each has the row of the one before."""

    def change(values: np.ndarray) -> np.ndarray:
        values[first:] = values[first - 1 : -1].copy()
        return values

    return change


def to_six_bits(values: np.ndarray) -> np.ndarray:
    step = np.abs(values).max() / 31
    return (np.rint(values / step) * step).astype(values.dtype)


def to_mantissa_of(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    mask = np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)
    return lambda values: (values.view(np.uint32) & mask).view(np.float32)


def heads_rotated(values: np.ndarray) -> np.ndarray:
    """Of an output projection [in, out] of 4 heads."""
    return np.roll(values.reshape(4, -1, values.shape[1]), 1, axis=0).reshape(values.shape)


def two_weights_swapped(graph: onnx.GraphProto) -> None:
    names = "encoder.0.feed_forward.up.weight", "encoder.1.feed_forward.up.weight"
    first, second = (values_of(graph, name) for name in names)
    put(graph, names[0], second)
    put(graph, names[1], first)


def of_another_step(values: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(size=values.shape) * values.std() * 0.1
    return (values + noise).astype(values.dtype)


def masked_less(graph: onnx.GraphProto) -> None:
    """A masked score that is not low enough to hide a slot."""
    name = node(graph, "encoder.0.self_attn/Where").input[2]
    put(graph, name, np.full_like(values_of(graph, name), -1.0))


def gate_of_residual(graph: onnx.GraphProto) -> None:
    """A layer that reads what came before the one below it."""
    instead(graph, "encoder.1/Add", "encoder.0/Add", "encoder.1.feed_forward")


KV, UP = "decoder.0.cross_attn.kv", "decoder.1.feed_forward.up.weight"
WEIGHT_MUTATIONS = {
    "one embedding row negated": Mutation("encoder", rare_row_negated, "target_embedding", ("sign",)),
    "cross keys and values swapped": Mutation("decoder_step", cross_swapped, "decoder.1", ("swapped tensors",)),
    "k|v halves swapped": Mutation("encoder", changed(f"{KV}.weight", halves_swapped), "decoder.0", ("permutation",)),
    "positions shifted from 9 on": Mutation(
        "encoder", changed("source_embedding.positions", shifted_from(9)), "source_embedding", ("shift",)
    ),
    "learned positions shifted from 5 on": Mutation(
        "decoder_step",
        changed("target_embedding.positions", shifted_from(5)),
        "target_embedding",
        ("shift",),
        config=LEARNED,
    ),
    "rotary angles shifted from 7 on": Mutation(
        "decoder_step", changed("rotary", shifted_from(7)), "rotary", ("shift",), config=ROTARY
    ),
    "a weight rounded to 6 bits": Mutation("decoder_step", changed(UP, to_six_bits), "decoder.1", ("precision",)),
    "a mantissa of 6 bits": Mutation("decoder_step", changed(UP, to_mantissa_of(6)), "decoder.1", ("precision",)),
    "two rows of the output table swapped": Mutation(
        "decoder_step", output_rows_swapped, "target_embedding", ("permutation",)
    ),
    "heads in another order": Mutation(
        "encoder", changed("encoder.0.self_attn.out.weight", heads_rotated), "encoder.0", ("head order",)
    ),
    "weights of two layers swapped": Mutation("encoder", two_weights_swapped, "encoder.0", ("swapped tensors",)),
    "a bias negated": Mutation(
        "decoder_step", changed("decoder.1.self_attn.qkv.bias", np.negative), "decoder.1", ("sign",)
    ),
    "a layer of another epoch": Mutation("decoder_step", changed(UP, of_another_step), "decoder.1", ("stale weights",)),
    "a weight a hundredth too large": Mutation(
        "encoder",
        changed("encoder.1.feed_forward.down.weight", lambda values: values * np.float32(1.01)),
        "encoder.1",
        ("wrong scale",),
    ),
    "a norm's gain zeroed": Mutation(
        "encoder", changed("encoder.1.self_residual.norm.weight", np.zeros_like), "encoder.1", ("weight",)
    ),
    "a channel's scale doubled": Mutation(
        "decoder_step", changed(f"{UP}.scale", with_rows([3], lambda rows: rows * 2)), "decoder.1", ("weight",), "int8"
    ),
    "a channel's integers negated": Mutation(
        "decoder_step", changed(f"{UP}.int8", with_columns([5], np.negative)), "decoder.1", ("sign",), "w8a8"
    ),
    "integers of two channels swapped": Mutation(
        "encoder",
        changed("encoder.0.self_attn.qkv.weight.int8", with_columns([2, 9], lambda columns: columns[:, ::-1])),
        "encoder.0",
        ("permutation",),
        "int8",
    ),
    "masked scores not low enough": Mutation("encoder", masked_less, "encoder.0", ("constant", "mask")),
}
