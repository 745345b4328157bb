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
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import Seq2EngineError, SessionError
from seq2engine.export.artifact.bundle import REFERENCE, Bundle, open_bundle
from seq2engine.export.artifact.default_precision import shared_precision
from seq2engine.export.artifact.profiles import Workload
from seq2engine.export.contract import GRAPHS
from seq2engine.runtime.backends import BACKENDS
from seq2engine.runtime.generate import generate, padded
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.quality.metrics import Quality, References, quality_of_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session
from seq2engine.runtime.trt.selection import choose_engine

from .cases import Case, cases_for, sources_for
from .ceiling import ceiling_of
from .checks import Asked, check_bench
from .cost import build_seconds, export_seconds, peak_of_arm
from .machine import environment, load_average, usable_cores
from .peers.arms import WIDTHS, PeerDecode, Peers, decode_with_peers, open_peers
from .peers.processes import ENVIRONMENTS
from .result import PARTS, Arm, ArmResult, BenchResult, CaseResult, Measure
from .scenarios import QUERIES, run_scenarios
from .split import PIECES
from .timed_decode import FixedDecode, Tokens, best_tokens, fixed_decode, options_of, repeated_step, split_decode
from .timing import Samples, interleaved, ratio_interval

ROUNDS, WARMUP = 20, 2
LEAD = {"encoder": 3, "step": 3, "end_to_end": 0}  # right after another arm a short call takes twice its usual time
REST = 0.05  # seconds; ONNX Runtime's idle workers spin for some 40 ms and would slow down the arm that comes next


