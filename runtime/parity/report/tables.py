"""The tables of a parity report, as rows of text: terminal and page show the same ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...numerics.budgets import FACTORS, DecodeResult, ScoreResult, TensorResult, ratio, times
from ...quality.intervals import Rate, difference_text, interval_text
from ..levels.cost import Cost
from ..levels.result import LEVELS, ParityResult

LEVEL_HEAD = ("level", "verdict", "result")
WEIGHT_HEAD = ("graph", "verdict", "tensors", "numbers", "constants", "nodes", "passes")
FAULT_HEAD = ("graph", "tensor or node", "layer", "cause", "what is wrong")
GRAPH_HEAD = ("graph", "verdict", "opset", "inputs", "outputs", "nodes", "matmuls", "weights")
TENSOR_HEAD = (
    "tensor",
    "verdict",
    "median ratio",
    "maximum ratio",
    "scale",
    "PyTorch median, maximum",
    "candidate median, maximum",
)
NEXT_TOKEN_HEAD = ("next tokens of", "steps", "KL", "maximum KL", "top-1", "top-5")
DECODE_HEAD = ("search", "sources", "equal", "tie", "drift", "bug", "score difference", "in budgets")
COST_HEAD = ("search", "outputs", "equal", "tokens edited", "first difference at step (median)")
INVARIANCE_HEAD = ("arrangement", "verdict", "sources", "equal", "largest difference", "budget", "in budgets")


def allowed_text(result: ParityResult) -> str:
    factors = FACTORS[result.precision]
    usual = f"{factors.median:g}x PyTorch's own error at the median and the 90th percentile"
    return f"allowed: {usual}, {factors.worst:g}x at the maximum"


def level_rows(result: ParityResult) -> list[tuple[str, str, str]]:
    return [(level, *level_row(result, level)) for level in LEVELS]


def level_row(result: ParityResult, level: str) -> tuple[str, str]:
    """A level's verdict and its result in words."""
    parts = result.level(level)
    if not parts and not (level == "quality" and result.rates):
        missing = {
            "weights": "this backend has no graphs",
            "graphs": "this backend has no graphs",
            "coverage": "only of ONNX Runtime on the CPU, whose graphs can be cut",
            "quality": "needs references",
        }
        return "not run", missing.get(level, "")
    if bad := [part for part in parts if not part]:
        return "FAIL", bad[0].reason + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    if level == "quality":
        sides = [(f"against {result.baseline}", result.rates)]
        if result.cost_rates and result.cost is not None:  # the cost first: it is what users ask for
            sides.insert(0, (f"against {result.cost.baseline}", result.cost_rates))
        return "info", "; ".join(f"{name}: {rates_text(rates[:2])}" for name, rates in sides)
    if level == "weights":
        tensors, numbers = (sum(getattr(one, name) for one in result.weights) for name in ("traced", "numbers"))
        return "pass", f"{tensors} tensors of {numbers:,} numbers and every node are traced to the reference"
    if level == "graphs":
        nodes = "; ".join(f"{graph.graph}: {graph.census['nodes']} nodes" for graph in result.graphs)
        return "pass", nodes + (f"; warning: {result.rounding_warning}" if result.rounding_warning else "")
    if level == "decodes":
        return "pass", "; ".join(decode.summary for decode in result.decodes)
    if level == "invariance":
        equal, most = min(c.equal for c in result.invariance), max(c.budgets for c in result.invariance)
        sources, count = result.invariance[0].sources, len(result.invariance)
        return "pass", f"at least {equal} of {sources} equal in {count} arrangements; largest change {most:.2g} budgets"
    tensors = [part for part in parts if isinstance(part, TensorResult)]
    worst = max(tensors, key=lambda tensor: tensor.median_ratio)
    steps = sum(tensor.step is not None for tensor in tensors)
    compared = f"{len(tensors) - steps} tensors" + (f" and {steps} single steps" if steps else "")
    return "pass", f"largest median ratio {times(worst.median_ratio)} ({worst.name}) of {compared}"


