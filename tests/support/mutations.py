"""Defects to plant in exported graphs, each with the truth beside it: where it is, and the name of its cause.

An export is a pure function of the model, so a defect is an edit of the ONNX file of a good one. `wrong_copy` writes a
bundle that is wrong in its graphs only: the manifest agrees with the files, as after an export with that fault.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.export.artifact.bundle import MANIFEST, Bundle, open_bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig


@dataclass(frozen=True)
class Mutation:
    graph: str
    edit: Callable[[onnx.GraphProto], None]
    layer: str
    causes: tuple[str, ...]  # any of them is a right name for it
    precision: str = "fp32"
    config: tuple[tuple[str, object], ...] = ()  # what the model must have for the defect to be there
    outlier: float = 0.0  # of one channel of the decoder's residual stream, as trained models have some


def wrong_copy(bundle: Bundle, folder: Path, mutation: Mutation) -> Bundle:
    shutil.copytree(bundle.root, folder)
    entry = bundle.manifest.graphs[mutation.precision][mutation.graph]
    path, data = folder / entry.path, folder / entry.data_path
    model = onnx.load(path)
    mutation.edit(model.graph)
    data.unlink()  # saving would append to it
    onnx.save_model(model, path, save_as_external_data=True, location=data.name, size_threshold=1024)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["graphs"][mutation.precision][mutation.graph] |= {
        "sha256": sha256_of(path),
        "data_sha256": sha256_of(data),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return open_bundle(folder)


# --- finding and putting things ---------------------------------------------------------------------------------------


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    (found,) = [n for n in graph.node if n.name == name]
    return found


def maker(graph: onnx.GraphProto, tensor: str) -> onnx.NodeProto:
    (found,) = [n for n in graph.node if tensor in n.output]
    return found


def constant(graph: onnx.GraphProto, array: object, name: str) -> str:
    graph.initializer.append(numpy_helper.from_array(np.array(array), name))
    return name


def values_of(graph: onnx.GraphProto, name: str) -> np.ndarray:
    (found,) = [w for w in graph.initializer if w.name == name]
    return numpy_helper.to_array(found).copy()


def put(graph: onnx.GraphProto, name: str, values: np.ndarray) -> None:
    (found,) = [w for w in graph.initializer if w.name == name]
    found.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), name))


def before(graph: onnx.GraphProto, reader: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
    """Inserts nodes in front of the one that reads them."""
    place = [n.name for n in graph.node].index(reader.name)
    for made in reversed(nodes):
        graph.node.insert(place, made)


def instead(graph: onnx.GraphProto, old: str, new: str, readers: str = "") -> None:
    """All nodes whose name begins with `readers` read another tensor."""
    for n in graph.node:
        if n.name.startswith(readers) and new not in n.output:
            n.input[:] = [new if name == old else name for name in n.input]


# --- the defects ------------------------------------------------------------------------------------------------------


def drop_mask(where: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        node(graph, f"{where}/Where").input[0] = constant(graph, np.ones((1, 1, 1, 1), dtype=bool), "look")

    return edit


def leak_first_pad(graph: onnx.GraphProto) -> None:
    """One padded position after every source is attended to: mask[s] or mask[s-1]."""
    where = node(graph, "encoder.1.self_attn/Where")
    mask = where.input[0]
    one, zero, last = (constant(graph, [n], f"at{n}") for n in (1, 0, -1))
    axis = constant(graph, [3], "axis")
    shifted = helper.make_node("Slice", [mask, zero, last, axis], ["shift"], name="shift")
    first = helper.make_node("Slice", [mask, zero, one, axis], ["first"], name="first")
    moved = helper.make_node("Concat", ["first", "shift"], ["moved"], name="moved", axis=3)
    leaking = helper.make_node("Or", [mask, "moved"], ["leaking"], name="leaking")
    before(graph, where, shifted, first, moved, leaking)
    where.input[0] = "leaking"


def roll_beams(graph: onnx.GraphProto) -> None:
    """Beam k is given the ancestors of beam k - 1."""
    where = node(graph, "decoder.1.self_attn/Where")
    mask = where.input[0]
    first, last, far = constant(graph, [0], "b0"), constant(graph, [-1], "b-1"), constant(graph, [2**62], "far")
    axis = constant(graph, [2], "axis")
    tail = helper.make_node("Slice", [mask, last, far, axis], ["tail"], name="tail")
    head = helper.make_node("Slice", [mask, first, last, axis], ["head"], name="head")
    rolled = helper.make_node("Concat", ["tail", "head"], ["rolled"], name="rolled", axis=2)
    before(graph, where, tail, head, rolled)
    where.input[0] = "rolled"


def shift_position(by: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        reader = next(n for n in graph.node if "position" in n.input)
        zero, off = constant(graph, 0, "none"), constant(graph, by, "off")
        moved = helper.make_node("Add", ["position", off], ["moved"], name="moved")
        kept = helper.make_node("Max", ["moved", zero], ["kept"], name="kept")
        before(graph, reader, moved, kept)
        instead(graph, "position", "kept", reader.name)

    return edit


def one_position_for_all(graph: onnx.GraphProto) -> None:
    reader = next(n for n in graph.node if "position" in n.input)
    zero = constant(graph, 0, "row0")
    first = helper.make_node("Gather", ["position", zero], ["first"], name="first", axis=0)
    shape = helper.make_node("Shape", ["position"], ["rows"], name="rows")
    every = helper.make_node("Expand", ["first", "rows"], ["every"], name="every")
    before(graph, reader, first, shape, every)
    instead(graph, "position", "every", reader.name)


def stale_keys(graph: onnx.GraphProto) -> None:
    """Attention reads the cache as it was before this step's write."""
    node(graph, "decoder.0.self_attn/Transpose.1").input[0] = "self_k.0"