def bench_bundle(
    bundle: Bundle | str | os.PathLike[str],
    backends: Sequence[str] = ("torch", "onnxruntime"),
    precisions: Sequence[str] | None = None,
    cases: Sequence[Case] | None = None,
    rounds: int = ROUNDS,
    threads: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    references: References | None = None,
    provider: str | None = None,
    peers: Sequence[str] = (),
    environments: Path = ENVIRONMENTS,
    quick: bool = True,
    export_times: bool = False,
    scenarios: Sequence[str] = (),
    bound_ms: float | None = None,
    queries: int = QUERIES,
    draft: str | None = None,
    keep: Callable[[BenchResult], object] = lambda result: None,
) -> BenchResult:
    """Times every backend in every precision on every case; the first of each is what the others are compared with.

    Without `precisions`, the most precise that serves all backends is timed; without `threads` every arm gets all
    cores this process may use. An arm that fails ends the run. With `references` every arm also decodes their texts,
    with each case's number of beams, and its error rates stand beside its times. `provider` is where the arms of ONNX
    Runtime compute. `peers` are other libraries with the same weights, timed end to end among our arms: names, or
    "all", of which those that fail are listed as failed. What is not `quick` also takes the machine's ceiling and
    every arm's peak memory in a process of its own; `export_times` exports again. `scenarios` (scenarios.py) take the
    sizes of the first case; `bound_ms` is a server's. A `draft` precision gives the others on ONNX Runtime one more
    arm each, in cases with one source and one beam: speculative decoding. `keep` gets the finished cases after each
    of them, as a result that is marked as interrupted: what is left of a run that does not come to its end.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    chosen = cases_for(opened.config) if cases is None else tuple(cases)
    threads = usable_cores() if threads is None else threads
    named = [shared_precision(opened, backends)] if precisions is None else precisions
    with_what = (scenarios, bound_ms, peers, environments, provider, draft)
    check_bench(opened, Asked(backends, named, chosen, rounds, threads, *with_what))
    if references is not None:
        opened.tokenizer()  # raises where there is none
    result = empty_result(opened, rounds, threads, seed)
    if not quick:
        result = dataclasses.replace(result, ceiling=ceiling_of(threads))
    with ExitStack() as stack:
        theirs = stack.enter_context(open_peers(peers, opened, threads, progress, environments))
        wanted = wanted_arms(backends, named, draft)
        arms, sessions = open_arms(stack, opened, wanted, threads, provider, largest_of(chosen), progress)
        # Without worker threads nobody spins, so nobody has to wait.
        rest = REST if threads > 1 and len(arms) + len(theirs.running) > 1 else 0.0
        done: list[CaseResult] = []
        for case in chosen:
            done.append(bench_case(sessions_for(case, sessions, arms), theirs, case, rounds, rest, seed, progress))
            timed = arms | {name: arm_of_peer(theirs, name) for name in theirs.timed}
            mark = f"interrupted after {len(done)} of {len(chosen)} cases"
            result = dataclasses.replace(result, arms=timed, failed=dict(theirs.failed), cases=tuple(done))
            keep(dataclasses.replace(result, interrupted=mark))
        drafted = [name for name, arm in arms.items() if arm.draft is not None]
        streams = run_scenarios(scenarios, sessions, chosen[0], bound_ms, seed, queries, progress, drafted)
        beams = sorted({case.beam for case in chosen})
        quality = {} if references is None else quality_of_arms(opened, sessions, references, beams, progress)
    costs = {}
    for number, name in enumerate(sessions):
        progress("bench: memory", number / len(sessions))
        if not quick:
            arms[name] = with_peak(arms[name], opened, threads, provider, chosen, seed)
        costs[name] = with_times(arms[name], opened, export_times)
    progress("bench: memory", 1.0)
    return dataclasses.replace(
        result,
        arms=result.arms | costs,
        quality=quality,
        scenarios=streams,
        environment=environment(threads, result.environment.load_before),
        made_at=now_text(),
    )


def empty_result(bundle: Bundle, rounds: int, threads: int, seed: int) -> BenchResult:
    """What is known before anything is timed."""
    return BenchResult(
        bundle=str(bundle.root),
        checkpoint_sha256=bundle.manifest.checkpoint_sha256,
        model=dataclasses.asdict(bundle.config),
        cache_form=bundle.cache_form,
        arms={},
        failed={},
        cases=(),
        quality={},
        ceiling=None,
        scenarios=(),
        environment=environment(threads, load_average()),
        rounds=rounds,
        warmup=WARMUP,
        seed=seed,
        made_at=now_text(),
    )


def largest_of(cases: Sequence[Case]) -> Workload:
    """What an engine must take to be timed on all cases."""
    return Workload(*(max(getattr(case, size) for case in cases) for size in ("batch", "beam", "source", "target")))


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def open_arms(
    stack: ExitStack,
    bundle: Bundle,
    wanted: Sequence[tuple[str, str, str | None]],
    threads: int,
    provider: str | None,
    workload: Workload,
    progress: Progress,
) -> tuple[dict[str, Arm], dict[str, Session]]:
    """Opens our arms, which the stack closes, and notes what each loaded and how long that took."""
    arms: dict[str, Arm] = {}
    sessions: dict[str, Session] = {}
    for backend, precision, guesses in wanted:
        where = provider if backend == "onnxruntime" else None
        name = " ".join(filter(None, (backend, where, precision, guesses and f"drafts {guesses}")))
        progress(f"bench: load {name}", 0.0)
        # Importing the library is not loading the model, and would be charged to the first arm alone.
        import_module(f"seq2engine.runtime.{BACKENDS[backend]}")
        started = time.perf_counter()
        with blaming(name, "loading"):
            sessions[name] = stack.enter_context(
                open_session(bundle, backend, precision, threads, provider=where, draft=guesses, workload=workload)
            )
        load_ms = 1000 * (time.perf_counter() - started)
        arms[name] = Arm(backend, precision, FILES[backend](bundle, precision), load_ms, draft=guesses)
        progress(f"bench: load {name}", 1.0)
    return arms, sessions


def wanted_arms(
    backends: Sequence[str], precisions: Sequence[str], draft: str | None
) -> list[tuple[str, str, str | None]]:
    """Backend, precision and who drafts for it, of every arm."""
    plain: list[tuple[str, str, str | None]] = [(backend, name, None) for name in precisions for backend in backends]
    drafted = [("onnxruntime", name, draft) for name in precisions if draft not in (None, name)]
    return plain + (drafted if "onnxruntime" in backends else [])


def sessions_for(case: Case, sessions: dict[str, Session], arms: dict[str, Arm]) -> dict[str, Session]:
    """Those whose arms have something to show in a case: with several rows, drafts change nothing."""
    single = case.batch * case.beam == 1
    return {name: session for name, session in sessions.items() if single or arms[name].draft is None}


def arm_of_peer(peers: Peers, name: str) -> Arm:
    """A peer's arm from those of its processes that were timed."""
    workers = peers.timed[name]
    return Arm(
        backend=name,
        precision=WIDTHS[peers.kinds[name].precision],
        bytes=max(worker.bytes for worker in workers),
        load_ms=1000 * max(worker.load_seconds for worker in workers),
        version=workers[0].version,
        peer=True,
        peak_bytes=max(worker.peak for worker in workers),
    )


def with_peak(arm: Arm, bundle: Bundle, threads: int, provider: str | None, cases: Sequence[Case], seed: int) -> Arm:
    where = provider if arm.backend == "onnxruntime" else None
    peak = peak_of_arm(bundle, arm.backend, arm.precision, threads, where, cases, seed, arm.draft)
    return dataclasses.replace(arm, peak_bytes=peak)


