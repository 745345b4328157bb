"""What keeps a benchmark from running, all of it, before anything is loaded or timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seq2engine.errors import Seq2EngineError, SessionError, UsageError
from seq2engine.export.artifact.bundle import Bundle

from .cases import Case, case_problems
from .peers.processes import ENVIRONMENTS, peer_problems
from .scenarios import scenario_problems

BACKENDS = ("torch", "onnxruntime", "tensorrt")  # the backends timed here


@dataclass(frozen=True)
class Asked:
    """What a benchmark is asked to time, with which options."""

    backends: Sequence[str]
    precisions: Sequence[str]
    cases: Sequence[Case]
    rounds: int
    threads: int
    scenarios: Sequence[str] = ()
    bound_ms: float | None = None
    peers: Sequence[str] = ()
    environments: Path = ENVIRONMENTS
    provider: str | None = None
    draft: str | None = None


def check_bench(bundle: Bundle, asked: Asked, more: Sequence[str] = ()) -> None:
    """Refuses what cannot be timed, with every problem in one message; `more` are those that were found before."""
    if problems := [*more, *bench_problems(bundle, asked, bool(more))]:
        raise UsageError(f"cannot benchmark {bundle.root}: " + "; ".join(problems))


def bench_problems(bundle: Bundle, asked: Asked, cases_are_wrong: bool = False) -> list[str]:
    problems = []
    for kind, names, known in (
        ("backend", asked.backends, BACKENDS),
        ("precision", asked.precisions, bundle.precisions),
    ):
        if not names:
            problems.append(f"no {kind} to time")
        problems += [f"{kind} {name!r}, expected one of {', '.join(known)}" for name in names if name not in known]
        problems += [f"{kind} {name!r} twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if asked.cases or not cases_are_wrong:
        problems += case_problems(asked.cases, bundle.config)
    counts = (("rounds", asked.rounds), ("threads", asked.threads))
    problems += [f"{name} {count}, expected at least 1" for name, count in counts if count < 1]
    problems += scenario_problems(asked.scenarios, asked.bound_ms)
    problems += peer_problems(asked.peers, asked.threads, asked.environments)
    return problems + provider_problems(asked) + draft_problems(bundle, asked)


def provider_problems(asked: Asked) -> list[str]:
    if asked.provider is None:
        return []
    if "onnxruntime" not in asked.backends:
        return [f"provider {asked.provider!r} without the backend onnxruntime, whose choice it is"]
    from seq2engine.runtime.ort.providers import check_provider

    try:
        check_provider(asked.provider)
    except SessionError as error:
        return [str(error)]
    return []


def draft_problems(bundle: Bundle, asked: Asked) -> list[str]:
    if asked.draft is None:
        return []
    if "onnxruntime" not in asked.backends:
        return [f"draft {asked.draft!r} without the backend onnxruntime, which is the one that takes drafts"]
    if asked.provider not in (None, "cpu"):
        return [f"draft {asked.draft!r} with provider {asked.provider!r}, expected the CPU"]
    from seq2engine.runtime.ort.speculative import check_draft

    found = []
    for precision in asked.precisions:
        if precision in bundle.precisions and precision != asked.draft:
            try:
                check_draft(bundle, precision, asked.draft)
            except Seq2EngineError as error:
                found.append(f"draft {asked.draft!r}: {error}")
    return list(dict.fromkeys(found))
