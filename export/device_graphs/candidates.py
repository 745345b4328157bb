"""The best tokens of every beam and the sum of its softmax, from logits that stay on the device.

    logits [B,K,V] --+-- TopK C --> best_logits, best_tokens [B,K,C]
                     |      | the first of each
                     +---- Sub -> Exp -> ReduceSum -> exp_sum [B,K]

The outputs are those of `ort_forms/top_candidates.py` and mean the same. The sum takes the place of a log-sum-exp,
whose own maximum would take two launches more, and its logarithm a third. TensorRT does not document which of equal
logits its TopK puts first; the reader sorts equal ones by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper

from ..contract import GraphSpec, TensorSpec
from ..ort_forms.interface import CANDIDATES
from ..ort_forms.top_candidates import exp_nodes, path, top_node
from .tiny_graph import tiny_graph

LEAST = 8  # candidates of a beam: with four beams, three more than a search without rules reads
SPARE = 3  # tokens that rules may bar, beside the best K+1
ZERO, ONE, LAST, COUNT = map(path, ("zero", "one", "last", "count"))


def candidate_count(beams: int, vocab: int) -> int:
    """How many candidates per beam an engine outputs for searches with at most this many beams."""
    return min(vocab, max(LEAST, beams + 1 + SPARE))


def candidates(vocab: int, count: int) -> tuple[onnx.ModelProto, GraphSpec]:
    """Logits [B,K,V] -> `count` best tokens of every beam, their logits, and the sum of exp(logit - the best one)."""
    outputs = tuple(TensorSpec(t.name, t.dtype, tuple(count if a == "C" else a for a in t.axes)) for t in CANDIDATES)
    spec = GraphSpec("candidates", (logits_of("K", vocab),), outputs)
    return tiny_graph(spec, candidate_nodes(), constants_of(count)), spec


def logits_of(beams: str | int, vocab: int) -> TensorSpec:
    return TensorSpec("logits", "float32", ("B", beams, vocab))


def constants_of(count: int) -> dict[str, np.ndarray]:
    return {ZERO: np.array([0]), ONE: np.array([1]), LAST: np.array([-1]), COUNT: np.array([count])}


def node(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), [output], name=output, **attributes)


def candidate_nodes(scores: bool = True) -> list[NodeProto]:
    """`logits` -> `best_logits`, `best_tokens` and, with scores, `exp_sum`."""
    total = [*exp_nodes(), node("ReduceSum", [path("exp"), LAST], "exp_sum", keepdims=0)]
    return [top_node(COUNT), *(total if scores else [])]