def write_one_later(graph: onnx.GraphProto) -> None:
    writer = maker(graph, "new_self_v.1")
    one = constant(graph, 1, "one")
    parts = [  # it stays inside the cache: the last K slots at most
        helper.make_node("Shape", ["self_v.1"], ["slots"], name="slots", start=2, end=3),
        helper.make_node("Shape", ["tokens"], ["beams"], name="beams", start=1, end=2),
        helper.make_node("Sub", ["slots", "beams"], ["last"], name="last"),
        helper.make_node("Add", ["write_index", one], ["later"], name="later"),
        helper.make_node("Min", ["later", "last"], ["cut"], name="cut"),
    ]
    before(graph, writer, *parts)
    writer.input[2] = "cut"


def swap_written(graph: onnx.GraphProto) -> None:
    k, v = maker(graph, "new_self_k.1"), maker(graph, "new_self_v.1")
    k.input[1], v.input[1] = v.input[1], k.input[1]


def swap_cross_layers(graph: onnx.GraphProto) -> None:
    """The values of the two layers' cross-attentions change places among the outputs."""
    for n in graph.node:
        swapped = {"cross_v.0": "cross_v.1", "cross_v.1": "cross_v.0"}
        n.output[:] = [swapped.get(name, name) for name in n.output]


def rescale(where: str, by: float) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        found = node(graph, where)
        own = values_of(graph, found.input[1])
        found.input[1] = constant(graph, np.full_like(own, by), "rescaled")

    return edit


def half_norm(where: str) -> Callable[[onnx.GraphProto], None]:
    """LayerNorm taken apart, with its squares in fp16, where they overflow.

    They are rounded by a pair of casts: ONNX Runtime on a CPU would compute a product in fp16 in fp32 after all.
    """

    def edit(graph: onnx.GraphProto) -> None:
        old = node(graph, where)
        x, scale, bias = old.input
        out = old.output[0]
        axes = constant(graph, [-1], "axes")
        epsilon = constant(graph, np.array(1e-5, dtype=np.float32), "epsilon")
        parts = [
            helper.make_node("ReduceMean", [x, axes], ["h/mean"], name="h/mean"),
            helper.make_node("Sub", [x, "h/mean"], ["h/centred"], name="h/centred"),
            helper.make_node("Mul", ["h/centred", "h/centred"], ["h/product"], name="h/product"),
            helper.make_node("Cast", ["h/product"], ["h/half"], name="h/half", to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["h/half"], ["h/squares"], name="h/squares", to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["h/squares", axes], ["h/variance"], name="h/variance"),
            helper.make_node("Add", ["h/variance", epsilon], ["h/safe"], name="h/safe"),
            helper.make_node("Sqrt", ["h/safe"], ["h/root"], name="h/root"),
            helper.make_node("Div", ["h/centred", "h/root"], ["h/unit"], name="h/unit"),
            helper.make_node("Mul", ["h/unit", scale], ["h/scaled"], name="h/scaled"),
            helper.make_node("Add", ["h/scaled", bias], [out], name=f"{where}/apart"),
        ]
        before(graph, old, *parts)
        graph.node.remove(old)

    return edit


def other_gelu(graph: onnx.GraphProto) -> None:
    (approximate,) = node(graph, "decoder.1.feed_forward.activation/Gelu").attribute
    approximate.s = b"tanh"


