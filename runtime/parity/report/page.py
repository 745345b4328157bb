"""The parity report: plain text for a terminal, one self-contained page for a browser. Verdict first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seq2engine.common.heat_map import heat_style
from seq2engine.common.page import Html, macro_html, page_from_template
from seq2engine.common.tables import text_table

from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence
from ..levels.divergence import first_difference
from ..levels.result import ParityResult, Sample
from . import plots
from .tables import (
    COST_HEAD,
    DECODE_HEAD,
    FAULT_HEAD,
    GRAPH_HEAD,
    INVARIANCE_HEAD,
    LEVEL_HEAD,
    NEXT_TOKEN_HEAD,
    TENSOR_HEAD,
    WEIGHT_HEAD,
    allowed_text,
    cost_rows,
    decode_rows,
    fault_rows,
    graph_rows,
    invariance_rows,
    level_rows,
    next_token_rows,
    number,
    rate_head,
    rate_rows,
    tensor_rows,
    weight_rows,
)

EXAMPLES, TEXT_EXAMPLES = 10, 3  # divergent decodes shown in full, on a page and in a terminal

PACKAGE = "seq2engine.runtime.parity.report"


def report_name(backend: str, provider: str | None, precision: str, against: str | None = None) -> str:
    """The part of a report's file name that distinguishes it from others of the same bundle, besides the date."""
    return " ".join(filter(None, (backend, provider, precision, against and f"against {against}")))


def parity_table(result: ParityResult) -> str:
    """The result as plain text."""
    blocks = [
        "\n".join(filter(None, (result.verdict_line, result.cost_line))) + finding_text(result),
        text_table(LEVEL_HEAD, level_rows(result)),
        *([text_table(TENSOR_HEAD, tensor_rows(result)) + "\n" + allowed_text(result)] if result.tensors else []),
        *([text_table(DECODE_HEAD, decode_rows(result))] if result.decodes else []),
        "\n".join(
            [f"decodes compared with those of {result.compared_with}", *([result.effort] if result.effort else [])]
        ),
        *([text_table(NEXT_TOKEN_HEAD, next_token_rows(result))] if result.next_token else []),
        *([text_table(rate_head(result), rate_rows(result.rates))] if result.rates else []),
        *cost_texts(result),
        *(divergence_text(result, search, divergence) for search, divergence in examples(result)[:TEXT_EXAMPLES]),
    ]
    return "\n\n".join(blocks)


def cost_texts(result: ParityResult) -> list[str]:
    """The rates against fp32, unless the baseline is fp32."""
    rates = result.cost_rates
    return [text_table(cost_rate_head(result), rate_rows(rates))] if rates else []


def parity_html(result: ParityResult) -> str:
    """The result as one page: verdict, samples, plots and examples, then level by level."""
    shown = examples(result)
    growth = result.error_growth if result.error_growth is not None and result.error_growth.steps else None
    values = {
        "title": f"Parity of {result.candidate}",
        "subtitle": subtitle_of(result),
        "heat_style": heat_style(),
        "result": result,
        "passed": bool(result),
        "reason": f"{result.claim}: {result.reason}" if result.claim else result.reason,
        "level_head": LEVEL_HEAD,
        "levels": [(level, level_cell(verdict), cell("wrapped", text)) for level, verdict, text in level_rows(result)],
        "samples": [(*(cell("wrapped", t) for t in (s.source, s.expected)), sample_cell(s)) for s in result.samples],
        "growth": growth,
        "growth_plot": growth and plots.error_growth_plot(growth, result.candidate),
        "ratio_map": growth and plots.ratio_map(growth),
        "factor": DIVERGENCE_FACTOR,
        "margin_plot": shown and plots.margin_histogram([d for decode in result.decodes for d in decode.divergences]),
        "most": EXAMPLES,
        "divergences": [shown_divergence(result, search, divergence) for search, divergence in shown],
        "weight_head": WEIGHT_HEAD,
        "weights": with_badges(weight_rows(result)),
        "fault_head": FAULT_HEAD,
        "faults": fault_rows(result),
        "graph_head": GRAPH_HEAD,
        "graphs": with_badges(graph_rows(result)),
        "allowed": allowed_text(result),
        "tensor_head": TENSOR_HEAD,
        "coverage": with_badges(tensor_rows(result, "coverage")),
        "encoder": with_badges(tensor_rows(result, "encoder")),
        "steps": with_badges(tensor_rows(result, "steps")),
        "next_token_head": NEXT_TOKEN_HEAD,
        "next_tokens": next_token_rows(result) if result.next_token else (),
        "decode_head": DECODE_HEAD,
        "decodes": decode_rows(result),
        "rate_head": rate_head(result),
        "rates": rate_rows(result.rates),
        "invariance_head": INVARIANCE_HEAD,
        "invariance": with_badges(invariance_rows(result)) if result.invariance else (),
        **cost_values(result),
    }
    return page_from_template(PACKAGE, "parity.html", values)


