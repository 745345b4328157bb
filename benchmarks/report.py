"""A benchmark in words and pictures: a table for the terminal, JSON for programs, one HTML file for people."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from seq2engine.page import Html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.tables import text_table

from ..runtime.quality import QUALITY_HEAD, quality_row
from .charts import curves_svg, share_text, split_svg
from .result import PARTS, BenchResult, CaseResult, Curve, slots_of_greedy, winner
from .split import PIECES
from .timing import COVERAGE, FEWEST_ROUNDS, Ratio

LABELS = {"encoder": "encoder", "step": "decoder step", "end_to_end": "end to end"}
SPLIT_HEAD = ("arm", *PIECES, "compactions", "live slots", "slots", "of greedy's")
CURVE_HEAD = ("ms per token", "arm", "by output length", "growth")
HEAD = ("part", "arm", "median ms", "p90", "p99", "spread", "tokens/s")


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
            for arm, part, cells in measures(case)
        ]
        head = (*HEAD, f"against {result.first}", "verdict", "outputs")
        lines += [f"{case.case.name}: {case.case}", text_table(head, rows)]
        lines += [f"{LABELS['end_to_end']}: {winner_text(case, 'end_to_end', result.seed)}", ""]
        lines += [text_table(SPLIT_HEAD, split_rows(case)), ""]
    if curves := result.curves():
        lines += [text_table(CURVE_HEAD, curve_rows(curves)), ""]
    if result.quality:
        lines += [text_table(("arm", *QUALITY_HEAD), quality_rows(result)), ""]
    lines.append(conditions(result))
    if result.environment.busy:
        lines.append(busy_text(result))
    return "\n".join(lines)


def bench_html(result: BenchResult) -> str:
    """The report as one HTML file that needs nothing else."""
    busy = f"<p>{badge_html('busy machine', 'warn')} {escape(busy_text(result))}.</p>"
    blocks = [
        note_html(conditions(result) + "."),
        *([busy] if result.environment.busy else []),
        heading_html("End to end at a glance"),
        *(glance_html(case, result.seed) for case in result.cases),
    ]
    if result.quality:
        sources = next(iter(result.quality.values()))[0].sources
        blocks += [
            heading_html("Quality"),
            note_html(f"Error rates of every arm on {sources} sources with references, decoded as a user would."),
            table_html(("arm", *QUALITY_HEAD), quality_rows(result)),
        ]
    if curves := result.curves():
        blocks += curves_html(curves)
    for case in result.cases:
        blocks += case_html(case, result)
    blocks += [
        heading_html("What was loaded"),
        table_html(
            ("arm", "on disk", "load time"),
            [(name, f"{arm.bytes / 1e6:.1f} MB", f"{number(arm.load_ms)} ms") for name, arm in result.arms.items()],
        ),
        heading_html("How to read this"),
        *(note_html(text) for text in explanation(result)),
        heading_html("Where it ran"),
        # Wrapped, because the table would take a value that begins with a digit for a number and set it right.
        table_html(
            ("what", "value"),
            [(what, Html(f"<span>{escape(value)}</span>")) for what, value in environment_rows(result)],
        ),
    ]
    return page_html(f"Benchmark of {Path(result.bundle).name}", ", ".join(result.arms), blocks)


def split_rows(case: CaseResult) -> list[tuple[str, ...]]:
    """Under SPLIT_HEAD: what the pieces of a decode take, and what it does with its cache."""
    return [
        (
            name,
            *(f"{number(times.median)} ms, {share_text(arm.share(piece))}" for piece, times in arm.split.items()),
            *map(str, (arm.cache.compactions + arm.cache.growths, arm.cache.most_live, arm.cache.most_slots)),
            f"{slots_of_greedy(case, name):.2f}x",
        )
        for name, arm in case.arms.items()
    ]


def curve_rows(curves: Iterable[Curve]) -> list[tuple[str, ...]]:
    return [
        (
            f"batch {curve.batch}, beam {curve.beam}, source {curve.source}",
            curve.arm,
            ", ".join(f"{length}: {number(cost)}" for length, cost in curve.costs.items()),
            f"{curve.growth:.2f}x",
        )
        for curve in curves
    ]


def curves_html(curves: Iterable[Curve]) -> Iterable[str]:
    cases: dict[str, list[Curve]] = {}
    for curve in curves:
        cases.setdefault(f"batch {curve.batch}, beam {curve.beam}, source {curve.source}", []).append(curve)
    yield heading_html("What a token costs as outputs grow longer")
    yield note_html("Milliseconds end to end, the encoder aside, over the number of output positions.")
    for title, found in cases.items():
        yield f"<p><strong>{escape(title)}</strong></p>"
        yield curves_svg(found)
    yield table_html(CURVE_HEAD, curve_rows(curve for found in cases.values() for curve in found))


def quality_rows(result: BenchResult) -> list[tuple[str, ...]]:
    return [(name, *quality_row(quality)) for name, found in result.quality.items() for quality in found]


def explanation(result: BenchResult) -> tuple[str, ...]:
    return (
        "Arms take turns, once per round, in an order that rotates. Times are milliseconds per call over "
        f"{result.rounds} rounds, so p99 lies close to the slowest call. Bars are medians, whiskers reach from p10 to "
        "p90, and spread is that reach against the median. One arm against another is a ratio of medians, more than 1 "
        f"being faster, with its {COVERAGE:.0%} bootstrap interval; if that contains 1, or there were fewer than "
        f"{FEWEST_ROUNDS} rounds, the verdict is “unsure”. Tokens per second are source tokens for the encoder, and "
        "tokens of the best hypotheses otherwise.",
        f"Outputs are compared with those of {result.first} before anything is timed, twice: decoded as a user would, "
        "and to the fixed length that is timed end to end, where no source may end early so that every arm does the "
        "same work. The decoder step is the one halfway through a decode, repeated.",
        "A decode end to end splits into the encoder, the decoder steps, compaction (gathering living slots of the "
        "cache, or moving to more of them), other copies of caches, and the search, which is all the rest. Slots are "
        "those of one source: alive, and allocated at most; greedy search has one for every output token in the end.",
    )


def case_html(case: CaseResult, result: BenchResult) -> Iterable[str]:
    rows = [
        (*cells, versus(case, arm, part, result.first), verdict_html(case, arm, part, result.first))
        for arm, part, cells in measures(case)
    ]
    same_rows = [
        (
            name,
            same_html(arm.equal, case.case.batch, name == result.first),
            same_html(arm.equal_timed, case.case.batch, name == result.first),
            arm.cache.steps,
        )
        for name, arm in case.arms.items()
    ]
    return (
        heading_html(f"{case.case.name}: {case.case}"),
        bars_html(case, result.first),
        table_html((*HEAD, f"against {result.first}", "verdict"), rows),
        split_svg(case),
        table_html(SPLIT_HEAD, split_rows(case)),
        table_html(("arm", "outputs", "at fixed length", "steps"), same_rows),
    )


def bars_html(case: CaseResult, first: str) -> str:
    """The three parts side by side, or below each other where there is no room; each has a scale of its own."""
    charts = "".join(bars_svg(case, part, first) for part in PARTS)
    style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.4rem 2rem;margin:.8rem 0"
    return f'<div style="{style}">{charts}</div>'


def bars_svg(case: CaseResult, part: str, first: str) -> str:
    """One bar per arm. Lengths are percentages, so that text keeps its size when the page is narrow."""
    samples = {name: arm.parts[part].samples for name, arm in case.arms.items()}
    full = max(max(times.p90, times.median) for times in samples.values()) * 1.02
    shapes = [f'<text x="0" y="14" style="font-weight:600">{LABELS[part]}, ms</text>']
    y = 24
    for name, times in samples.items():
        low, middle, high = (f"{100 * value / full:.2f}%" for value in (times.p10, times.median, times.p90))
        colour = "var(--soft)" if name == first else "var(--accent)"
        whisker = 'style="stroke:var(--ink);stroke-width:1.5"'
        shapes += [
            f'<text x="0" y="{y + 12}">{escape(name)}</text>',
            f'<text x="100%" y="{y + 12}" text-anchor="end">{number(times.median)}</text>',
            f'<rect x="0" y="{y + 18}" width="{middle}" height="12" rx="2" style="fill:{colour};opacity:.8"/>',
            f'<line x1="{low}" x2="{high}" y1="{y + 24}" y2="{y + 24}" {whisker}/>',
            *(f'<line x1="{end}" x2="{end}" y1="{y + 20}" y2="{y + 28}" {whisker}/>' for end in (low, high)),
        ]
        y += 40
    said = ", ".join(f"{name} {number(times.median)} ms" for name, times in samples.items())
    title = f"{LABELS[part]}: {said}"
    return f'<svg role="img" aria-label="{escape(title)}" style="width:100%;height:{y}px">{"".join(shapes)}</svg>'


def measures(case: CaseResult) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """Arm, part and the cells under HEAD of every measurement of a case."""
    for part in PARTS:
        for arm, found in case.arms.items():
            measure = found.parts[part]
            times = measure.samples
            yield (
                arm,
                part,
                (
                    LABELS[part],
                    arm,
                    *(number(value) for value in (times.median, times.p90, times.p99)),
                    f"{times.spread:.0%}",
                    f"{measure.tokens_per_second:,.0f}",
                ),
            )


def versus(case: CaseResult, arm: str, part: str, first: str) -> str:
    return "1" if arm == first else interval_text(case.arms[arm].parts[part].speedup)


def interval_text(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def verdict_html(case: CaseResult, arm: str, part: str, first: str) -> str:
    if arm == first:
        return "baseline"
    verdict = case.arms[arm].parts[part].speedup.verdict
    return badge_html(verdict, {"faster": "good", "slower": "bad", "unsure": "warn"}[verdict])


def same_html(equal: int, batch: int, is_first: bool) -> str:
    if is_first:
        return "baseline"
    return badge_html(f"{equal} of {batch} equal", "good" if equal == batch else "bad")


def outputs_text(case: CaseResult, arm: str) -> str:
    if case.same(arm):
        return "equal"
    found = case.arms[arm]
    return f"DIFFER: {found.equal} and {found.equal_timed} of {case.case.batch} equal"


def glance_html(case: CaseResult, seed: int) -> str:
    """One case in a sentence, which a narrow screen can wrap as it could not wrap a table."""
    differing = [name for name in case.arms if not case.same(name)]
    outputs = badge_html("outputs differ", "bad") if differing else badge_html("outputs equal", "good")
    said = winner_text(case, "end_to_end", seed)
    return f"<p><strong>{escape(case.case.name)}</strong>: {escape(said)} {outputs} {escape(', '.join(differing))}</p>"


def winner_text(case: CaseResult, part: str, seed: int) -> str:
    found = winner(case, part, seed)
    if found is None:
        return "there is only one arm"
    best, second, ratio = found
    caution = "" if case.same(best) else ", but its outputs differ"
    if ratio.verdict == "unsure":
        return f"unsure whether {best} or {second} is faster, {interval_text(ratio)}{caution}"
    return f"{best} is fastest, {interval_text(ratio)} over {second}{caution}"


def conditions(result: BenchResult) -> str:
    machine = result.environment
    return f"{machine.cpu}, {machine.threads} of {machine.cores} cores, {result.rounds} rounds, {when(result)}"


def when(result: BenchResult) -> str:
    return result.made_at.replace("T", " ").replace("+00:00", " UTC")


def busy_text(result: BenchResult) -> str:
    machine = result.environment
    return (
        f"the machine was busy when the run began (load {machine.load_before} on {machine.cores} cores): "
        "compare arms with each other, and trust no number alone"
    )


def environment_rows(result: BenchResult) -> list[tuple[str, str]]:
    machine, model = result.environment, result.model
    layers = f"{model['encoder_layers']}+{model['decoder_layers']} layers, d_model {model['d_model']}"
    return [
        ("processor", machine.cpu),
        ("instruction sets", ", ".join(machine.features) or "unknown"),
        ("cores", f"{machine.cores}, of which each arm was given {machine.threads}"),
        ("load before and after", f"{machine.load_before} and {machine.load_after}"),
        ("system", machine.platform),
        ("Python", machine.python),
        *machine.libraries.items(),
        ("model", f"{layers}, vocabulary {model['target_vocab']}, {result.cache_form} cache"),
        ("checkpoint", f"sha256 {result.checkpoint_sha256[:16]}"),
        ("rounds, warm-up, seed", f"{result.rounds}, {result.warmup}, {result.seed}"),
        ("measured at", when(result)),
    ]


def number(value: float) -> str:
    """Three digits that matter: 0.123, 1.23, 12.3, 123, 1234."""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"
