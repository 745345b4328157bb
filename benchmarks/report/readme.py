"""The measured tables of README and docs/BENCHMARK.md, made of committed results: `make readme` writes them again.

A comment on the page names the result of each table: <!-- measured: benchmarks/results/base.json, random weights -->
"""

from __future__ import annotations

import re
from pathlib import Path

from ..machine import SOURCES
from ..result import BenchResult, CaseResult
from ..result_files import result_from_file
from ..timing import ratio_interval
from .natural_table import natural_conditions, natural_table
from .tables import interval_of, number

PAGES = (SOURCES / "README.md", SOURCES / "docs" / "BENCHMARK.md")
MEASURED = re.compile(r"(<!-- measured: (\S+), (.*?) -->\n).*?(<!-- end of measured -->\n)", flags=re.DOTALL)
OURS = "onnxruntime"
THEIRS = {"w8a8": "int8"}  # our precision -> peers' name of a comparable one


def readme_text(result: BenchResult, weights: str) -> str:
    """The table and its conditions: of every case our arms against the best peer of the same precision."""
    if result.natural:
        return "\n".join([*natural_table(result, weights, OURS, THEIRS), "", *conditions(result)]) + "\n"
    precisions = [arm.precision for arm in result.arms.values() if arm.backend == OURS and arm.draft is None]
    model = result.model
    head = [f"d {model['d_model']}, {model['encoder_layers']}+{model['decoder_layers']} layers, {weights}"]
    for precision in precisions:
        head += [f"ours {precision}", f"best {THEIRS.get(precision, precision)} peer", "times as fast"]
    rows = [
        [str(case.case), *(cell for precision in precisions for cell in cells(result, case, precision, None))]
        for case in result.cases
    ]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join([*lines, "", *speculative(result), *conditions(result)]) + "\n"


def speculative(result: BenchResult) -> list[str]:
    """A sentence for every case that was timed with speculative decoding."""
    lines = []
    for arm in result.arms.values():
        for case in result.cases if arm.draft else ():
            if case.case.batch * case.case.beam == 1:
                mine, peer, ratio = cells(result, case, arm.precision, arm.draft)
                fast = f"; {ratio} times as fast" if ratio else ""
                what = f"{arm.precision}, speculative decoding with a draft in {arm.draft}"
                lines.append(f"{what}, {case.case}: {mine}; {peer}{fast}.")
    return lines


def cells(result: BenchResult, case: CaseResult, precision: str, draft: str | None) -> tuple[str, str, str]:
    wanted = (OURS, precision, draft)
    ours = next(name for name, arm in result.arms.items() if (arm.backend, arm.precision, arm.draft) == wanted)
    like = THEIRS.get(precision, precision)
    peers = [name for name in case.arms if result.arms[name].peer and result.arms[name].precision == like]
    mine = case.arms[ours].parts["end_to_end"].samples
    if not peers:
        return f"{number(mine.median)} ms", "none ran", ""
    best = min(peers, key=lambda name: case.arms[name].parts["end_to_end"].samples.median)
    theirs = case.arms[best].parts["end_to_end"].samples
    ratio = ratio_interval(theirs, mine)
    return (
        f"{number(mine.median)} ms",
        f"{best}, {number(theirs.median)} ms",
        f"{ratio.value:.2f} ({interval_of(ratio)}{', unsure' if ratio.verdict == 'unsure' else ''})",
    )


def conditions(result: BenchResult) -> list[str]:
    machine = result.environment
    peers = [name for name, arm in result.arms.items() if arm.peer]
    differing = [name for name in result.arms if not all(case.same(name) for case in result.cases if name in case.arms)]
    versions = sorted({arm.version for arm in result.arms.values() if arm.version})
    busy = f", on a busy machine (load {machine.load_before})" if machine.busy else ""
    if machine.neighbours:
        busy += f", beside {machine.neighbours} busy process{'es'[: 2 * (machine.neighbours > 1)]}"
    where = f"{machine.cpu}, {machine.threads} threads,"
    made = f"{result.made_at[:10]}{busy}. Peers: {', '.join(peers) or 'none'} ({'; '.join(versions)})."
    agreement = f"Outputs differ from {result.first}'s somewhere: {', '.join(differing)}."
    forced = [
        "End to end at forced output length, tokens without scores, medians of "
        f"{result.rounds} interleaved rounds with 95 % intervals of the",
        f"ratio, every peer with its best setting for the case; {where}",
        made,
        agreement if differing else "All outputs are equal.",
    ]
    lines = [*natural_conditions(result), where, made] if result.natural else forced
    if memory := {name: arm.peak_bytes for name, arm in result.arms.items() if arm.peak_bytes is not None}:
        lines.append("Peak memory, MB: " + ", ".join(f"{name} {peak / 1e6:.0f}" for name, peak in memory.items()) + ".")
    lines += [f"{name} did not run: {reason}." for name, reason in result.failed.items()]
    return lines


def with_tables(page: str, folder: Path = SOURCES) -> str:
    """The page with every measured table made again from its result in the folder."""

    def table(found: re.Match[str]) -> str:
        begin, result, weights, end = found.groups()
        return f"{begin}{readme_text(result_from_file(folder / result), weights)}{end}"

    return MEASURED.sub(table, page)


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
