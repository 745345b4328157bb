"""The measured table of a result on real sentences, for README: speed and quality."""

from __future__ import annotations

from ..natural.result import Likeness, NaturalArm, NaturalResult, whole_ratio
from ..result import Arm, BenchResult
from .tables import interval_of, number


def natural_table(result: BenchResult, title: str, ours: str, theirs: dict[str, str]) -> list[str]:
    """A row for every workload and precision: our fastest arm against the fastest peer of a comparable precision."""
    head = [title, "ours", "tokens/s", "best peer", "tokens/s", "times as fast", "equal to fp32, chrF: ours", "peer"]
    precisions = list(dict.fromkeys(arm.precision for arm in result.arms.values() if arm.backend == ours))
    rows = []
    for precision in precisions:
        like = theirs.get(precision, precision)
        for found in result.natural:
            mine = fastest(
                found, {n: a for n, a in result.arms.items() if (a.backend, a.precision) == (ours, precision)}
            )
            peer = fastest(found, {n: a for n, a in result.arms.items() if a.peer and a.precision == like})
            if mine is not None:
                rows.append([f"{found.workload}, {precision}", *cells(result, found, mine, peer)])
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def fastest(found: NaturalResult, arms: dict[str, Arm]) -> str | None:
    there = [name for name in arms if name in found.arms]
    return max(there, key=lambda name: found.arms[name].tokens_per_second, default=None)


def cells(result: BenchResult, found: NaturalResult, mine: str, peer: str | None) -> list[str]:
    own = found.arms[mine]
    draft = result.arms[mine].draft
    what = f"draft {draft}" if draft else "plain"
    if peer is None:
        return [what, number(own.tokens_per_second), "none ran", "", "", quality_text(own.likeness), ""]
    their = found.arms[peer]
    ratio = whole_ratio(their.samples, own.samples)
    unsure = ", unsure" if ratio.verdict == "unsure" else ""
    return [
        what,
        number(own.tokens_per_second),
        peer,
        number(their.tokens_per_second),
        f"{ratio.value:.2f} ({interval_of(ratio)}{unsure})",
        quality_text(own.likeness),
        quality_text(their.likeness),
    ]


def quality_text(likeness: Likeness) -> str:
    return f"{likeness.equal} of {likeness.lines}, {likeness.chrf:.1f}"


def natural_conditions(result: BenchResult) -> list[str]:
    """The lines below the table: how it was measured, and the quality on the references."""
    lines = [
        "Real sentences, each decoded to its own end, tokens without scores. Times as fast: all calls together, with",
        "the 95 % interval of a call's ratio; every peer with its best setting. chrF is against fp32's outputs.",
    ]
    if result.natural:
        last = result.natural[-1]
        scores = [f"{name} {reference_text(arm)}" for name, arm in last.arms.items()]
        lines.append(f"chrF / BLEU against the references, {last.workload}: {', '.join(scores)}.")
    return lines


def reference_text(arm: NaturalArm) -> str:
    return f"{arm.likeness.reference_chrf:.1f} / {arm.likeness.reference_bleu:.1f}"