def silu_for_relu(graph: onnx.GraphProto) -> None:
    old = node(graph, "encoder.0.feed_forward.activation/Relu")
    gate = helper.make_node("Sigmoid", list(old.input), ["gate"], name="gate")
    before(graph, old, gate)
    old.op_type = "Mul"
    old.input.append("gate")


def transposed(name: str) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: put(graph, name, values_of(graph, name).T)


def one_bias_element(graph: onnx.GraphProto) -> None:
    name = "decoder.0.feed_forward.down.bias"
    values = values_of(graph, name)
    values[11] += 0.01
    put(graph, name, values)


def one_column(graph: onnx.GraphProto) -> None:
    name = "encoder.1.feed_forward.up.weight"
    values = values_of(graph, name)
    values[:, 5] *= 1.001
    put(graph, name, values)


def rounded_weights(graph: onnx.GraphProto) -> None:
    name = "decoder.1.cross_attn.q.weight"
    put(graph, name, values_of(graph, name).astype(np.float16).astype(np.float32))


def other_epsilon(graph: onnx.GraphProto) -> None:
    found = node(graph, "encoder.0.feed_residual.norm/LayerNormalization")
    (epsilon,) = [a for a in found.attribute if a.name == "epsilon"]
    epsilon.f = 1e-3


def softmax_over_queries(graph: onnx.GraphProto) -> None:
    (axis,) = node(graph, "encoder.0.self_attn/Softmax").attribute
    axis.i = -2


def heads_innermost(graph: onnx.GraphProto) -> None:
    """The width is cut as [E, H] and not as [H, E]: every head gets every H-th number."""
    shape, turn = node(graph, "decoder.0.cross_attn/Reshape"), node(graph, "decoder.0.cross_attn/Transpose")
    sizes = values_of(graph, shape.input[1])
    sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
    shape.input[1] = constant(graph, sizes, "sizes")
    (order,) = turn.attribute
    order.ints[:] = [0, 3, 1, 2]


def residual_of_before(graph: onnx.GraphProto) -> None:
    """The second branch is added to what came into the layer, not to what the first has made of it."""
    found = node(graph, "decoder.1/Add.1")
    found.input[0] = node(graph, "decoder.1/Add").input[0]


def no_residual(graph: onnx.GraphProto) -> None:
    found = node(graph, "encoder.1/Add")
    zero = constant(graph, np.zeros(1, dtype=np.float32), "zero")
    found.input[0] = zero


def no_final_norm(graph: onnx.GraphProto) -> None:
    norm = node(graph, "decoder_norm/LayerNormalization")
    instead(graph, norm.output[0], norm.input[0])
    graph.node.remove(norm)


def another_start(graph: onnx.GraphProto) -> None:
    """The first token is baked in, and it is another one."""
    reader = next(n for n in graph.node if "tokens" in n.input)
    zero, start = constant(graph, 0, "zero"), constant(graph, 9, "start")
    axis = constant(graph, [1], "axis1")
    parts = [
        helper.make_node("Equal", ["position", zero], ["begins"], name="begins"),
        helper.make_node("Unsqueeze", ["begins", axis], ["each"], name="each"),
        helper.make_node("Where", ["each", start, "tokens"], ["started"], name="started"),
    ]
    before(graph, reader, *parts)
    instead(graph, "tokens", "started", reader.name)


def rotated_by_the_position_before(graph: onnx.GraphProto) -> None:
    """Rotary keys of one layer are rotated by the angle of the position before."""
    zero, one = constant(graph, 0, "zero"), constant(graph, 1, "one")
    table = next(n for n in graph.node if n.op_type == "Gather" and n.input[0] == "rotary")
    ids = table.input[1]
    moved = helper.make_node("Sub", [ids, one], ["moved"], name="moved")
    kept = helper.make_node("Max", ["moved", zero], ["kept"], name="kept")
    before(graph, table, moved, kept)
    table.input[1] = "kept"


GELU, PRE, ROTARY = (("activation", "gelu"),), (("norm", "pre"),), (("positions", "rotary"),)
LEARNED = (("positions", "learned"),)

