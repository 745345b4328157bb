"""The decoder step with a shortcut to its best tokens, for searches that read nothing else.

The output projection is a large part of a small model's weights, and greedy search needs only the best token. So the
output table is kept in int8 as well. The error of the int8 product is bounded, so only tokens that the bound leaves
among the best are multiplied again in fp32:

    wanted 0 -------> output/MatMul -> logits -> best_logits, best_tokens, exp_sum      as it was
    wanted n -------> x in int8 * table in int8 = rough [R,V]
                      t [R]: the least fp32 logit of the n tokens that rank best in int8; none of the n best is lower
                      rough + bound < t in all rows: out; the others are candidates, some ten of 32,000 for each row
                      x * their rows of the table -> best_logits, best_tokens, the exact ones; exp_sum over them alone

The bound (Cauchy-Schwarz): with u = x / max|x| and its int8 form v, a row w of the table and its int8 form q,
|u w - v q| <= |v| |w - q| + |u - v| |w|, and a little for the rounding of the fp32 products themselves. A bias of the
projection is divided by max|x| too and part of the rough logits: where biases decide, tokens that are best without
them have a low t, which bars nothing. A form for ONNX Runtime on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..artifact.graph_files import array_of
from ..graph_index import copy_of, makers_of, replace_nodes
from ..precision.quantise import quantised, scheme_of
from . import int8_matmul as row_products
from .interface import CANDIDATES, MOST, WANTED
from .top_candidates import path as candidate_path

ULP = 2.0**-24
BLOCK = 2048  # tokens whose rows are rounded at a time


def screened_graph(model: onnx.ModelProto, folder: Path, complete: bool = True) -> onnx.ModelProto:
    """A decoder step of `candidate_graph`, in fp32 or with int8 products -> the same with an input `wanted`.

    Where `wanted` is not 0, `logits` are those of the best `wanted` tokens of every beam, and `exp_sum` is over
    candidates alone. If not `complete`, `wanted` is never 0. Weights that are not loaded are in `folder`.
    """
    made = copy_of(model)
    graph = made.graph
    last = next(node for node in graph.node if node.output[0] == "logits")
    reducing = [node for node in graph.node if node.name.startswith(candidate_path(""))]
    stored = {weight.name: weight for weight in graph.initializer}
    makers = makers_of(graph.node)
    bias = next((name for name in last.input if name in stored), None) if last.op_type == "Add" else None
    product = last if bias is None else makers[next(name for name in last.input if name != bias)]
    whole = [product] if bias is None else [product, last]
    constants = PLACES
    if product.op_type == "Mul":  # of int8 steps and every row's scale
        shortcut = best_of_steps(*product.input) if bias is None else best_of_logits(product, bias)
    else:
        weight = stored[makers[product.input[1]].input[0]]
        shortcut = screening(product.input[0], weight.name, bias)
        constants = tables(array_of(weight, folder), None if bias is None else array_of(stored[bias], folder))
    before = [node for node in graph.node if node not in whole and node not in reducing]
    outputs = ["logits", *(tensor.name for tensor in CANDIDATES)]
    sides = {
        "then_branch": branch("all", [*whole, *reducing], outputs),
        "else_branch": branch("best", shortcut, outputs),
    }
    # Not in their branch: ONNX Runtime would hold them twice.
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    every = node("Equal", [WANTED.name, path("first")], [path("every")])
    chosen = [every, node("If", [path("every")], outputs, **sides)] if complete else shortcut
    replace_nodes(graph, [*before, *chosen])
    (logits,) = [value for value in graph.output if value.name == "logits"]
    logits.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", "W"]))
    graph.input.append(helper.make_tensor_value_info(WANTED.name, TensorProto.INT64, WANTED.axes))
    if all(opset.domain != row_products.CONTRIB for opset in made.opset_import):
        made.opset_import.append(helper.make_opsetid(row_products.CONTRIB, 1))
    return made


def path(name: str) -> str:
    return f"screening/{name}"


LAST = path("last")
PLACES = {LAST: np.array([-1]), path("first"): np.array([0]), path("one"): np.array([1])}


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name=f"{outputs[0]}/{op}", **attributes)


def tables(table: np.ndarray, bias: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The screening tensors of a table [V,D] and a bias [V]: its int8 form, bounds of its error, and
    constants."""
    vocab, width = table.shape
    steps = np.empty((width, vocab), dtype=np.int8)
    scales, wrong, norms = (np.empty(vocab, dtype=np.float32) for _ in range(3))
    for first in range(0, vocab, BLOCK):  # a block at a time: intermediate results would be larger than the table
        part = slice(first, first + BLOCK)
        rows = table[part]
        numbers, scales[part] = quantised(rows, 1, scheme_of("w8a8", "int8"))
        steps[:, part] = numbers.T
        wrong[part] = np.linalg.norm(rows - numbers * scales[part, None], axis=1)
        norms[part] = np.linalg.norm(rows, axis=1)
    slack = 4 * width * ULP * norms.max()  # of fp32 sums of D products: the rough one, two exact ones, and t
    bounds = [wrong + slack, norms, np.ones_like(norms)]  # times |v|, |u - v| and -t
    constants: dict[str, np.ndarray] = {}
    if bias is not None:
        wide = 12 * ULP * np.abs(bias)  # a bias is divided, multiplied and added, here and in the exact sum
        bounds.append(wide)  # times 1 / max|x|
        constants |= {"bias": bias[None], "least_bias": bias - wide}
    constants |= {
        "int8": steps,
        "scale": scales,
        "bounds": np.stack(bounds).astype(np.float32),
        "always": (np.arange(vocab) < MOST).astype(np.float32),
        "none": np.array(0, dtype=np.float32),
        "plus": np.array([1], dtype=np.float32),
        "rows": np.array([-1, width]),
    }
    rounding = row_products.CONSTANTS | row_products.SIGNED.constants()
    return {path(name): array for name, array in constants.items()} | rounding | PLACES


