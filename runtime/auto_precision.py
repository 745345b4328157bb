"""`--precision auto`: the fastest precision of a bundle on this machine whose outputs are close to those of fp32.

    fp32, fp16, w8a8 of the bundle -> those without a failed parity report -> short decodes, interleaved -> the fastest

The fastest depends on the instruction set, the cores and the model, so it is measured once per machine.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from seq2engine.common.json_files import read_object, typed_from_json
from seq2engine.common.measured import Measured
from seq2engine.common.reports import FOLDER, reports_in
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import QUANTISED

from .generate import generate
from .search.options import SearchOptions
from .session import Session
from .text.sources import random_sources

CANDIDATES = ("fp32", "fp16", "w8a8")  # the most precise first; other precisions save memory or are for GPUs
ON_CPU = ("w8a8",)  # int8 matmuls, which only ONNX Runtime on the CPU has here
NOT_KEPT = Measured(None, {})
ROUNDS, SOURCES, STEPS = 5, 4, 8


def open_fastest(
    bundle: Bundle,
    backend: str,
    provider: str | None,
    open_precision: Callable[[str], Session],
    kept: Measured = NOT_KEPT,
) -> Session:
    """The session that decodes fastest; its `chosen` names the precision and the reason. The others are closed.

    `kept` are the times of the same precisions that were measured before; then only the fastest is opened.
    """
    names, left_out = candidates_of(bundle, backend, provider)
    known = (kept.value() or {}).get("seconds", {})
    if len(names) > 1 and list(known) == names and all(isinstance(one, float) for one in known.values()):
        session = open_precision(min(known, key=lambda name: known[name]))
        session.chosen = choice_text(session.precision, known, bundle, backend, left_out)
        return session
    with ExitStack() as opened:
        sessions = {name: opened.enter_context(open_precision(name)) for name in names}
        times = decode_times(sessions) if len(sessions) > 1 else dict.fromkeys(names, 0.0)
        fastest = min(times, key=lambda name: times[name])  # of equally fast ones the most precise
        session = sessions.pop(fastest)
        opened.pop_all()
        for other in sessions.values():
            other.close()
    kept.keep({"seconds": times})
    session.chosen = choice_text(fastest, times, bundle, backend, left_out)
    return session


def choice_text(fastest: str, times: Mapping[str, float], bundle: Bundle, backend: str, left_out: str) -> str:
    return "; ".join(filter(None, (reason_of(fastest, times), quality_of(fastest, bundle, backend), left_out)))


def candidates_of(bundle: Bundle, backend: str, provider: str | None) -> tuple[list[str], str]:
    """The precisions to choose from, the most precise first, and a note on those whose parity failed."""
    if backend == "tensorrt":
        raise SessionError(
            "precision auto times graphs, and an engine has the precision it was built in; name one with --precision"
        )
    cpu = backend == "onnxruntime" and provider in (None, "cpu")
    there = [name for name in CANDIDATES if name in bundle.precisions and (cpu or name not in ON_CPU)]
    failed = [name for name in there if parity_verdict(bundle, backend, name) is False]
    names = [name for name in there if name not in failed]
    left_out = f"{', '.join(failed)} left out, because its latest parity failed" if failed else ""
    if not names:
        raise SessionError(
            f"precision auto chooses among {', '.join(CANDIDATES)}, and {bundle.root} has "
            f"{', '.join(bundle.precisions)}{' (' + left_out + ')' if left_out else ''}; name one with --precision, or "
            "export with: seq2engine export CHECKPOINT BUNDLE --precision fp32 w8a8"
        )
    return names, left_out


def parity_verdict(bundle: Bundle, backend: str, precision: str) -> bool | None:
    """The verdict of the bundle's latest parity report on a precision and backend; None if there is no report."""
    for path in reports_in(bundle.root / FOLDER, "parity", f"{precision}*.json"):
        try:
            values = read_object(path, finite=False)
            if (values.get("backend"), values.get("precision")) == (backend, precision):
                return typed_from_json(bool, values.get("verdict"), "verdict")
        except (OSError, ValueError) as error:
            raise SessionError(
                f"{path} is not a parity report ({error}), which precision auto reads; delete it, or run again: "
                f"seq2engine parity {shlex.quote(str(bundle.root))} --precision {precision}"
            ) from error
    return None


def decode_times(sessions: Mapping[str, Session]) -> dict[str, float]:
    """Seconds of the same short decode on each session: the best of some interleaved rounds, after a warm-up."""
    config = next(iter(sessions.values())).config
    steps = min(STEPS, config.max_target)
    options = SearchOptions(steps, min_length=steps, scores=False)
    sources = random_sources(config, SOURCES, longest=16)
    best = dict.fromkeys(sessions, float("inf"))
    for number in range(ROUNDS + 1):
        for name, session in sessions.items():
            started = time.perf_counter()
            generate(session, sources, options)
            best[name] = min(best[name], time.perf_counter() - started) if number else best[name]
    return best


def reason_of(fastest: str, times: Mapping[str, float]) -> str:
    if len(times) == 1:
        return f"precision {fastest}, the only one here that auto chooses from ({', '.join(CANDIDATES)})"
    listed = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in times.items())
    return f"precision {fastest}, the fastest here ({listed} for a short decode)"


def quality_of(precision: str, bundle: Bundle, backend: str) -> str:
    """A note on the quality of the choice, as far as it is known."""
    if precision not in QUANTISED:
        return ""
    known = parity_verdict(bundle, backend, precision)
    rounds = f"{precision} rounds weights and activations to int8"
    if known:
        return f"{rounds}, and its parity passed"
    return f"{rounds}; compare it with: seq2engine parity {shlex.quote(str(bundle.root))} --precision {precision}"


def note_on(precision: str, backend: str, provider: str | None) -> str:
    """A note on a precision on this backend; empty for most."""
    if backend != "onnxruntime" or provider not in (None, "cpu") or precision not in QUANTISED or precision in ON_CPU:
        return ""
    return (
        f"{precision} stores the weights of a GPU engine in fewer bits; on this CPU every step restores them, which is "
        "slow. The CPU's int8 is --precision w8a8; --precision auto takes the fastest"
    )