MUTATIONS = {
    "encoder mask dropped": Mutation("encoder", drop_mask("encoder.0.self_attn"), "encoder.0", ("mask",)),
    "cross mask dropped": Mutation("decoder_step", drop_mask("decoder.1.cross_attn"), "decoder.1", ("mask",), "fp16"),
    "self mask dropped": Mutation("decoder_step", drop_mask("decoder.0.self_attn"), "decoder.0", ("mask",)),
    "padding leaks": Mutation("encoder", leak_first_pad, "encoder.1", ("padding leak",)),
    "wrong parent in the ancestor mask": Mutation("decoder_step", roll_beams, "decoder.1", ("ancestor mask",)),
    "position off by one": Mutation("decoder_step", shift_position(1), "target_embedding", ("position",)),
    "position one late, learned": Mutation(
        "decoder_step", shift_position(-1), "target_embedding", ("position",), config=LEARNED
    ),
    "position one late, rotary": Mutation(
        "decoder_step", rotated_by_the_position_before, "rotary", ("position",), config=ROTARY
    ),
    "one position for all rows": Mutation("decoder_step", one_position_for_all, "target_embedding", ("position",)),
    "stale cache slot": Mutation("decoder_step", stale_keys, "decoder.0", ("cache slot",)),
    "written one slot late": Mutation("decoder_step", write_one_later, "decoder.1", ("cache slot",)),
    "k and v swapped": Mutation("decoder_step", swap_written, "decoder.1", ("swapped tensors",)),
    "cross values of two layers swapped": Mutation("encoder", swap_cross_layers, "decoder.0", ("swapped tensors",)),
    "source scale missing": Mutation(
        "encoder", rescale("source_embedding/Mul", 1.0), "source_embedding", ("missing scale",)
    ),
    "query scale wrong": Mutation(
        "decoder_step", rescale("decoder.0.cross_attn/Mul", 0.125), "decoder.0", ("wrong scale",), "fp16"
    ),
    "overflow in a LayerNorm": Mutation(
        "decoder_step",
        half_norm("decoder.1.self_residual.norm/LayerNormalization"),
        "decoder.1",
        ("overflow",),
        config=PRE,
        outlier=600.0,
    ),
    "other GELU": Mutation("decoder_step", other_gelu, "decoder.1", ("activation",), config=GELU),
    "SiLU for ReLU": Mutation("encoder", silu_for_relu, "encoder.0", ("activation",)),
    "weight transposed": Mutation(
        "encoder", transposed("encoder.1.self_attn.out.weight"), "encoder.1", ("transposition",)
    ),
    "one bias element": Mutation("decoder_step", one_bias_element, "decoder.0", ("weight",)),
    "one column by a thousandth": Mutation("encoder", one_column, "encoder.1", ("weight",)),
    "weights rounded to fp16": Mutation("decoder_step", rounded_weights, "decoder.1", ("precision",)),
    "other epsilon": Mutation("encoder", other_epsilon, "encoder.0", ("norm",)),
    "softmax over queries": Mutation("encoder", softmax_over_queries, "encoder.0", ("softmax axis",)),
    "heads innermost": Mutation("decoder_step", heads_innermost, "decoder.0", ("head order",)),
    "residual of the layer's input": Mutation("decoder_step", residual_of_before, "decoder.1", ("residual",)),
    "residual missing": Mutation("encoder", no_residual, "encoder.1", ("residual",)),
    "final norm missing": Mutation("decoder_step", no_final_norm, "decoder_norm", ("norm",), config=PRE),
    "another start token": Mutation("decoder_step", another_start, "target_embedding", ("start token",)),
}


def good_bundle(config: ModelConfig, mutation: Mutation, folder: Path) -> Bundle:
    """A right export of a model that the mutation can be planted in."""
    model = random_model(dataclasses.replace(config, **dict(mutation.config)), 3)  # type: ignore[arg-type]
    if mutation.outlier:
        model.decoder[0].feed_forward.down.bias.data[7] = mutation.outlier
    return onnx_from_model(model, folder, (mutation.precision,))


def good_bundles(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mutation], Bundle]:
    """Gives a right export for a mutation; those that need the same model share it."""
    made: dict[object, Bundle] = {}

    def bundle(mutation: Mutation) -> Bundle:
        key = (mutation.config, mutation.outlier, mutation.precision)
        if key not in made:
            made[key] = good_bundle(config, mutation, tmp_path_factory.mktemp("good") / "bundle")
        return made[key]

    return bundle


def bundle_of_other_weights(config: ModelConfig, folder: Path) -> Path:
    """A bundle whose graphs have other weights than its reference."""
    bundle = onnx_from_model(random_model(config, 1), folder / "a", ("fp32",)).root
    other = onnx_from_model(random_model(config, 2), folder / "b", ("fp32",)).root
    shutil.rmtree(bundle / "onnx")
    shutil.copytree(other / "onnx", bundle / "onnx")
    manifest = json.loads((other / MANIFEST).read_text())
    manifest["checkpoint_sha256"] = json.loads((bundle / MANIFEST).read_text())["checkpoint_sha256"]
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    return bundle
