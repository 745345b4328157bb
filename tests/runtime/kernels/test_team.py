"""Threads of a program: every part of the work is done once, whoever comes and when."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from support.kernel_sessions import open_model, same_bits
from support.step_programs import first_inputs, open_plan, planned, step_program

ROOT = Path(__file__).parents[3]
SANITIZED = ["-fsanitize=thread", "-g"]
COMPILER = os.environ.get("CC", "cc")


def team_of(folder: Path, *flags: str) -> Path:
    """The program tests/support/team_of_threads.c, compiled."""
    made = folder / "team"
    sources = [ROOT / "tests/support/team_of_threads.c", ROOT / "runtime/kernels/team.c"]
    command = [COMPILER, "-std=gnu11", "-O2", *flags, "-I", ROOT / "runtime/kernels", *sources, "-lpthread", "-o", made]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return made


@pytest.fixture(scope="module")
def team(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip("there is no C compiler here")
    return team_of(tmp_path_factory.mktemp("team"))


def run(made: Path, threads: int, rounds: int, late: int) -> None:
    done = subprocess.run([made, str(threads), str(rounds), str(late)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("late", [0, 30, 2000])
@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_every_part_is_done_once(team: Path, threads: int, late: int) -> None:
    run(team, threads, 3000, late)


def test_threads_do_not_race(tmp_path: Path, team: Path) -> None:
    try:
        sanitized = team_of(tmp_path, *SANITIZED)
        run(sanitized, 1, 1, 0)
    except (subprocess.CalledProcessError, AssertionError):
        pytest.skip("this compiler or this machine has no thread sanitizer")
    run(sanitized, 2, 500, 0)
    run(sanitized, 4, 100, 20)


# --- in ONNX Runtime --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions(built: Path) -> dict[int, ort.InferenceSession]:
    """The step program by number of threads."""
    return {threads: open_model(step_program(), threads) for threads in (1, 2, 4)}


BATCHES = (1, 2, 7, 33, 90)  # some of whose operators have one part, some several
OUTPUTS = ["logits", "best_tokens", "exp_sum", "new_self_k.1", "new_self_v.1"]


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_no_bit(sessions: dict[int, ort.InferenceSession], threads: int) -> None:
    for batch in BATCHES:
        inputs = first_inputs(batch, 8, batch, wanted=0)
        expected = sessions[1].run(OUTPUTS, inputs)
        for _ in range(20):
            found = sessions[threads].run(OUTPUTS, inputs)
            assert all(map(same_bits, found, expected))


def test_a_row_has_the_same_bits_in_every_batch(sessions: dict[int, ort.InferenceSession]) -> None:
    inputs = first_inputs(90, 8, wanted=0)
    together = sessions[4].run(OUTPUTS, inputs)
    for first, count in ((0, 1), (5, 2), (40, 33)):
        rows = slice(first, first + count)
        some = {name: array if name == "wanted" else array[rows] for name, array in inputs.items()}
        for session in sessions.values():
            assert all(map(same_bits, session.run(OUTPUTS, some), [array[rows] for array in together]))


def at_once(calls: list[Callable[[], list[np.ndarray]]], rounds: int) -> list[list[list[np.ndarray]]]:
    """What each call gives in every round, each by a thread of its own, which begin together."""
    start = threading.Barrier(len(calls))

    def repeated(call: Callable[[], list[np.ndarray]]) -> list[list[np.ndarray]]:
        found = []
        for _ in range(rounds):
            start.wait(timeout=60)
            found.append(call())
        return found

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(repeated, calls))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("shared", [True, False], ids=["one session", "two sessions"])
def test_programs_at_once_do_not_disturb_each_other(
    sessions: dict[int, ort.InferenceSession], shared: bool, threads: int
) -> None:
    used = [sessions[threads]] * 2 if shared else [sessions[threads], open_model(step_program(), threads)]
    given = [first_inputs(batch, 8, batch, wanted=0) for batch in (40, 3)]
    expected = [sessions[1].run(OUTPUTS, inputs) for inputs in given]
    calls = [lambda s=session, i=inputs: s.run(OUTPUTS, i) for session, inputs in zip(used, given, strict=True)]
    for found, wanted in zip(at_once(calls, 60), expected, strict=True):
        assert all(all(map(same_bits, one, wanted)) for one in found)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_plans_at_once_do_not_disturb_each_other(sessions: dict[int, ort.InferenceSession], threads: int) -> None:
    given = [first_inputs(batch, 24, batch) for batch in (40, 3)]
    plans = [open_plan(len(inputs["tokens"]), 20) for inputs in given]

    def chosen(session: ort.InferenceSession, place: int) -> list[np.ndarray]:
        return list(planned(session, given[place], plans[place], 20).values())

    expected = [chosen(sessions[1], place) for place in (0, 1)]
    calls = [lambda place=place: chosen(sessions[threads], place) for place in (0, 1)]
    for found, wanted in zip(at_once(calls, 10), expected, strict=True):
        assert all(all(map(same_bits, one, wanted)) for one in found)