def rates_text(rates: Sequence[Rate]) -> str:
    return ", ".join(f"{rate.search} {rate.metric} {difference_text(rate)}" for rate in rates)


def weight_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (
            one.name,
            word(bool(one)),
            str(one.traced),
            f"{one.numbers:,}",
            str(one.constants),
            str(one.nodes),
            "; ".join(f"{count} {passes}" for passes, count in one.passes.items()),
        )
        for one in result.weights
    ]


def fault_rows(result: ParityResult) -> list[tuple[str, ...]]:
    """Every fault of the level that needs no run."""
    return [
        (one.name, fault.tensor or fault.node, fault.layer, fault.cause, fault.detail)
        for one in result.weights
        for fault in one.faults
    ]


def graph_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (
            graph.graph,
            word(bool(graph)),
            str(graph.opset),
            str(len(graph.inputs)),
            str(len(graph.outputs)),
            str(graph.census["nodes"]),
            ", ".join(f"{count} {kind}" for kind, count in graph.census["products"].items()),
            ", ".join(f"{size / 1e6:.1f} MB {kind}" for kind, size in graph.census["weight_bytes"].items()),
        )
        for graph in result.graphs
    ]


def tensor_rows(result: ParityResult, level: str | None = None) -> list[tuple[str, ...]]:
    """All tensors, or those of a level; of the single steps the one that uses most of its budget."""
    tensors = [tensor for tensor in result.tensors if level in (None, tensor.level)]
    steps = [tensor for tensor in tensors if tensor.step is not None]
    worst = [max(steps, key=lambda tensor: tensor.strain)] if steps else []
    return [
        (
            tensor.name,
            word(bool(tensor)),
            times(tensor.median_ratio),
            times(tensor.worst_ratio),
            number(tensor.scale),
            f"{number(tensor.reference.median)}, {number(tensor.reference.worst)}",
            f"{number(tensor.candidate.median)}, {number(tensor.candidate.worst)}",
        )
        for tensor in (*(t for t in tensors if t.step is None), *worst)
    ]


def next_token_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (side, str(n.rows), number(n.kl), number(n.worst_kl), f"{n.top1:.2%}", f"{n.top5:.2%}")
        for side, n in result.next_token.items()
    ]


def decode_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (d.search, str(d.sources), str(d.equal), *(str(n) for n in counts_of(d)), *score_cells(d.scores))
        for d in result.decodes
    ]


def score_cells(scores: ScoreResult | None) -> tuple[str, str]:
    """The largest difference of scores of equal outputs, and the largest share of a budget that a pair uses."""
    if scores is None:
        return "not scored", "not scored"
    return number(scores.largest), number(ratio(scores.difference, scores.budget, 0.0))


def counts_of(decode: DecodeResult) -> list[int]:
    counts = Counter(divergence.verdict for divergence in decode.divergences)
    return [counts[verdict] for verdict in ("tie", "drift", "bug")]


def rate_head(result: ParityResult) -> tuple[str, ...]:
    return ("search", "metric", result.baseline, result.candidate, "difference")


def rate_rows(rates: Sequence[Rate]) -> list[tuple[str, ...]]:
    return [
        (
            rate.search,
            rate.metric,
            interval_text(rate, rate.reference),
            interval_text(rate, rate.candidate),
            difference_text(rate),
        )
        for rate in rates
    ]


def cost_rows(cost: Cost) -> list[tuple[str, ...]]:
    return [
        (
            part.search,
            str(part.sources),
            str(part.equal),
            f"{part.edit_rate:.1%}",
            "none" if part.first_difference is None else f"{part.first_difference:g}",
        )
        for part in cost.searches
    ]


def invariance_rows(result: ParityResult) -> list[tuple[str, ...]]:
    return [
        (
            arranged.arrangement,
            word(bool(arranged)),
            str(arranged.sources),
            str(arranged.equal),
            number(arranged.difference),
            number(arranged.budget),
            number(arranged.budgets),
        )
        for arranged in result.invariance
    ]


def word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "not finite"
