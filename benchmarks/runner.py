"""A bundle's backends against each other: the same decode on every arm, outputs compared, then timed in turns.

encoder      session.encode: once per batch of sources
step         session.step as it is halfway through a decode: once per token
end_to_end   encode and search to exactly `target` tokens: what a user waits for, split into its pieces (split.py)
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np

from seq2engine.progress import Progress, silent

from ..errors import RequestError, Seq2EngineError, SessionError
from ..export.bundle import REFERENCE, Bundle, open_bundle
from ..export.contract import GRAPHS
from ..runtime.answers import Answer
from ..runtime.beam import beam_search
from ..runtime.cache import CacheCounts, TreeStep
from ..runtime.generate import generate, padded
from ..runtime.greedy import greedy_search
from ..runtime.lanes import in_lanes
from ..runtime.quality import Quality, References, quality_of_session
from ..runtime.search import Hypothesis, SearchOptions, Special
from ..runtime.session import BACKENDS, Session, State, open_session
from ..runtime.trt_choice import choose_engine
from .cases import Case, case_problems, cases_for, sources_for
from .machine import environment, load_average, usable_cores
from .result import PARTS, Arm, ArmResult, BenchResult, CaseResult, Measure
from .split import PIECES, WatchedSession, WatchedTree
from .timing import Samples, interleaved, ratio_interval

ROUNDS, WARMUP = 20, 2
LEAD = {"encoder": 3, "step": 3, "end_to_end": 0}  # right after another arm a short call takes twice its usual time
REST = 0.05  # seconds; ONNX Runtime's idle workers spin for some 40 ms and would slow down the arm that comes next
NEVER = -1  # no token has this id: as the end token it makes every decode run to its maximum length

Tokens = list[tuple[int, ...]]  # the best hypothesis of every source


def bench_bundle(
    bundle: Bundle | str | os.PathLike[str],
    backends: Sequence[str] = ("torch", "onnxruntime"),
    precisions: Sequence[str] = ("fp32",),
    cases: Sequence[Case] | None = None,
    rounds: int = ROUNDS,
    threads: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    references: References | None = None,
    provider: str | None = None,
) -> BenchResult:
    """Times every backend in every precision on every case; the first of each is what the others are compared with.

    Without `threads` every arm gets all cores this process may use. An arm that fails ends the run. With `references`
    every arm also decodes their texts, with each case's number of beams, and its error rates stand beside its times.
    `provider` is where the arms of ONNX Runtime compute.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    chosen = cases_for(opened.config) if cases is None else tuple(cases)
    threads = usable_cores() if threads is None else threads
    check_bench(opened, backends, precisions, chosen, rounds, threads)
    load_before = load_average()
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        sessions: dict[str, Session] = {}
        for precision in precisions:
            for backend in backends:
                where = provider if backend == "onnxruntime" else None
                name = " ".join(filter(None, (backend, where, precision)))
                progress(f"bench: load {name}", 0.0)
                # Importing the library is not loading the model, and would be charged to the first arm alone.
                import_module(f"seq2engine.runtime.{BACKENDS[backend][0]}")
                started = time.perf_counter()
                with blaming(name, "loading"):
                    sessions[name] = stack.enter_context(
                        open_session(opened, backend, precision, threads, provider=where)
                    )
                load_ms = 1000 * (time.perf_counter() - started)
                arms[name] = Arm(backend, precision, FILES[backend](opened, precision), load_ms)
                progress(f"bench: load {name}", 1.0)
        # Without worker threads nobody spins, so nobody has to wait.
        rest = REST if threads > 1 and len(arms) > 1 else 0.0
        results = tuple(bench_case(sessions, case, rounds, rest, seed, progress) for case in chosen)
        beams = sorted({case.beam for case in chosen})
        quality = {} if references is None else quality_of_arms(opened, sessions, references, beams, progress)
    return BenchResult(
        bundle=str(opened.root),
        checkpoint_sha256=opened.manifest.checkpoint_sha256,
        model=dataclasses.asdict(opened.config),
        cache_form=opened.cache_form,
        arms=arms,
        cases=results,
        quality=quality,
        environment=environment(threads, load_before),
        rounds=rounds,
        warmup=WARMUP,
        seed=seed,
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def quality_of_arms(
    bundle: Bundle, sessions: dict[str, Session], references: References, beams: Sequence[int], progress: Progress
) -> dict[str, tuple[Quality, ...]]:
    tokenizer = bundle.tokenizer()
    found: dict[str, tuple[Quality, ...]] = {}
    for done, (name, session) in enumerate(sessions.items()):
        progress("bench: quality", done / len(sessions))
        with blaming(name, "the references"):
            found[name] = tuple(quality_of_session(session, tokenizer, references, beam) for beam in beams)
    progress("bench: quality", 1.0)
    return found


def reference_bytes(bundle: Bundle, precision: str) -> int:
    return bundle.inside(REFERENCE).stat().st_size


def graph_bytes(bundle: Bundle, precision: str) -> int:
    entries = [bundle.graph(precision, name) for name in GRAPHS]
    return sum(bundle.inside(path).stat().st_size for entry in entries for path in (entry.path, entry.data_path))


def engine_bytes(bundle: Bundle, precision: str) -> int:
    return sum(entry.bytes for entry in choose_engine(bundle, precision, None)[1].engines.values())


# The backends timed here, and what each reads from disk.
FILES = {"torch": reference_bytes, "onnxruntime": graph_bytes, "tensorrt": engine_bytes}


def check_bench(
    bundle: Bundle,
    backends: Sequence[str],
    precisions: Sequence[str],
    cases: Sequence[Case],
    rounds: int,
    threads: int,
) -> None:
    """Refuses what cannot be timed, with every problem in one message, before anything is loaded."""
    problems = []
    for kind, asked, known in (
        ("backend", backends, tuple(FILES)),
        ("precision", precisions, bundle.precisions),
    ):
        if not asked:
            problems.append(f"no {kind} to time")
        problems += [f"{kind} {name!r}, expected one of {', '.join(known)}" for name in asked if name not in known]
        problems += [f"{kind} {name!r} twice" for name in dict.fromkeys(asked) if list(asked).count(name) > 1]
    problems += case_problems(cases, bundle.config)
    problems += [f"{name} {n}, expected at least 1" for name, n in (("rounds", rounds), ("threads", threads)) if n < 1]
    if problems:
        raise RequestError(f"cannot benchmark {bundle.root}: " + "; ".join(problems))


@contextmanager
def blaming(arm: str, where: str) -> Iterator[None]:
    """A failed arm is a failed run; the error says which arm it was."""
    try:
        yield
    except Seq2EngineError as error:
        raise SessionError(f"{arm} failed at {where}, so there is nothing to compare: {error}") from error


def bench_case(
    sessions: dict[str, Session], case: Case, rounds: int, rest: float, seed: int, progress: Progress
) -> CaseResult:
    """Decodes on every arm and compares, then times the three parts."""
    first = next(iter(sessions))
    config = sessions[first].config
    sources = sources_for(case, config, seed)
    options = SearchOptions(max_length=case.target, beam=case.beam)
    usual: dict[str, Tokens] = {}
    fixed: dict[str, FixedDecode] = {}
    stage = f"bench: {case.name}, outputs"
    for done, (name, session) in enumerate(sessions.items()):
        progress(stage, done / len(sessions))
        with blaming(name, f"case {case.name}"):
            usual[name] = best_tokens(generate(session, sources, options))
            fixed[name] = fixed_decode(session, sources, options)
    progress(stage, 1.0)

    ids, mask = padded(sources, config.pad_id)
    calls: dict[str, dict[str, Callable[[], object]]] = {part: {} for part in PARTS}
    splits: dict[str, list[dict[str, int]]] = {name: [] for name in sessions}
    for name, session in sessions.items():
        with blaming(name, f"case {case.name}"):
            calls["encoder"][name] = partial(session.encode, ids, mask)
            calls["step"][name] = repeated_step(session, ids, mask, case, fixed[first].trail)
            calls["end_to_end"][name] = partial(split_decode, splits[name], session, sources, options)
    times = {
        part: interleaved(calls[part], rounds, WARMUP, progress, f"bench: {case.name}, {part}", LEAD[part], rest)
        for part in PARTS
    }
    return CaseResult(
        case,
        {
            name: ArmResult(
                equal=count_equal(usual[name], usual[first]),
                equal_timed=count_equal(fixed[name].tokens, fixed[first].tokens),
                parts={part: measure(times[part], name, first, case, part, seed) for part in PARTS},
                cache=fixed[name].counts,
                split={
                    piece: Samples(tuple(split[piece] for split in splits[name][-rounds:]))  # none of the warm-up
                    for piece in PIECES
                },
            )
            for name in sessions
        },
    )


def measure(times: dict[str, Samples], name: str, first: str, case: Case, part: str, seed: int) -> Measure:
    tokens = {"encoder": case.batch * case.source, "step": case.batch, "end_to_end": case.batch * case.target}
    return Measure(times[name], tokens[part], ratio_interval(times[first], times[name], seed))


def best_tokens(hypotheses: list[list[Hypothesis]]) -> Tokens:
    return [nbest[0].tokens for nbest in hypotheses]


def count_equal(tokens: Tokens, wanted: Tokens) -> int:
    return sum(mine == theirs for mine, theirs in zip(tokens, wanted, strict=True))


@dataclass(frozen=True)
class FixedDecode:
    """A decode that ran to its full length: its tokens, its cache, and the choices (tokens, parents) of every step."""

    tokens: Tokens
    counts: CacheCounts
    trail: list[tuple[np.ndarray, np.ndarray]]


def fixed_decode(
    session: Session, sources: list[list[int]], options: SearchOptions, tree: type[TreeStep] = TreeStep
) -> FixedDecode:
    """`generate`, but no source ends before the maximum length: every arm does the same work, whatever it says."""
    state = session.encode(*padded(sources, session.config.pad_id))
    step = tree(session, state, len(sources), options.beam, options.max_length)
    search = greedy_search if options.beam == 1 else beam_search
    steps = search(step, len(sources), Special(session.config.start_id, NEVER), options)
    trail = []
    while True:
        try:
            emitted = next(steps)
        except StopIteration as finished:
            tokens = best_tokens(finished.value)
            break
        trail.append((emitted.tokens, emitted.parents))
    assert all(len(row) == options.max_length for row in tokens)
    return FixedDecode(tokens, step.counts, trail)


def split_decode(
    splits: list[dict[str, int]], session: Session, sources: list[list[int]], options: SearchOptions
) -> None:
    """A fixed decode, in lanes as a user's would be, whose pieces are added to the list: the mean of its lanes."""

    def part(lane: Session, numbers: list[int]) -> dict[str, int]:
        watched = WatchedSession(lane)
        fixed_decode(cast(Session, watched), [sources[number] for number in numbers], options, WatchedTree)
        return watched.split()

    found = [split for _, split in in_lanes(session, sources, options.beam, part)]
    splits.append({piece: sum(split[piece] for split in found) // len(found) for piece in PIECES})


class SeenSession:
    """A session that keeps what its latest step was given: the inputs, and the state's tensors as they were before."""

    def __init__(self, session: Session):
        self.session = session
        self.given: tuple[State, State, list[np.ndarray]] = ({}, {}, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, state: State, *inputs: np.ndarray) -> Answer:
        self.given = state, dict(state), [array.copy() for array in inputs]
        return self.session.step(state, *inputs)


def repeated_step(
    session: Session, ids: np.ndarray, mask: np.ndarray, case: Case, trail: list[tuple[np.ndarray, np.ndarray]]
) -> Callable[[], Answer]:
    """The step halfway through a decode that made these choices, to be called again and again.

    Every arm follows the first arm's choices, so all of them step over a cache of the same shape and fill.
    """
    seen = SeenSession(session)
    step = TreeStep(cast(Session, seen), session.encode(ids, mask), case.batch, case.beam, case.target)
    start = np.full((case.batch, case.beam), session.config.start_id, dtype=np.int64)
    step(start, np.tile(np.arange(case.beam), (case.batch, 1)))
    for tokens, parents in trail[: case.target // 2]:
        step(tokens, parents)
    state, before, inputs = seen.given

    def again() -> Answer:
        if session.cache_form == "growing":  # the tensors that come out are longer: every call starts from the same
            state.update(before)
        return session.step(state, *inputs)  # a static cache gets the same slots again

    return again