def with_times(arm: Arm, bundle: Bundle, export_again: bool) -> Arm:
    """The arm with the time that its engines took to build, and its graphs to export, where that is asked for."""
    return dataclasses.replace(
        arm,
        build_seconds=build_seconds(bundle, arm.precision) if arm.backend == "tensorrt" else None,
        export_seconds=export_seconds(bundle, arm.precision) if export_again and arm.backend != "torch" else None,
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


# What each backend reads from disk.
FILES = {"torch": reference_bytes, "onnxruntime": graph_bytes, "tensorrt": engine_bytes}


@contextmanager
def blaming(arm: str, where: str) -> Iterator[None]:
    """A failed arm is a failed run; the error says which arm it was."""
    try:
        yield
    except Seq2EngineError as error:
        raise SessionError(f"{arm} failed at {where}, so there is nothing to compare: {error}") from error


def bench_case(
    sessions: dict[str, Session],
    peers: Peers,
    case: Case,
    rounds: int,
    rest: float,
    seed: int,
    progress: Progress,
) -> CaseResult:
    """Decodes on every arm and compares, then times the three parts, of which peers have only the whole."""
    first = next(iter(sessions))
    config = sessions[first].config
    sources = sources_for(case, config, seed)
    options = options_of(case)
    usual: dict[str, Tokens] = {}
    fixed: dict[str, FixedDecode] = {}
    stage = f"bench: {case.name}, outputs"
    for done, (name, session) in enumerate(sessions.items()):
        progress(stage, done / len(sessions))
        with blaming(name, f"case {case.name}"):
            usual[name] = best_tokens(generate(session, sources, options))
            fixed[name] = fixed_decode(session, sources, options)
    theirs = decode_with_peers(peers, case, sources)
    agreed = agreement(theirs, sessions[first], sources, options)
    progress(stage, 1.0)

    ids, mask = padded(sources, config.pad_id)
    calls: dict[str, dict[str, Callable[[], object]]] = {part: {} for part in PARTS}
    splits: dict[str, list[dict[str, int]]] = {name: [] for name in sessions}
    for name, session in sessions.items():
        with blaming(name, f"case {case.name}"):
            calls["encoder"][name] = partial(session.encode, ids, mask)
            calls["step"][name] = repeated_step(session, ids, mask, case, fixed[first].trail)
            calls["end_to_end"][name] = partial(split_decode, splits[name], session, sources, options)
    calls["end_to_end"] |= {name: decode.worker.run for name, decode in theirs.items()}
    times = {
        part: interleaved(calls[part], rounds, WARMUP, progress, f"bench: {case.name}, {part}", LEAD[part], rest)
        for part in PARTS
    }
    peers.take_memory(theirs)
    ours = {
        name: ArmResult(
            equal=count_equal(usual[name], usual[first]),
            equal_timed=count_equal(fixed[name].tokens, fixed[first].tokens),
            parts={part: measure(times[part], name, first, case, part) for part in PARTS},
            cache=fixed[name].counts,
            split={
                piece: Samples(tuple(split[piece] for split in splits[name][-rounds:]))  # none of the warm-up
                for piece in PIECES
            },
        )
        for name in sessions
    }
    others = {
        name: ArmResult(
            *agreed[name],
            parts={"end_to_end": measure(times["end_to_end"], name, first, case, "end_to_end")},
            setting=decode.worker.setting,
        )
        for name, decode in theirs.items()
    }
    return CaseResult(case, ours | others)


def agreement(
    theirs: dict[str, PeerDecode], session: Session, sources: list[list[int]], options: SearchOptions
) -> dict[str, tuple[int, int]]:
    """Of how many sources each peer says what we say with its search: as a user would, and at the length timed.

    No peer can be told to ignore the end token; at a fixed length it is forbidden until the last position instead.
    """
    ours: dict[tuple[str, int], Tokens] = {}
    for beam_style in dict.fromkeys(decode.beam_style for decode in theirs.values()):
        for least in (0, options.max_length):
            asked = dataclasses.replace(options, min_length=least, beam_style=beam_style)
            ours[beam_style, least] = best_tokens(generate(session, sources, asked))
    return {
        name: (
            count_equal(decode.usual, ours[decode.beam_style, 0]),
            count_equal(decode.fixed, ours[decode.beam_style, options.max_length]),
        )
        for name, decode in theirs.items()
    }


def measure(times: dict[str, Samples], name: str, first: str, case: Case, part: str) -> Measure:
    tokens = {"encoder": case.batch * case.source, "step": case.batch, "end_to_end": case.batch * case.target}
    return Measure(times[name], tokens[part], ratio_interval(times[first], times[name]))


def count_equal(tokens: Tokens, wanted: Tokens) -> int:
    return sum(mine == theirs for mine, theirs in zip(tokens, wanted, strict=True))
