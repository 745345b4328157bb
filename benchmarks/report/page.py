"""The reports of a benchmark: a table for the terminal, JSON, and one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from seq2engine.common.page import badge_html, page_from_template, words_html
from seq2engine.common.tables import text_table

from ..result import BenchResult, CaseResult, Curve
from .charts import CurveChart, bar_charts, curve_chart, heat_map, split_chart
from .tables import (
    ARM_HEAD,
    AXIS_LABELS,
    CURVE_HEAD,
    HEAD,
    LABELS,
    NATURAL_HEAD,
    NATURAL_NOTE,
    SCENARIO_HEADS,
    SCENARIO_NOTES,
    SPLIT_HEAD,
    about_rows,
    arm_rows,
    busy_text,
    ceiling_text,
    conditions,
    curve_rows,
    environment_rows,
    explanation,
    failed_text,
    interrupted_text,
    measures,
    natural_rows,
    outputs_text,
    quality_heads,
    quality_rows,
    scenario_rows,
    settings_text,
    split_rows,
    versus,
    winner_text,
)


def bench_json(result: BenchResult) -> str:
    return result.to_json()


def bench_table(result: BenchResult) -> str:
    """What the command line prints."""
    lines = []
    for case in result.cases:
        rows = [
            (
                *cells,
                versus(case, arm, part, result.first),
                "" if arm == result.first else case.arms[arm].parts[part].speedup.verdict,
                outputs_text(case, arm) if part == "end_to_end" else "",
            )
            for arm, part, cells in measures(result, case)
        ]
        head = (*HEAD, f"against {result.first}", "verdict", "outputs")
        lines += [f"{case.case.name}: {case.case}", text_table(head, rows)]
        lines += [f"{LABELS['end_to_end']}: {winner_text(case, 'end_to_end')}"]
        lines += [*filter(None, [settings_text(case)]), "", text_table(SPLIT_HEAD, split_rows(case)), ""]
    if curves := result.curves():
        lines += [text_table(CURVE_HEAD, curve_rows(curves)), ""]
    if result.natural:
        lines += [text_table(NATURAL_HEAD, natural_rows(result)), ""]
    if result.quality:
        lines += [text_table(quality_heads(result), quality_rows(result)), ""]
    for scenario, figure_head in SCENARIO_HEADS.items():
        if figures := scenario_rows(result, scenario):
            lines += [text_table(figure_head, figures), ""]
    lines += [text_table(ARM_HEAD, arm_rows(result)), "", *failed_text(result), *filter(None, [ceiling_text(result)])]
    lines += [*interrupted_text(result), conditions(result)]
    if result.environment.busy:
        lines.append(busy_text(result))
    return "\n".join(lines)


def bench_html(result: BenchResult) -> str:
    """The report as one self-contained HTML file."""
    curves = curve_charts(result.curves())
    values: dict[str, object] = {
        "title": f"Benchmark of {Path(result.bundle).name}",
        "subtitle": ", ".join(result.arms),
        "about_rows": about_rows(result),
        "interrupted": interrupted_text(result),
        "failed": failed_text(result),
        "busy": busy_text(result) if result.environment.busy else "",
        "heat_map": heat_map(result) if result.cases else None,
        "natural_note": NATURAL_NOTE,
        "natural_head": NATURAL_HEAD,
        "natural": natural_rows(result),
        "cases": [case_values(case, result) for case in result.cases],
        "curves": curves,
        "curve_head": CURVE_HEAD,
        "curve_rows": curve_rows(result.curves()) if curves else (),
        "scenario_notes": SCENARIO_NOTES if result.scenarios else (),
        "scenarios": [(head, rows) for name, head in SCENARIO_HEADS.items() if (rows := scenario_rows(result, name))],
        "split_head": SPLIT_HEAD,
        "arm_head": ARM_HEAD,
        "arms": arm_rows(result),
        "explanation": explanation(result),
        "ceiling": ceiling_text(result),
        # As words, because the table would take a value that begins with a digit for a number and set it right.
        "environment": [(what, words_html(value)) for what, value in environment_rows(result)],
        "quality": (),
    }
    if result.quality:
        sources = next(iter(result.quality.values()))[0].sources
        head, rows = quality_heads(result), quality_rows(result)
        values |= {"quality": rows, "quality_head": head, "quality_sources": sources}
    return page_from_template("seq2engine.benchmarks.report", "bench.html", values)


def curve_charts(curves: Iterable[Curve]) -> list[CurveChart]:
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.axis, curve.case), []).append(curve)
    return [curve_chart(AXIS_LABELS[axis], case, found) for (axis, case), found in groups.items()]


def case_values(case: CaseResult, result: BenchResult) -> dict[str, object]:
    first = result.first
    return {
        "name": case.case.name,
        "title": f"{case.case.name}: {case.case}",
        "winner": winner_text(case, "end_to_end"),
        "differing": [name for name in case.arms if not case.same(name)],
        "bars": bar_charts(case, first),
        "head": (*HEAD, f"against {first}", "verdict"),
        "rows": [
            (*cells, versus(case, arm, part, first), verdict_html(case, arm, part, first))
            for arm, part, cells in measures(result, case)
        ],
        "split": split_chart(case),
        "split_rows": split_rows(case),
        "same_rows": [
            (
                name,
                same_html(arm.equal, case.case.batch, name == first),
                same_html(arm.equal_timed, case.case.batch, name == first),
                "" if arm.cache is None else arm.cache.steps,
                arm.setting,
            )
            for name, arm in case.arms.items()
        ],
    }


def verdict_html(case: CaseResult, arm: str, part: str, first: str) -> str:
    if arm == first:
        return "baseline"
    verdict = case.arms[arm].parts[part].speedup.verdict
    return badge_html(verdict, {"faster": "good", "slower": "bad", "unsure": "warn"}[verdict])


def same_html(equal: int, batch: int, is_first: bool) -> str:
    if is_first:
        return "baseline"
    return badge_html(f"{equal} of {batch} equal", "good" if equal == batch else "bad")
