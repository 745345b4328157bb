"""The decoder step with the best tokens of every beam and the sum of its softmax: a form for ONNX Runtime.

    logits [B,K,V] --+-- TopK K+1 --> best_logits, best_tokens [B,K,C]
                     |      | the first of each
                     +---- Sub -> Exp -> ReduceSum over blocks -> ReduceSum -> exp_sum [B,K]

The logits stay an output. On the CPU an output that is not read costs nothing: the projection writes to it anyway.

Of int8 products the sum is 1 / Softmax of the best token instead: one pass over the logits, not four, but it adds one
by one within each lane of the processor. That errs by some 1e-6; int8 errs by ten thousand times that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError

from ..audit import axes_of
from ..graph_index import copy_of, names_read
from .interface import CANDIDATES, COUNT

BLOCK = 128  # elements of a partial sum: ONNX Runtime adds sequentially; over 32,000 elements the error is 3e-6
BLOCKS = (64, 512)  # the least and the most elements of a partial sum that divide the vocabulary
ALIGNED = 16  # numbers in 64 bytes: in unaligned rows, the last bit of sums depends on the row


def candidate_graph(
    model: onnx.ModelProto, counted: bool = False, invariant: bool = False, by_softmax: bool = False
) -> onnx.ModelProto:
    """A decoder step, with or without its weights loaded -> the same with the outputs of CANDIDATES.

    C is K+1, or all of the vocabulary where that is less: no search needs more of one beam (runtime/search/).
    Candidates are ranked by larger logit, then lower token, as ONNX has TopK do it. With `counted`, C is a further
    input: then no node computes a shape, which providers of GPUs would leave to the CPU. With `invariant`, a sum has
    the same bits in every row. `by_softmax`: exp_sum is less exact and takes less time.
    """
    vocab = vocab_of(model)
    block = BLOCK if invariant else block_of(vocab)
    blocks = -(-vocab // block)
    made = copy_of(model)
    top = [top_node(COUNT.name)] if counted else [*count_nodes(), top_node(path("count"))]
    made.graph.node.extend([*top, *(softmax_nodes() if by_softmax else sum_nodes(vocab, block))])
    if counted:
        made.graph.input.append(helper.make_tensor_value_info(COUNT.name, TensorProto.INT64, COUNT.axes))
    constants = {
        "zero": [0],
        "one": [1],
        "last": [-1],
        "vocab": [vocab],
        "short_block": [0, 0, 0, 0, 0, -vocab % block],
        "odd_blocks": [0, 0, 0, 0, 0, -blocks % ALIGNED],
        "blocks": [0, 0, -1, block],
    }
    used = names_read(made.graph.node)
    made.graph.initializer.extend(
        numpy_helper.from_array(np.array(values, dtype=np.int64), path(name))
        for name, values in constants.items()
        if path(name) in used
    )
    for tensor in CANDIDATES:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
        made.graph.output.append(helper.make_tensor_value_info(tensor.name, element, tensor.axes))
    return made


def block_of(vocab: int) -> int:
    """The elements of a partial sum. Those that divide the vocabulary save a Pad, which copies all of it on one thread;
    blocks that are no multiples of 64 bytes are summed in another order from row to row."""
    least, most = BLOCKS
    dividing = [size for size in range(least, most + 1) if vocab % size == 0]
    return min(dividing, key=lambda size: abs(size - BLOCK), default=BLOCK)


def path(name: str) -> str:
    return f"candidates/{name}"


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name=path(outputs[0].removeprefix(path(""))), **attributes)


def count_nodes() -> list[NodeProto]:
    """K+1, where K is the width of the input `tokens`; at most the vocabulary."""
    return [
        node("Shape", ["tokens"], [path("beams")], start=1, end=2),
        node("Add", [path("beams"), path("one")], [path("wanted")]),
        node("Min", [path("wanted"), path("vocab")], [path("count")]),
    ]


def top_node(count: str) -> NodeProto:
    return node("TopK", ["logits", count], ["best_logits", "best_tokens"], axis=-1)


def sum_nodes(vocab: int, block: int) -> list[NodeProto]:
    """The sum of exp(logit - best logit) of every beam: its softmax denominator. In blocks, as the CPU wants it."""
    return [
        *exp_nodes(),
        *([node("Pad", [path("exp"), path("short_block")], [path("padded")])] if vocab % block else []),
        # [B, K, V] -> [B, K, blocks, block]
        node("Reshape", [path("padded" if vocab % block else "exp"), path("blocks")], [path("in_blocks")]),
        node("ReduceSum", [path("in_blocks"), path("last")], [path("block_sums")], keepdims=0),
        node("Pad", [path("block_sums"), path("odd_blocks")], [path("aligned_sums")]),
        node("ReduceSum", [path("aligned_sums"), path("last")], ["exp_sum"], keepdims=0),
    ]


def softmax_nodes() -> list[NodeProto]:
    """The same sum as the reciprocal of the best token's probability."""
    return [
        node("Softmax", ["logits"], [path("probabilities")], axis=-1),
        node("Slice", ["best_tokens", path("zero"), path("one"), path("last")], [path("best_token")]),
        node("GatherElements", [path("probabilities"), path("best_token")], [path("probability")], axis=-1),
        node("Reciprocal", [path("probability")], [path("sum")]),
        node("Squeeze", [path("sum"), path("last")], ["exp_sum"]),
    ]


def exp_nodes() -> list[NodeProto]:
    """exp(logit - best logit) of every beam, by the best that TopK has found."""
    return [
        node("Slice", ["best_logits", path("zero"), path("one"), path("last")], [path("best")]),
        node("Sub", ["logits", path("best")], [path("shifted")]),
        node("Exp", [path("shifted")], [path("exp")]),
    ]


def vocab_of(model: onnx.ModelProto) -> int:
    """The number of logits, which must be an output in the contract's shape and type."""
    logits = next((value for value in model.graph.output if value.name == "logits"), None)
    axes = () if logits is None else axes_of(logits)
    right = logits is not None and logits.type.tensor_type.elem_type == TensorProto.FLOAT
    if not right or axes[:2] != ("B", "K") or not isinstance(axes[-1], int):
        raise ExportError(
            f"graph {model.graph.name} has no fp32 output logits [B, K, V]: it is not a decoder step; export the "
            "checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    return axes[-1]
