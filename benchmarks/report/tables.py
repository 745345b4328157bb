"""The texts and numbers of a benchmark's reports, shared by terminal and page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from seq2engine.common.about import HASH_LENGTH
from seq2engine.model.config import config_from_dict
from seq2engine.runtime.quality.metrics import quality_head, quality_row

from ..intervals import COVERAGE, fewest_rounds
from ..natural.result import Likeness
from ..result import PARTS, BenchResult, CaseResult, Curve, slots_of_greedy, winner
from ..timed_decode import PIECES
from ..timing import Ratio

LABELS = {"encoder": "encoder", "step": "decoder step", "end_to_end": "end to end"}
AXIS_LABELS = {"batch": "batch size", "beam": "beams", "source": "source length", "target": "output length"}
HEAD = ("part", "arm", "median ms", "p90", "p99", "spread", "tokens/s", "of ceiling")
SPLIT_HEAD = ("arm", *PIECES, "compactions", "live slots", "slots", "slots vs greedy")
CURVE_HEAD = ("ms per token against", "at", "arm", "costs", "growth")
ARM_HEAD = ("arm", "on disk", "load", "peak memory", "export", "build", "version")


def measures(result: BenchResult, case: CaseResult) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """Arm, part and the cells under HEAD of every measurement of a case."""
    for part in PARTS:
        for arm, found in case.arms.items():
            if part in found.parts:
                measure = found.parts[part]
                times = measure.samples
                cells = (
                    LABELS[part],
                    arm,
                    *(number(value) for value in (times.median, times.p90, times.p99)),
                    f"{times.spread:.0%}",
                    f"{measure.tokens_per_second:,.0f}",
                    fraction_text(result.of_ceiling(case, arm, part)),
                )
                yield arm, part, cells


def fraction_text(fraction: float | None) -> str:
    """A time below the measured bound is "reached": the bound was measured while the machine was busy."""
    return "" if fraction is None else "reached" if fraction > 1 else f"{fraction:.0%}"


def split_rows(case: CaseResult) -> list[tuple[str, ...]]:
    """Under SPLIT_HEAD: the pieces of a decode and the use of its cache, for arms that have them."""
    return [
        (
            name,
            *(f"{number(times.median)} ms, {share_text(arm.share(piece))}" for piece, times in arm.split.items()),
            *map(str, (arm.cache.compactions + arm.cache.growths, arm.cache.most_live, arm.cache.most_slots)),
            f"{slots_of_greedy(case.case, arm.cache):.2f}x",
        )
        for name, arm in case.arms.items()
        if arm.cache is not None
    ]


def share_text(share: float) -> str:
    return f"{100 * share:.1f}%"


def curve_rows(curves: Iterable[Curve]) -> list[tuple[str, ...]]:
    return [
        (
            AXIS_LABELS[curve.axis],
            curve.case,
            curve.arm,
            ", ".join(f"{size}: {number(cost)}" for size, cost in curve.costs.items()),
            f"{curve.growth:.2f}x",
        )
        for curve in curves
    ]


SCENARIO_HEADS = {
    "single": (
        "single stream, ms",
        *(f"{part} {p}" for part in ("first token", "per token") for p in ("p50", "p90")),
        *(f"end to end {p}" for p in ("p50", "p90", "p99")),
    ),
    "offline": ("offline", "sources/s", "tokens/s"),
    "server": ("server", "queries/s", "bound, ms", "p50, ms", "p90", "p99"),
}
SCENARIO_FIGURES = {
    "single": (
        *(f"{part}_{p}_ms" for part in ("first_token", "per_token") for p in ("p50", "p90")),
        *(f"end_to_end_{p}_ms" for p in ("p50", "p90", "p99")),
    ),
    "offline": ("sources_per_second", "tokens_per_second"),
    "server": ("queries_per_second", "bound_ms", "p50_ms", "p90_ms", "p99_ms"),
}


NO_RATE = "none"  # however few the queries
SCENARIO_NOTES = (
    "Sources of mixed lengths, each decoded to its end token, with the sizes of the first case; definitions after "
    "MLPerf LoadGen. Single stream: the next query starts when the last is done. Offline: all sources are available at "
    "once.",
    "Server: queries arrive at random (Poisson) and one worker serves them in order; queries per second are the "
    "largest rate at which 99 % finish within the bound, the same for all arms; “none” if single decodes take longer "
    "than that. Waiting times are computed from the times of real decodes.",
)


def scenario_rows(result: BenchResult, scenario: str) -> list[tuple[str, ...]]:
    """Under the scenario's head, one row for every arm; none where it was not run."""
    return [
        (found.arm, *(figure_text(name, found.figures[name]) for name in SCENARIO_FIGURES[scenario]))
        for found in result.scenarios
        if found.scenario == scenario
    ]


