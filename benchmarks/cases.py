"""Named workloads, and the sources they decode."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from seq2engine.errors import UsageError
from seq2engine.model.config import ModelConfig


@dataclass(frozen=True)
class Case:
    """One workload: `batch` sources of `source` tokens each, decoded with `beam` beams to exactly `target` tokens."""

    name: str
    batch: int
    beam: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"batch {self.batch}, beam {self.beam}, source {self.source}, output {self.target}"


SHOWN = {"target": "output"}  # sizes whose name in reports and errors is another

CASES = (
    Case("one-greedy", batch=1, beam=1, source=32, target=32),
    Case("one-beam", batch=1, beam=4, source=32, target=32),
    Case("batch-greedy", batch=8, beam=1, source=32, target=32),
    Case("batch-beam", batch=8, beam=4, source=32, target=32),
)


def cases_for(config: ModelConfig) -> tuple[Case, ...]:
    """The default workloads, cut to the lengths a model takes."""
    return tuple(
        dataclasses.replace(
            case, source=min(case.source, config.max_source), target=min(case.target, config.max_target)
        )
        for case in CASES
    )


def cases_from_text(texts: Sequence[str]) -> tuple[Case, ...]:
    """Cases written as batch x beam x source x output, such as 8x4x32x32."""
    if problems := case_text_problems(texts):
        raise UsageError("; ".join(problems))
    return tuple(Case(text, *map(int, text.split("x"))) for text in texts)


def case_text_problems(texts: Sequence[str]) -> list[str]:
    wrong = [text for text in texts if re.fullmatch(r"\d+x\d+x\d+x\d+", text, re.ASCII) is None]
    return [f"case {', '.join(wrong)}: expected batch x beam x source x output, such as 8x4x32x32"] if wrong else []


GRID = {"batch": (1, 8, 32), "beam": (1, 4), "source": (32, 128), "target": (32, 128)}  # of a sweep


def cases_from_grid(config: ModelConfig, grid: Mapping[str, Sequence[int]]) -> tuple[Case, ...]:
    """Every combination of the sizes, those of `GRID` where none are given, its lengths cut to what a model takes."""
    usual = {
        **GRID,
        "source": [min(length, config.max_source) for length in GRID["source"]],
        "target": [min(length, config.max_target) for length in GRID["target"]],
    }
    axes = [grid.get(axis) or usual[axis] for axis in GRID]
    return tuple(Case("x".join(map(str, each)), *each) for each in dict.fromkeys(product(*axes)))


def cases_at_lengths(cases: Sequence[Case], lengths: Sequence[int]) -> tuple[Case, ...]:
    """Every case once for each output length, for curves of what a token costs; cases that are the same are one."""
    sizes = dict.fromkeys((case.batch, case.beam, case.source, length) for case in cases for length in lengths)
    return tuple(Case("x".join(map(str, each)), *each) for each in sizes)


def size_problems(cases: Sequence[Case]) -> list[str]:
    """What is wrong with these cases for any model."""
    found = [] if cases else ["no case to time"]
    names = [case.name for case in cases]
    found += [f"two cases are called {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    for case in cases:
        for size in ("batch", "beam", "source", "target"):
            if getattr(case, size) < 1:
                found.append(f"case {case.name}: {SHOWN.get(size, size)} {getattr(case, size)}, expected at least 1")
    return found


def case_problems(cases: Sequence[Case], config: ModelConfig) -> list[str]:
    """What keeps a model from running these cases."""
    found = []
    for case in cases:
        if case.source > config.max_source:
            found.append(f"case {case.name}: source {case.source}, the model takes at most {config.max_source}")
        if case.target > config.max_target:
            found.append(f"case {case.name}: output {case.target}, the model gives at most {config.max_target}")
    if not ordinary_ids(config).size:
        found.append(f"the source vocabulary of {config.source_vocab} has nothing but special tokens")
    return found


def sources_for(case: Case, config: ModelConfig, seed: int = 0) -> list[list[int]]:
    """The sources of a case, the same on every machine. All have the full length."""
    ids = ordinary_ids(config)
    drawn = np.random.default_rng([seed, case.batch, case.source]).integers(0, len(ids), (case.batch, case.source))
    return ids[drawn].tolist()


def ordinary_ids(config: ModelConfig) -> np.ndarray:
    """Source ids that are no special token."""
    return np.setdiff1d(np.arange(config.source_vocab), [config.pad_id, config.start_id, config.end_id])
