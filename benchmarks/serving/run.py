"""Measures the arms under load and writes a report: python -m seq2engine.benchmarks.serving.run OUT.html

    saturation   all requests at once: the most that an arm can do
    Poisson      rates that are shares of the saturation of dynamic batching, and beyond: latency at each
    equal p99    the largest rate that each arm serves within the same 99th percentile

The arms take turns at every rate, in an order that changes. Their outputs must have the same lengths; how many have the
same tokens is reported (a random source has many tokens that are nearly as likely).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seq2engine.common.page import page_from_template
from seq2engine.common.tables import text_table
from seq2engine.errors import ConfigError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session

from .arms import ARMS, ROWS
from .load import CLOCKS, Measured, measured_load
from .ragged import LENGTHS, SMALL, RaggedSession, ragged_sources
from .steps import StepCount, step_counts

ONE, KEPT, WHOLE, CONTINUOUS = ARMS
SHARES = (0.3, 0.6, 0.9, 1.2, 1.5, 1.8)  # of dynamic batching's saturation
LIMITS = (2.0, 4.0, 8.0)  # 99th percentiles to compare at: times that of one request at a time, alone
HERE = {"cpu": "in one process, seconds are CPU time", "wall": "in one process, seconds by the clock"}
HEAD = ("arm", "sent/s", "done/s", "p50 ms", "p99 ms")


@dataclass(frozen=True)
class LoadResult:
    """All runs of every arm, the slowest first, and the rates at equal 99th percentiles."""

    saturation: dict[str, list[float]]
    runs: dict[str, list[Measured]]
    alone: float  # seconds of one request at a time without a queue, 99th percentile
    equal: float = 1.0  # share of outputs with the same tokens in the run that has the fewest
    per_cpu_second: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # of a server, all at once
    steps: dict[str, StepCount] = dataclasses.field(default_factory=dict)  # of all requests at once

    def rate_within(self, arm: str, limit: float) -> float:
        """The largest throughput of an arm with a p99 of at most this many seconds, interpolated between two rates."""
        points = sorted((run.percentile(99), run.throughput) for run in self.runs[arm])
        below = [(p99, rate) for p99, rate in points if p99 <= limit]
        above = [(p99, rate) for p99, rate in points if p99 > limit]
        if not below:
            return 0.0
        best = max(below, key=lambda point: point[1])
        if not above or above[0][1] <= best[1]:
            return best[1]
        share = (limit - best[0]) / (above[0][0] - best[0])
        return best[1] + share * (above[0][1] - best[1])

    def equal_p99(self) -> list[tuple[float, float, float]]:
        """Limit in seconds, and the rates of dynamic and of continuous batching."""
        limits = [factor * self.alone for factor in LIMITS]
        return [(limit, self.rate_within(WHOLE, limit), self.rate_within(CONTINUOUS, limit)) for limit in limits]

    def to_json(self) -> str:
        runs = {
            arm: [
                {"sent": run.rate, "done": run.throughput, "p50": run.percentile(50), "p99": run.percentile(99)}
                for run in found
            ]
            for arm, found in self.runs.items()
        }
        values = {
            "saturation": self.saturation,
            "runs": runs,
            "alone_p99": self.alone,
            "equal_outputs": self.equal,
            "equal_p99": self.equal_p99(),
            "requests_per_cpu_second": self.per_cpu_second,
            "steps": {name: dataclasses.asdict(count) for name, count in self.steps.items()},
        }
        return json.dumps(values, indent=2) + "\n"


Measure = Callable[[str, Sequence[Sequence[int]], float, int], Measured]  # of an arm: sources, rate, seed


def load_result(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    rounds: int,
    shares: Sequence[float],
    rows: int = ROWS,
    clock: str = "cpu",
    counts_steps: bool = True,
) -> LoadResult:
    """All arms of this process, over one session."""

    def measure(name: str, sources: Sequence[Sequence[int]], rate: float, seed: int) -> Measured:
        arm = ARMS[name](session, options, rows)
        try:
            return measured_load(arm, sources, rate, seed, clock)
        finally:
            arm.close()

    steps = step_counts(session, sources, options, rows) if counts_steps else {}
    return dataclasses.replace(result_of_arms(measure, tuple(ARMS), sources, rounds, shares), steps=steps)


def result_of_arms(
    measure: Measure, arms: Sequence[str], sources: Sequence[Sequence[int]], rounds: int, shares: Sequence[float]
) -> LoadResult:
    """Saturation of every arm `rounds` times in turn, then Poisson arrivals at shares of dynamic batching's."""
    equal: list[float] = []
    expected: tuple[tuple[int, ...], ...] | None = None
    saturation: dict[str, list[float]] = {name: [] for name in arms}
    runs: dict[str, list[Measured]] = {name: [] for name in arms}

    def run(name: str, rate: float, seed: int, count: int) -> Measured:
        nonlocal expected
        found = measure(name, sources[:count], rate, seed)
        if expected is None:
            expected = found.tokens
        pairs = list(zip(found.tokens, expected, strict=False))
        if any(len(own) != len(other) for own, other in pairs):
            raise ConfigError(f"{name} gives outputs of other lengths than {WHOLE}, so that times cannot be compared")
        equal.append(sum(own == other for own, other in pairs) / len(pairs))
        times = f"p50 {found.percentile(50):.3f} s, p99 {found.percentile(99):.3f} s"
        print(f"{name}: {rate:.1f} requests/s sent, {found.throughput:.1f} done, {times}", file=sys.stderr, flush=True)
        return found

    run(WHOLE, math.inf, 0, len(sources))  # outputs to compare with, and warm-up
    for turn in range(rounds):
        for name in arms if turn % 2 else (*reversed(arms),):
            count = len(sources) // 4 if name in (ONE, KEPT) else len(sources)  # the slow ones
            saturation[name].append(run(name, math.inf, 0, count).throughput)
    most = float(np.median(saturation[WHOLE]))
    slowest = float(np.median(saturation[ONE]))
    alone = run(ONE, slowest / 8, 1, len(sources) // 4)
    for turn, share in enumerate(shares):
        for name in (WHOLE, CONTINUOUS) if turn % 2 else (CONTINUOUS, WHOLE):
            runs[name].append(run(name, share * most, turn, len(sources)))
    for share in (0.3, 0.6):
        runs[ONE].append(run(ONE, share * slowest, 1, len(sources) // 4))
    return LoadResult(saturation, runs, alone.percentile(99), min(equal))


def run_rows(result: LoadResult) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{run.rate:.1f}",
            f"{run.throughput:.1f}",
            f"{1000 * run.percentile(50):.0f}",
            f"{1000 * run.percentile(99):.0f}",
        )
        for name, found in result.runs.items()
        for run in found
    ]


def saturation_rows(rates: dict[str, list[float]]) -> list[tuple[str, ...]]:
    base = float(np.median(rates[WHOLE])) if rates else math.nan
    return [
        (name, f"{np.median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}", f"{np.median(found) / base:.2f}x")
        for name, found in rates.items()
    ]


def equal_rows(result: LoadResult) -> list[tuple[str, ...]]:
    return [
        (f"{1000 * limit:.0f}", f"{whole:.1f}", f"{ours:.1f}", f"{ours / whole:.2f}x" if whole else "not reached")
        for limit, whole, ours in result.equal_p99()
    ]


def step_rows(result: LoadResult) -> list[tuple[str, ...]]:
    return [
        (name, f"{count.steps:,}", f"{count.rows:,}", f"{count.rows / count.steps:.1f}")
        for name, count in result.steps.items()
    ]


CPU_HEAD = ("arm", "requests/s of CPU time", "spread", "against dynamic batching")
STEPS_HEAD = ("arm", "decoder steps", "rows of all steps", "rows a step")
SATURATION_HEAD = ("arm", "requests/s", "spread", "against dynamic batching")
EQUAL_HEAD = ("p99 at most, ms", "dynamic batching, requests/s", "continuous batching, requests/s", "ratio")


def report_text(result: LoadResult) -> str:
    return "\n\n".join(
        (
            text_table(SATURATION_HEAD, saturation_rows(result.saturation)),
            *([text_table(CPU_HEAD, saturation_rows(result.per_cpu_second))] if result.per_cpu_second else []),
            text_table(HEAD, run_rows(result)),
            text_table(EQUAL_HEAD, equal_rows(result)),
            *([text_table(STEPS_HEAD, step_rows(result))] if result.steps else []),
        )
    )


def report_html(result: LoadResult, config: ModelConfig, asked: argparse.Namespace, where: str) -> str:
    lengths = LENGTHS[asked.lengths]
    values = {
        "title": "Continuous batching under load",
        "subtitle": (
            f"{asked.count} requests with Poisson arrivals, greedy, sources and outputs of 1 to {lengths.most} tokens "
            f"({asked.lengths}); {config.shape}, ONNX Runtime {asked.precision}, {asked.threads} "
            f"thread{'s' if asked.threads > 1 else ''}, at most {asked.rows} rows; {where}."
        ),
        "saturation_head": SATURATION_HEAD,
        "saturation": saturation_rows(result.saturation),
        "cpu_head": CPU_HEAD,
        "cpu": saturation_rows(result.per_cpu_second),
        "head": HEAD,
        "runs": run_rows(result),
        "outputs": f"{result.equal:.1%}",
        "equal_head": EQUAL_HEAD,
        "equal": equal_rows(result),
        "steps_head": STEPS_HEAD,
        "steps": step_rows(result),
    }
    return page_from_template("seq2engine.benchmarks.serving", "load.html", values)


def arguments_parser(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="report, .html; a .json beside it")
    parser.add_argument("--bundle", type=Path, help="another model than a small random one; outputs keep their lengths")
    parser.add_argument("--precision", default="fp32", help="of the bundle (default: %(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="rates, of dynamic batching's most")
    parser.add_argument("--count", type=int, default=256, help="requests of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the saturation (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the decode (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="most requests at once (default: %(default)s)")
    parser.add_argument(
        "--lengths", choices=LENGTHS, default="sentences", help="sentences, or one paragraph to nine of them"
    )
    return parser


def write_report(args: argparse.Namespace, result: LoadResult, config: ModelConfig, where: str) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report_html(result, config, args, where))
    args.out.with_suffix(".json").write_text(result.to_json())
    print(report_text(result))
    print(f"\nreport: {args.out}")


def main() -> None:
    parser = arguments_parser("Load benchmark of the scheduler")
    parser.add_argument("--clock", choices=CLOCKS, help="what seconds are (default: cpu with one thread, else wall)")
    parser.add_argument(
        "--no-steps", action="store_true", help="do not count decoder steps, which decodes all once more"
    )
    args = parser.parse_args()
    clock = args.clock or ("cpu" if args.threads == 1 else "wall")
    with tempfile.TemporaryDirectory() as folder:
        if args.bundle is None:
            bundle = onnx_from_model(random_model(SMALL, 0), Path(folder) / "b", ("fp32",))
        else:
            bundle = open_bundle(args.bundle)
        with RaggedSession.from_bundle(bundle, args.precision, threads=args.threads) as session:
            lengths = LENGTHS[args.lengths]
            sources = ragged_sources(bundle.config, args.count, lengths=lengths)
            options = SearchOptions(max_length=min(lengths.most, bundle.config.max_target), scores=False)
            result = load_result(
                session, sources, options, args.rounds, args.shares, args.rows, clock, not args.no_steps
            )
    write_report(args, result, bundle.config, HERE[clock])


if __name__ == "__main__":
    main()