def screening(x: str, table: str, bias: str | None = None) -> list[NodeProto]:
    """All stages; with a bias, the sums of products get it where they would else be the logits."""
    u = path("x")
    return [
        node("Reshape", [x, path("rows")], [u]),  # [B, K, D] -> [R, D]
        *rough_logits(u, biased=bias is not None),
        *known_logits(u, table, biased=bias is not None),
        *margins(u, biased=bias is not None),
        *candidates_by_margin(u),
        *exact_logits(u, table, bias),
    ]


def rough_logits(u: str, biased: bool) -> list[NodeProto]:
    """Logits by int8 products."""
    step, zero = row_products.path("step"), row_products.path("zero")
    return [
        *row_products.rounding(u),
        helper.make_node(
            "MatMulIntegerToFloat",
            [f"{u}/uint8", path("int8"), step, path("scale"), zero],
            [path("rough_products" if biased else "rough")],
            name=path("rough/MatMulIntegerToFloat"),
            domain=row_products.CONTRIB,
        ),
        *(rough_with_bias(f"{u}/scale") if biased else []),
    ]


def known_logits(u: str, table: str, biased: bool) -> list[NodeProto]:
    """As many exact logits as there are best ones to be found, of which none will be lower than their lowest, t."""
    return [
        node("TopK", [path("rough"), WANTED.name], [path("roughly_best"), path("likely")], axis=-1),
        node("Gather", [table, path("likely")], [path("likely_rows")]),  # [R, C, D]
        node("Unsqueeze", [f"{u}/unit", LAST], [path("columns")]),
        node("MatMul", [path("likely_rows"), path("columns")], [path("likely_logits")]),
        node("Squeeze", [path("likely_logits"), LAST], [path("known_products" if biased else "known")]),
        *(known_with_bias() if biased else []),
        node("ReduceMin", [path("known"), LAST], [path("least")], keepdims=1),
        node("Neg", [path("least")], [path("below")]),
    ]


def margins(u: str, biased: bool) -> list[NodeProto]:
    """Rough logits + bound - t."""
    step, zero = row_products.path("step"), row_products.path("zero")
    factors = [path("length"), path("missed_length"), path("below"), *([path("inverse")] if biased else [])]
    return [
        node("DequantizeLinear", [f"{u}/uint8", step, zero], [path("rounded")]),
        node("Sub", [f"{u}/unit", path("rounded")], [path("missed")]),
        node("ReduceL2", [path("rounded"), LAST], [path("length")], keepdims=1),
        node("ReduceL2", [path("missed"), LAST], [path("missed_length")], keepdims=1),
        node("Concat", factors, [path("factors")], axis=1),
        node("Gemm", [path("factors"), path("bounds"), path("rough")], [path("margin")]),
    ]


def candidates_by_margin(u: str) -> list[NodeProto]:
    """Tokens above t in any row: the sum is a matmul, several times faster here than a maximum over rows."""
    return [
        node("Relu", [path("margin")], [path("above")]),
        node("Shape", [u], [path("row_count")], start=0, end=1),
        node("Expand", [path("plus"), path("row_count")], [path("each")]),
        node("MatMul", [path("each"), path("above")], [path("in_question")]),  # [V]
        node("Max", [path("in_question"), path("always")], [path("chances")]),
        node("LessOrEqual", [path("chances"), path("none")], [path("out")]),
        node("Not", [path("out")], [path("in")]),
        node("NonZero", [path("in")], [path("places")]),
        node("Squeeze", [path("places"), path("first")], [path("candidates")]),
    ]