def figure_text(name: str, value: float) -> str:
    return NO_RATE if name == "queries_per_second" and value == 0 else number(value)


NATURAL_HEAD = (
    "real sentences",
    "arm",
    "tokens/s",
    "p50, ms",
    "p90",
    "p99",
    "times as fast",
    "equal outputs",
    "their chrF",
    "BLEU",
    "chrF",
    "BLEU of references",
    "best setting",
)
NATURAL_NOTE = (
    "Real sentences in file order, each decoded to its end token; a call decodes one batch, and a turn of an "
    "arm is a quarter of a second. Times as fast: all calls together, with the interval of a call's ratio. Equal "
    "outputs, chrF and BLEU are against the first arm's outputs, then chrF and BLEU against the references."
)


def natural_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Under NATURAL_HEAD."""
    return [
        (
            str(found.workload),
            name,
            number(arm.tokens_per_second),
            *(number(arm.samples.percentile(percent)) for percent in (50, 90, 99)),
            "1" if name == next(iter(found.arms)) else interval_text(arm.speedup),
            f"{arm.likeness.equal} of {arm.likeness.lines}",
            *(f"{value:.1f}" for value in likeness_scores(arm.likeness)),
            arm.setting,
        )
        for found in result.natural
        for name, arm in found.arms.items()
    ]


def likeness_scores(likeness: Likeness) -> tuple[float, ...]:
    return likeness.chrf, likeness.bleu, likeness.reference_chrf, likeness.reference_bleu


def arm_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Under ARM_HEAD: size, memory and build times of an arm."""
    return [
        (
            name,
            f"{arm.bytes / 1e6:.1f} MB",
            f"{number(arm.load_ms)} ms",
            "" if arm.peak_bytes is None else f"{arm.peak_bytes / 1e6:.0f} MB",
            "" if arm.export_seconds is None else f"{number(arm.export_seconds)} s",
            "" if arm.build_seconds is None else f"{number(arm.build_seconds)} s",
            arm.version,
        )
        for name, arm in result.arms.items()
    ]


def settings_text(case: CaseResult) -> str:
    """The best settings of every peer, in one sentence; empty without peers."""
    chosen = [f"{name} with {arm.setting}" for name, arm in case.arms.items() if arm.setting]
    return f"best settings: {'; '.join(chosen)}" if chosen else ""


def ceiling_text(result: BenchResult) -> str:
    found = result.ceiling
    if found is None:
        return ""
    flops, threads = found.flops_per_second / 1e9, result.environment.threads
    rates = ", ".join(f"{rate / 1e9:.1f} of {size / 2**20:g} MB" for size, rate in found.cached)
    read = f"{found.read_bytes_per_second / 1e9:.1f} GB/s read from memory" + (f" ({rates})" if rates else "")
    return f"ceiling with {threads} thread{'s'[: threads > 1]}: {read}, {flops:.0f} GFLOP/s in fp32 products"


def failed_text(result: BenchResult) -> list[str]:
    return [f"{name} did not run: {reason}" for name, reason in result.failed.items()]


def interrupted_text(result: BenchResult) -> list[str]:
    return [f"{result.interrupted}; scenarios, error rates and memory are missing"] if result.interrupted else []


def versus(case: CaseResult, arm: str, part: str, first: str) -> str:
    return "1" if arm == first else interval_text(case.arms[arm].parts[part].speedup)


