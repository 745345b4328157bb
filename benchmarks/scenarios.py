"""Usage scenarios after MLPerf LoadGen, on sources of mixed lengths, each decoded to its end token.

    single    one query after another, the next as soon as the last is done: time to the first token, per token, in all
    offline   all sources are there at once: sources and tokens per second, with the batch kept full
    server    queries come at random (Poisson) to one worker, which takes them one by one in their order: the largest
              rate at which 99 % of them are done within a bound, counted from their arrival

All arms decode the same sources, in turns. A server's queries are drawn from the times of these real decodes, and only
their waiting is computed: rates can be searched without waiting, and all arms get the same arrivals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import UsageError
from seq2engine.model.config import ModelConfig
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.text.sources import random_sources

from .cases import Case, Sources, ordinary_ids
from .timed_decode import case_options
from .timing import Samples, interleaved

SCENARIOS = ("single", "offline", "server")
QUERIES = 32  # sources that are decoded
DRAWN = 20_000  # queries of a server, so that its slowest hundredth is two hundred of them
PATIENCE = 4.0  # times the first arm's median latency: a server's bound where none is given
HALVINGS = 30  # of the interval that holds the largest rate
OFFLINE_ROUNDS = 3


@dataclass(frozen=True)
class Scenario:
    """What one arm did in one scenario: figures by name, and the times they come from."""

    scenario: str
    arm: str
    figures: dict[str, float]
    samples: dict[str, Samples] = field(default_factory=dict)


def scenario_problems(names: Sequence[str], bound_ms: float | None) -> list[str]:
    """What is wrong with scenarios that are asked for."""
    found = []
    if wrong := [name for name in names if name not in SCENARIOS]:
        found.append(f"unknown scenario {', '.join(wrong)}, expected some of {', '.join(SCENARIOS)}")
    if bound_ms is not None and not 0 < bound_ms < math.inf:
        found.append(f"a bound of {bound_ms:g} ms, expected more than 0")
    if bound_ms is not None and "server" not in names:
        found.append("a bound without the scenario server, expected both")
    return found


@dataclass(frozen=True)
class ScenarioOptions:
    """Which scenarios to run. `bound_ms` is the p99 latency of a server (None: derived from the first arm)."""

    names: Sequence[str] = ()
    bound_ms: float | None = None
    queries: int = QUERIES
    seed: int = 0
    forced_bos: int | None = None  # first token of every output (None: the model's own)


def run_scenarios(
    asked: ScenarioOptions,
    sessions: Mapping[str, Session],
    cases: Sequence[Case],
    speculative: Collection[str] = (),
    progress: Progress = silent,
) -> tuple[Scenario, ...]:
    """Every scenario on every arm, with sources up to the first case's length, its beams, and outputs up to its target.

    Speculative decoding changes nothing but single sources with one beam; elsewhere these arms are left out.
    """
    names, bound_ms, seed = asked.names, asked.bound_ms, asked.seed
    if problems := scenario_problems(names, bound_ms):
        raise UsageError("; ".join(problems))
    if not names:
        return ()
    case = cases[0]
    plain = {name: session for name, session in sessions.items() if name not in speculative}
    session = next(iter(sessions.values()))
    sources = ragged_sources(case, session.config, asked.queries, seed)
    options = case_options(session, case, forced_bos=asked.forced_bos)
    found: list[Scenario] = []
    if "single" in names or "server" in names:
        streams = single_streams(sessions if case.beam == 1 else plain, sources, options, progress)
        if "single" in names:
            found += [Scenario("single", name, stream_figures(times), times) for name, times in streams.items()]
        if "server" in names:
            whole = {name: times["end_to_end"] for name, times in streams.items()}
            bound = bound_ms or PATIENCE * next(iter(whole.values())).median
            found += [Scenario("server", name, server_figures(times, bound, seed)) for name, times in whole.items()]
    if "offline" in names:
        found += offline(plain, sources, options, progress)
    return tuple(found)


def ragged_sources(case: Case, config: ModelConfig, count: int, seed: int) -> Sources:
    """Sources from a quarter of the case's length to all of it, the same everywhere; features have one length."""
    if config.takes_features:
        return random_sources(config, count, seed)
    ids, generator = ordinary_ids(config), np.random.default_rng([seed, case.source])
    lengths = generator.integers(max(1, case.source // 4), case.source, count, endpoint=True)
    return [ids[generator.integers(0, len(ids), length)].tolist() for length in lengths]


def single_streams(
    sessions: Mapping[str, Session], sources: Sources, options: SearchOptions, progress: Progress
) -> dict[str, dict[str, Samples]]:
    """Times of every query on every arm, in nanoseconds; for each query the arms take turns in another order."""
    taken: dict[str, list[tuple[int, int, int]]] = {name: [] for name in sessions}
    names = list(sessions)
    for session in sessions.values():
        one_query(session, sources[0], options)  # warm-up
    for place, source in enumerate(sources):
        progress("bench: single stream", place / len(sources))
        first = place % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(one_query(sessions[name], source, options))
    progress("bench: single stream", 1.0)
    parts = ("first_token", "per_token", "end_to_end")
    return {
        name: {part: Samples(tuple(times)) for part, times in zip(parts, zip(*rows, strict=True), strict=True)}
        for name, rows in taken.items()
    }


def one_query(session: Session, source: Any, options: SearchOptions) -> tuple[int, int, int]:
    """Nanoseconds to the first step's end, of every later step on average, and of the whole decode."""
    stamps: list[int] = []

    def stamp(_: Emitted) -> None:
        stamps.append(time.perf_counter_ns())

    started = time.perf_counter_ns()
    generate(session, [source], options, on_step=stamp)
    ended = time.perf_counter_ns()
    return stamps[0] - started, (ended - stamps[0]) // max(1, len(stamps) - 1), ended - started


def stream_figures(times: Mapping[str, Samples]) -> dict[str, float]:
    """LoadGen judges a single stream by its p90."""
    return {
        f"{part}_{name}_ms": samples.percentile(percent)
        for part, samples in times.items()
        for name, percent in (("p50", 50), ("p90", 90), ("p99", 99))
    }


def offline(
    sessions: Mapping[str, Session], sources: Sources, options: SearchOptions, progress: Progress
) -> list[Scenario]:
    tokens: dict[str, int] = {}

    def whole_corpus(name: str) -> None:
        answers = translate_many(sessions[name], sources, options)
        tokens[name] = sum(len(hypotheses[0].tokens) for _, hypotheses in answers)

    calls = {name: lambda name=name: whole_corpus(name) for name in sessions}
    times = interleaved(calls, OFFLINE_ROUNDS, 1, progress, "bench: offline")
    return [
        Scenario(
            "offline",
            name,
            {
                "sources_per_second": 1000 * len(sources) / samples.median,
                "tokens_per_second": 1000 * tokens[name] / samples.median,
            },
            {"corpus": samples},
        )
        for name, samples in times.items()
    ]


def server_figures(service: Samples, bound_ms: float, seed: int) -> dict[str, float]:
    """The largest rate whose p99 keeps the bound, and the latencies at it; rate 0 where no rate does."""
    generator = np.random.default_rng(seed)
    gaps = generator.exponential(1.0, DRAWN)  # arrivals at one query per second, scaled by the rate
    work = generator.choice(np.array(service.nanoseconds) / 1e9, DRAWN)  # seconds
    low, high = 0.0, 1 / float(work.mean())  # upper bound: above it the queue grows without limit
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        late = float(np.percentile(latencies(gaps / middle, work), 99)) * 1000 > bound_ms
        low, high = (low, middle) if late else (middle, high)
    rate = 0.0 if float(np.percentile(work, 99)) * 1000 > bound_ms else low
    at_rate = latencies(gaps / rate, work) if rate else work
    percentiles = {f"p{p}_ms": 1000 * float(np.percentile(at_rate, p)) for p in (50, 90, 99)}
    return {"queries_per_second": rate, "bound_ms": bound_ms, **percentiles}


def latencies(gaps: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Seconds from arrival to end of every query, with one worker that takes them in order.

    Query i ends at max over j <= i of (arrival j + the work of j to i): it is the latest j to find the worker idle.
    """
    arrivals, done = np.cumsum(gaps), np.cumsum(work)
    return np.maximum.accumulate(arrivals - (done - work)) + done - arrivals