def subtitle_of(result: ParityResult) -> str:
    effort = f" {result.effort[0].upper()}{result.effort[1:]}." if result.effort else ""
    return (
        f"Decodes are compared with {result.compared_with}. Errors are against the same model in fp64, relative to "
        f"those of PyTorch {result.precision}. {result.sources} sources, decodes of up to {result.max_length} tokens, "
        f"{result.cache_form} cache.{effort}"
    )


def cost_values(result: ParityResult) -> dict[str, object]:
    """The second line of the verdict, which neither passes nor fails, and its tables."""
    line = "" if result.cost is None else result.cost_line
    if result.cost is None or not line:
        return {"cost_line": "", "costs": ()}
    return {
        "cost_line": line,
        "cost_head": COST_HEAD,
        "costs": cost_rows(result.cost) if result.cost.searches else (),
        "cost_rate_head": cost_rate_head(result),
        "cost_rates": rate_rows(result.cost_rates),
    }


def cost_rate_head(result: ParityResult) -> tuple[str, ...]:
    assert result.cost is not None
    return ("search", "metric", result.cost.baseline, result.candidate, "difference")


def sample_cell(sample: Sample) -> Html:
    """The candidate's output, marked from the word at which it differs."""
    words, expected = sample.candidate.split(), sample.expected.split()
    if words == expected:
        return cell("wrapped", sample.candidate)
    same = first_difference(words, expected)
    return cell("differing", " ".join(words[:same]), " ".join(words[same:]) or "(ends)")


@dataclass(frozen=True)
class Side:
    """One side of a divergent decode: its tokens before, at and after the first that differs."""

    name: str
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class ShownDivergence:
    verdict: str
    kind: str  # CSS class
    head: str
    sides: tuple[Side, Side]


def shown_divergence(result: ParityResult, search: str, divergence: Divergence) -> ShownDivergence:
    def side(name: str, tokens: tuple[int, ...]) -> Side:
        step, named = divergence.step, spelled(result, tokens)
        return Side(name, " ".join(named[:step]), "".join(named[step : step + 1]), " ".join(named[step + 1 :]))

    return ShownDivergence(
        divergence.verdict,
        "bad" if divergence.verdict == "bug" else "warn",
        divergence_head(search, divergence) + source_text(result, divergence),
        (side(result.baseline, divergence.reference), side(result.candidate, divergence.candidate)),
    )


def finding_text(result: ParityResult) -> str:
    found = result.finding
    return "" if found is None else f"\nlocated: {found.text}\nagain with: {found.command}"


def examples(result: ParityResult) -> list[tuple[str, Divergence]]:
    """The divergent decodes to show, of every search: largest margin in budgets first."""
    found = [(d.search, divergence) for d in result.decodes for divergence in d.divergences]
    return sorted(found, key=lambda pair: -pair[1].budgets(pair[1].margin))[:EXAMPLES]


def divergence_head(search: str, divergence: Divergence) -> str:
    what = {
        "tokens": "between the two tokens",
        "scores": "between the scores of the two outputs",
        "beams": "between the prefixes that only one of the searches kept",
        "stop": "between the hypothesis at which one search stopped and the prefix with which the other went on",
    }[divergence.kind]
    return (
        f"{search}, source {divergence.source}, from step {divergence.step}: "
        f"margin {number(divergence.margin)} {what}, budget {number(divergence.budget)} "
        f"(top two: {number(divergence.budgets(divergence.top_two))} budgets)"
    )


def divergence_text(result: ParityResult, search: str, divergence: Divergence) -> str:
    def line(tokens: tuple[int, ...]) -> str:
        first = max(0, divergence.step - 4)
        last = divergence.step + 5
        named = spelled(result, tokens)
        shown = [f"[{name}]" if i == divergence.step else name for i, name in enumerate(named)][first:last]
        return " ".join([*(["..."] if first else []), *shown, *(["..."] if last < len(tokens) else [])])

    baseline, wide = result.baseline.split()[0], max(len(result.baseline.split()[0]), len("candidate"))
    return (
        f"{divergence.verdict}: {divergence_head(search, divergence)}{source_text(result, divergence)}\n"
        f"  {baseline:<{wide}}  {line(divergence.reference)}\n  {'candidate':<{wide}}  {line(divergence.candidate)}"
    )


def spelled(result: ParityResult, tokens: Sequence[int]) -> list[str]:
    """Tokens as text, if there is a tokenizer."""
    return [result.words.get(token, str(token)) for token in tokens]


def source_text(result: ParityResult, divergence: Divergence) -> str:
    text = result.texts.get(divergence.source)
    return "" if text is None else f": {text}"


def cell(macro: str, *arguments: object) -> Html:
    """A cell as cells.html draws it."""
    return macro_html(PACKAGE, "cells.html", macro, *arguments)


def level_cell(verdict: str) -> Html | str:
    return cell("verdict", verdict == "pass") if verdict in ("pass", "FAIL") else verdict


def with_badges(rows: Iterable[Sequence[object]]) -> list[tuple[object, ...]]:
    """Rows whose second cell is a verdict; only failures become badges, because there may be dozens of tensors."""
    return [(name, "pass" if verdict == "pass" else cell("verdict", False), *rest) for name, verdict, *rest in rows]