def interval_text(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x ({interval_of(ratio)})"


def interval_of(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.rounds} rounds, an interval needs {fewest_rounds()}"
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def outputs_text(case: CaseResult, arm: str) -> str:
    if case.same(arm):
        return "equal"
    found = case.arms[arm]
    return f"DIFFER: {found.equal} and {found.equal_timed} of {case.case.batch} equal"


def winner_text(case: CaseResult, part: str) -> str:
    found = winner(case, part)
    if found is None:
        return "there is only one arm"
    best, second, ratio = found
    caution = "" if case.same(best) else ", but its outputs differ"
    if ratio.low is None:
        return f"{best} took the least time, but {ratio.rounds} rounds are too few to be sure{caution}"
    if ratio.verdict == "unsure":
        return f"unsure whether {best} or {second} is faster, {interval_text(ratio)}{caution}"
    return f"{best} is fastest, {interval_text(ratio)} over {second}{caution}"


def quality_heads(result: BenchResult) -> tuple[str, ...]:
    return ("arm", *quality_head(next(iter(result.quality.values()))))


def quality_rows(result: BenchResult) -> list[tuple[str, ...]]:
    return [(name, *quality_row(quality)) for name, found in result.quality.items() for quality in found]


def explanation(result: BenchResult) -> tuple[str, ...]:
    return (
        f"Arms take turns, once per round, in rotating order. Times are milliseconds per call over {result.rounds} "
        "rounds, so p99 is close to the slowest call. Bars are medians, whiskers p10 to p90; spread is p90 - p10 "
        "relative to the median. An arm against another is a ratio of medians (above 1 is faster) with its exact "
        f"{COVERAGE:.0%} confidence interval: by the sign test on the ratios per round; with fewer than six rounds "
        f"by the rank-sum test; none with fewer than {fewest_rounds()}. The verdict is “unsure” unless the interval "
        "excludes 1. Tokens per second are source tokens for the encoder, else tokens of the best hypotheses.",
        f"Outputs are compared with those of {result.first} before anything is timed: once with the model's own "
        "stopping, and once at the fixed length that is timed end to end, where no source ends early, so that every"
        " arm does the same work. Decodes use the model's own defaults except for the number of beams; in "
        "comparisons with peers, which get only the weights, they do not. The decoder step is the one halfway "
        "through a decode, repeated.",
        "End to end is one call of `generate`. It consists of the encoder, the decoder steps, compaction (live "
        "slots of the KV cache are gathered, or moved to a longer cache), other copies of caches, and the search, "
        "which is the rest. Slots are the most of one source, live and allocated; greedy search needs one for every"
        " output token.",
        "A peer is another library with the same weights in its own process, with its best settings for each case. "
        "It is timed end to end only, and its outputs are compared with ours in its own style of beam search. No "
        "peer can ignore the end token, so at the fixed length it is forbidden until the last position.",
        "The ceiling is the shortest possible time on this machine: every weight read once per step at the "
        "bandwidth measured for a working set of that size (or from the processor's cache), or multiplied with "
        "every row at the measured peak of matmuls, whichever takes longer. “Reached” is a time below that bound, "
        "which happens if the machine was slower while the bound was measured.",
        "Peak memory is that of a separate process: ours decodes every case twice in it; a peer's is the one timed.",
    )


def conditions(result: BenchResult) -> str:
    machine = result.environment
    return f"{machine.cpu}, {machine.threads} of {machine.cores} cores, {result.rounds} rounds, {when(result)}"


def when(result: BenchResult) -> str:
    return result.made_at.replace("T", " ").replace("+00:00", " UTC")


def busy_text(result: BenchResult) -> str:
    machine = result.environment
    return (
        f"the machine was busy when the run began (load {machine.load_before} on {machine.cores} cores): "
        "compare arms with each other; single times are unreliable"
    )


def model_text(result: BenchResult) -> str:
    return f"{config_from_dict(result.model).shape}, {result.cache_form} cache"


def about_rows(result: BenchResult) -> list[tuple[str, str]]:
    """The rows at the top of the report."""
    machine = result.environment
    versions = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    return [
        ("model", f"{Path(result.bundle).name}, {model_text(result)}"),
        ("checkpoint", result.checkpoint_sha256[:HASH_LENGTH]),
        ("date", when(result)),
        ("versions", versions + (f", commit {machine.commit}" if machine.commit else "")),
        ("machine", f"{machine.cpu}, {machine.threads} of {machine.cores} cores, Python {machine.python}"),
        ("rounds", str(result.rounds)),
    ]


def environment_rows(result: BenchResult) -> list[tuple[str, str]]:
    machine = result.environment
    return [
        ("processor", machine.cpu),
        ("instruction sets", ", ".join(machine.features) or "unknown"),
        ("cores", f"{machine.cores}, of which each arm was given {machine.threads}"),
        ("governor", machine.governor or "unknown"),
        ("busy neighbours", str(machine.neighbours)),
        ("load before and after", f"{machine.load_before} and {machine.load_after}"),
        ("system", machine.platform),
        ("Python", machine.python),
        *machine.libraries.items(),
        ("model", model_text(result)),
        ("checkpoint", f"sha256 {result.checkpoint_sha256[:HASH_LENGTH]}"),
        ("commit", machine.commit or "unknown"),
        ("rounds, warm-up, seed", f"{result.rounds}, {result.warmup}, {result.seed}"),
        ("measured at", when(result)),
    ]


def number(value: float) -> str:
    """Three significant digits: 0.0123, 0.123, 1.23, 12.3, 123, 1234; 0 or less is 0."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
