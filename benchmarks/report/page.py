"""A benchmark in words and pictures: a table for the terminal, JSON for programs, one HTML file for people."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from seq2engine.common.page import Html, about_html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.common.tables import text_table

from ..result import BenchResult, CaseResult, Curve
from .charts import bars_html, curves_svg, heat_html, split_html
from .tables import (
    ARM_HEAD,
    AXIS_LABELS,
    CURVE_HEAD,
    HEAD,
    LABELS,
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
    """The report as one HTML file that needs nothing else."""
    blocks = [
        about_html(about_rows(result)),
        *(f"<p>{badge_html('interrupted', 'bad')} {escape(text)}</p>" for text in interrupted_text(result)),
        *(f"<p>{badge_html('failed', 'bad')} {escape(text)}</p>" for text in failed_text(result)),
    ]
    if result.environment.busy:
        blocks.append(f"<p>{badge_html('busy machine', 'warn')} {escape(busy_text(result))}.</p>")
    blocks += [
        heading_html("Who wins where"),
        note_html(
            "Milliseconds end to end, and how many times the fastest arm's of the case. Bold: the fastest. \u2248, "
            "without colour: may be as fast as the fastest. \u2260: some output differs from the first arm's."
        ),
        heat_html(result),
        *(glance_html(case) for case in result.cases),
    ]
    if curves := result.curves():
        blocks += curves_html(curves)
    if result.scenarios:
        blocks.append(heading_html("How it is used"))
        blocks += map(note_html, SCENARIO_NOTES)
    for scenario, head in SCENARIO_HEADS.items():
        if rows := scenario_rows(result, scenario):
            blocks.append(table_html(head, rows))
    for case in result.cases:
        blocks += case_html(case, result)
    if result.quality:
        sources = next(iter(result.quality.values()))[0].sources
        blocks += [
            heading_html("Quality"),
            note_html(f"Error rates of every arm on {sources} sources with references, decoded as a user would."),
            table_html(quality_heads(result), quality_rows(result)),
        ]
    blocks += [
        heading_html("Memory, size and time to make"),
        table_html(ARM_HEAD, arm_rows(result)),
        heading_html("How to read this"),
        *(note_html(text) for text in explanation(result)),
        heading_html("Where it ran"),
        *map(note_html, filter(None, [ceiling_text(result)])),
        # Wrapped, because the table would take a value that begins with a digit for a number and set it right.
        table_html(
            ("what", "value"),
            [(what, Html(f"<span>{escape(value)}</span>")) for what, value in environment_rows(result)],
        ),
    ]
    return page_html(f"Benchmark of {Path(result.bundle).name}", ", ".join(result.arms), blocks)


def curves_html(curves: Iterable[Curve]) -> Iterable[str]:
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.axis, curve.case), []).append(curve)
    yield heading_html("What a token costs")
    yield note_html("Milliseconds end to end over the number of output tokens, as one size grows and the others stay.")
    charts = "".join(
        f"<div><p><strong>against {AXIS_LABELS[axis]}</strong><br>{escape(case)}</p>{curves_svg(found)}</div>"
        for (axis, case), found in groups.items()
    )
    style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(18rem,1fr));gap:.4rem 2rem;margin:.8rem 0"
    yield f'<div style="{style}">{charts}</div>'
    yield table_html(CURVE_HEAD, curve_rows(curve for found in groups.values() for curve in found))


def case_html(case: CaseResult, result: BenchResult) -> Iterable[str]:
    rows = [
        (*cells, versus(case, arm, part, result.first), verdict_html(case, arm, part, result.first))
        for arm, part, cells in measures(result, case)
    ]
    same_rows = [
        (
            name,
            same_html(arm.equal, case.case.batch, name == result.first),
            same_html(arm.equal_timed, case.case.batch, name == result.first),
            "" if arm.cache is None else arm.cache.steps,
            arm.setting,
        )
        for name, arm in case.arms.items()
    ]
    return (
        heading_html(f"{case.case.name}: {case.case}"),
        bars_html(case, result.first),
        table_html((*HEAD, f"against {result.first}", "verdict"), rows),
        split_html(case),
        table_html(SPLIT_HEAD, split_rows(case)),
        table_html(("arm", "outputs", "at fixed length", "steps", "best setting"), same_rows),
    )


def verdict_html(case: CaseResult, arm: str, part: str, first: str) -> str:
    if arm == first:
        return "baseline"
    verdict = case.arms[arm].parts[part].speedup.verdict
    return badge_html(verdict, {"faster": "good", "slower": "bad", "unsure": "warn"}[verdict])


def same_html(equal: int, batch: int, is_first: bool) -> str:
    if is_first:
        return "baseline"
    return badge_html(f"{equal} of {batch} equal", "good" if equal == batch else "bad")


def glance_html(case: CaseResult) -> str:
    """One case in a sentence, which a narrow screen can wrap as it could not wrap a table."""
    differing = [name for name in case.arms if not case.same(name)]
    outputs = badge_html("outputs differ", "bad") if differing else badge_html("outputs equal", "good")
    winner = winner_text(case, "end_to_end")
    return (
        f"<p><strong>{escape(case.case.name)}</strong>: {escape(winner)} {outputs} {escape(', '.join(differing))}</p>"
    )