def exact_logits(u: str, table: str, bias: str | None) -> list[NodeProto]:
    """The candidates' exact logits, and the best of them."""
    return [
        node("Gather", [table, path("candidates")], [path("candidate_rows")]),
        node("Gemm", [u, path("candidate_rows")], [path("exact" if bias is None else "exact_products")], transB=1),
        *([] if bias is None else exact_with_bias(bias)),
        node("TopK", [path("exact"), WANTED.name], [path("best"), path("spots")], axis=-1),
        node("Gather", [path("candidates"), path("spots")], [path("best_ids")]),
        *summing(path("exact"), path("best"), path("sum")),
        node("Shape", ["tokens"], [path("shape")]),
        node("Concat", [path("shape"), LAST], [path("wide")], axis=0),
        node("Reshape", [path("best"), path("wide")], ["best_logits"]),
        node("Identity", ["best_logits"], ["logits"]),
        node("Reshape", [path("best_ids"), path("wide")], ["best_tokens"]),
        node("Reshape", [path("sum"), path("shape")], ["exp_sum"]),
    ]


def rough_with_bias(scale: str) -> list[NodeProto]:
    """Rough logits: rough products and the bias, divided as x is."""
    return [
        node("Reciprocal", [scale], [path("inverse")]),
        node("Gemm", [path("inverse"), path("bias"), path("rough_products")], [path("rough")]),
    ]


def known_with_bias() -> list[NodeProto]:
    """A lower bound of the int8 candidates: their products, and at least their bias, divided as x is."""
    return [
        node("Gather", [path("least_bias"), path("likely")], [path("likely_bias")]),
        node("Mul", [path("likely_bias"), path("inverse")], [path("divided_bias")]),
        node("Add", [path("known_products"), path("divided_bias")], [path("known")]),
    ]


def exact_with_bias(bias: str) -> list[NodeProto]:
    return [
        node("Gather", [bias, path("candidates")], [path("candidate_bias")]),
        node("Add", [path("exact_products"), path("candidate_bias")], [path("exact")]),
    ]


def best_of_steps(steps: str, scale: str) -> list[NodeProto]:
    """Logits before their rows' scales [B,K,1], which are positive, are ranked alike."""
    return [
        node("TopK", [steps, WANTED.name], [path("best_steps"), "best_tokens"], axis=-1),
        node("Mul", [path("best_steps"), scale], ["best_logits"]),
        *summing("best_logits", "best_logits", "exp_sum"),
        node("Identity", ["best_logits"], ["logits"]),
    ]


def best_of_logits(product: NodeProto, bias: str) -> list[NodeProto]:
    """The best of int8 logits with a bias, without the sum over the whole vocabulary."""
    return [
        node("Mul", list(product.input), [path("products")]),
        node("Add", [path("products"), bias], [path("every_logit")]),
        node("TopK", [path("every_logit"), WANTED.name], ["best_logits", "best_tokens"], axis=-1),
        *summing("best_logits", "best_logits", "exp_sum"),
        node("Identity", ["best_logits"], ["logits"]),
    ]


def summing(logits: str, best: str, total: str) -> list[NodeProto]:
    return [
        node("Slice", [best, path("first"), path("one"), LAST], [path("top")]),
        node("Sub", [logits, path("top")], [path("shifted")]),
        node("Exp", [path("shifted")], [path("exp")]),
        node("ReduceSum", [path("exp"), LAST], [total], keepdims=0),
    ]


def branch(name: str, nodes: list[NodeProto], outputs: list[str]) -> onnx.GraphProto:
    """These nodes as one side of a choice; their outputs have names of their own there."""
    inside = {output: f"{name}/{output}" for output in outputs}
    renamed = []
    for one in nodes:
        copy = NodeProto()
        copy.CopyFrom(one)
        copy.input[:] = [inside.get(read, read) for read in one.input]
        copy.output[:] = [inside.get(written, written) for written in one.output]
        renamed.append(copy)
    kinds = {"best_tokens": TensorProto.INT64}
    values = [
        helper.make_tensor_value_info(inside[output], kinds.get(output, TensorProto.FLOAT), None) for output in outputs
    ]
    return helper.make_graph(renamed, name, [], values)
