"""All problems of a benchmark request, found before anything is loaded or timed.

Problems that do not depend on the bundle (`usage_problems`) are found before it is opened.
"""

from __future__ import annotations

from seq2engine.errors import Seq2EngineError, SessionError, UsageError
from seq2engine.export.contract import PRECISIONS
from seq2engine.runtime.backends import BACKENDS, MOST_THREADS, QUANTISED

from .cases import case_problems, size_problems
from .machine import usable_cores
from .natural.likeness import check_metrics
from .options import BenchOptions, Plan
from .peers.processes import peer_problems
from .scenarios import scenario_problems


def check_bench(plan: Plan) -> None:
    """Refuses what cannot be timed, with every problem in one message; and graphs that are damaged."""
    if problems := [*usage_problems(plan.options), *bundle_problems(plan)]:
        raise UsageError(f"cannot benchmark {plan.bundle.root}: " + "; ".join(dict.fromkeys(problems)))
    if "onnxruntime" in plan.options.backends:
        # the quantised draft has no graphs of its own: it is made from those of fp32
        drafts = [plan.options.draft] if plan.options.draft in PRECISIONS else []
        plan.bundle.check_graphs(*plan.precisions, *drafts)


def usage_problems(options: BenchOptions) -> list[str]:
    """What is wrong with options for any bundle."""
    threads = usable_cores() if options.threads is None else options.threads
    problems = []
    for kind, names, known in (
        ("backend", options.backends, tuple(BACKENDS)),
        ("precision", options.precisions, tuple(PRECISIONS)),
    ):
        if names is None:
            continue
        if not names:
            problems.append(f"no {kind} to time")
        problems += [f"{kind} {name!r}, expected one of {', '.join(known)}" for name in names if name not in known]
        problems += [f"{kind} {name!r} twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    problems += [] if options.cases is None or (options.natural and not options.cases) else size_problems(options.cases)
    counts = (("rounds", options.rounds), ("threads", threads))
    problems += [f"{name} {count}, expected at least 1" for name, count in counts if count < 1]
    problems += [f"threads {threads}, expected at most {MOST_THREADS}"] if threads > MOST_THREADS else []
    problems += scenario_problems(options.scenarios, options.bound_ms)
    problems += peer_problems(options.peers, threads, options.environments)
    if options.neighbours < 0:
        problems.append(f"neighbours {options.neighbours}, expected 0 or more")
    if options.scenarios and options.natural and not options.cases:
        problems.append("scenarios without a case, whose sizes they have; add --case")
    return problems + provider_problems(options) + draft_problems(options)


def bundle_problems(plan: Plan) -> list[str]:
    """What is wrong with options for this bundle."""
    held = plan.bundle.precisions
    known = [name for name in plan.precisions if name in PRECISIONS]
    problems = [f"precision {name!r}, expected one of {', '.join(held)}" for name in known if name not in held]
    problems += case_problems(plan.cases, plan.bundle.config)
    problems += natural_problems(plan)
    return problems + speculative_problems(plan)


def natural_problems(plan: Plan) -> list[str]:
    """What keeps real sentences from being decoded: workloads need sentences, and texts need a tokenizer."""
    if not plan.options.natural:
        return []
    if not plan.bundle.takes_text:
        return ["sentences for a model that takes no text; leave out --natural"]
    try:
        check_metrics()
    except Seq2EngineError as error:
        return [str(error)]
    if plan.options.references is None:
        return []  # the command line reads them when nothing else is wrong
    count = len(plan.options.references)
    few = [each for each in plan.options.natural if each.batch > count]
    return [f"{each}: only {count} sentences, expected at least one batch" for each in few]


def provider_problems(options: BenchOptions) -> list[str]:
    if options.provider is None:
        return []
    if "onnxruntime" not in options.backends:
        return [f"provider {options.provider!r} without the backend onnxruntime, whose choice it is"]
    from seq2engine.runtime.ort.providers import check_provider

    try:
        check_provider(options.provider)
    except SessionError as error:
        return [str(error)]
    return []


def draft_problems(options: BenchOptions) -> list[str]:
    """Of speculative decoding, whatever the bundle holds."""
    if options.draft is None:
        return []
    if options.draft not in (*PRECISIONS, QUANTISED):
        return [f"draft {options.draft!r}, expected one of {', '.join((*PRECISIONS, QUANTISED))}"]
    if "onnxruntime" not in options.backends:
        return [f"draft {options.draft!r} without the backend onnxruntime, which alone has speculative decoding"]
    if options.provider not in (None, "cpu"):
        return [f"draft {options.draft!r} with provider {options.provider!r}, expected the CPU"]
    return []


def speculative_problems(plan: Plan) -> list[str]:
    """Precisions of the bundle that cannot draft for each other."""
    draft = plan.options.draft
    if draft is None or draft_problems(plan.options):
        return []
    from seq2engine.runtime.ort.speculative import check_draft

    found = []
    for precision in plan.drafted_precisions:
        if precision in plan.bundle.precisions:
            try:
                check_draft(plan.bundle, precision, draft)
            except Seq2EngineError as error:
                found.append(f"draft {draft!r}: {error}")
    return list(dict.fromkeys(found))
