"""Our arms: a session for every backend in every precision, with its size, memory and build times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module

from seq2engine.common.measured import user_cache
from seq2engine.common.progress import Progress
from seq2engine.errors import Seq2EngineError, SessionError
from seq2engine.export.artifact.bundle import REFERENCE, Bundle
from seq2engine.export.artifact.profiles import Workload
from seq2engine.export.contract import GRAPHS
from seq2engine.runtime.backends import BACKENDS
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.quality.metrics import Quality, quality_of_session
from seq2engine.runtime.session import Session
from seq2engine.runtime.trt.selection import choose_engine

from .cases import Case
from .cost import build_seconds, export_seconds, peak_of_arm
from .options import Plan
from .result import Arm

Sessions = dict[str, Session]  # by the name of their arm


@dataclasses.dataclass(frozen=True)
class Arms:
    """Open sessions, and what is known of each."""

    sessions: Sessions
    about: dict[str, Arm]

    @property
    def speculative(self) -> list[str]:
        return [name for name, arm in self.about.items() if arm.draft is not None]

    def for_case(self, case: Case) -> Sessions:
        """The arms of a case, without speculative decoding where a step has several rows: it changes nothing there."""
        if case.batch * case.beam == 1:
            return self.sessions
        return {name: session for name, session in self.sessions.items() if self.about[name].draft is None}


def open_arms(stack: ExitStack, plan: Plan, progress: Progress) -> Arms:
    """Opens all sessions, which the stack closes, and records size and loading time of each."""
    arms = Arms({}, {})
    for backend, precision, draft in wanted_arms(plan):
        provider = provider_of(plan, backend)
        name = " ".join(filter(None, (backend, provider, precision, draft and f"draft {draft}")))
        progress(f"bench: load {name}", 0.0)
        # Imports must not count as the first arm's loading time.
        import_module(f"seq2engine.runtime.{BACKENDS[backend]}")
        started = time.perf_counter()
        with blaming(name, "loading"):
            session = open_session(
                plan.bundle,
                backend,
                precision,
                plan.threads_of(backend),
                provider=provider,
                draft=draft,
                workload=largest_of(plan),
                cache=user_cache(),  # as `load` does
            )
            arms.sessions[name] = stack.enter_context(session)
        load_ms = 1000 * (time.perf_counter() - started)
        arms.about[name] = Arm(backend, precision, FILES[backend](plan.bundle, precision), load_ms, draft=draft)
        progress(f"bench: load {name}", 1.0)
    return arms


def wanted_arms(plan: Plan) -> list[tuple[str, str, str | None]]:
    """Backend, precision and draft precision of every arm."""
    draft, backends = plan.options.draft, plan.options.backends
    plain: list[tuple[str, str, str | None]] = [
        (backend, name, None) for name in plan.precisions for backend in backends
    ]
    if draft is None or "onnxruntime" not in backends:
        return plain
    return plain + [("onnxruntime", name, draft) for name in plan.drafted_precisions]


def provider_of(plan: Plan, backend: str) -> str | None:
    return plan.options.provider if backend == "onnxruntime" else None


def largest_of(plan: Plan) -> Workload:
    """The largest sizes of all cases, which an engine must take."""
    sizes = ("batch", "beam", "source", "target")
    natural = plan.options.natural
    most = {
        "batch": max((each.batch for each in natural), default=1),
        "beam": max((each.beam for each in natural), default=1),
    }
    return Workload(*(max((getattr(case, size) for case in plan.cases), default=most.get(size)) for size in sizes))


def reference_bytes(bundle: Bundle, precision: str) -> int:
    return bundle.inside(REFERENCE).stat().st_size


def graph_bytes(bundle: Bundle, precision: str) -> int:
    entries = [bundle.graph(precision, name) for name in GRAPHS]
    return sum(bundle.inside(path).stat().st_size for entry in entries for path in (entry.path, entry.data_path))


def engine_bytes(bundle: Bundle, precision: str) -> int:
    return sum(entry.bytes for entry in choose_engine(bundle, precision, None)[1].engines.values())


# What each backend reads from disk.
FILES = {"torch": reference_bytes, "onnxruntime": graph_bytes, "tensorrt": engine_bytes}


def costs_of_arms(plan: Plan, arms: Arms, progress: Progress) -> dict[str, Arm]:
    """The arms with their peak memory, unless the run is quick, and the times of their builds and exports."""
    found = {}
    for number, (name, arm) in enumerate(arms.about.items()):
        progress("bench: memory", number / len(arms.about))
        export = plan.options.export_times and arm.backend != "torch"
        found[name] = dataclasses.replace(
            arm,
            peak_bytes=None if plan.options.quick else peak_of_arm(plan, arm, provider_of(plan, arm.backend)),
            build_seconds=build_seconds(plan.bundle, arm.precision) if arm.backend == "tensorrt" else None,
            export_seconds=export_seconds(plan.bundle, arm.precision) if export else None,
        )
    progress("bench: memory", 1.0)
    return found


def quality_of_arms(plan: Plan, sessions: Sessions, progress: Progress) -> dict[str, tuple[Quality, ...]]:
    """Error rates of every arm on the references, with the beams of every case; empty without references."""
    references = plan.options.references
    if references is None:
        return {}
    tokenizer = plan.bundle.tokenizer()
    found: dict[str, tuple[Quality, ...]] = {}
    for done, (name, session) in enumerate(sessions.items()):
        progress("bench: quality", done / len(sessions))
        with blaming(name, "the references"):
            found[name] = tuple(
                quality_of_session(
                    session,
                    tokenizer,
                    references,
                    beam,
                    source_language=plan.options.source_language,
                    target_language=plan.options.target_language,
                )
                for beam in plan.beams
            )
    progress("bench: quality", 1.0)
    return found


@contextmanager
def blaming(arm: str, where: str) -> Iterator[None]:
    """A failed arm is a failed run; the error names the arm."""
    try:
        yield
    except Seq2EngineError as error:
        raise SessionError(f"{arm} failed at {where}, so there is nothing to compare: {error}") from error
