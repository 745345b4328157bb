"""Named workloads, and the sources they decode."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from seq2engine.errors import UsageError
from seq2engine.model.config import ModelConfig
from seq2engine.model.whisper_tokens import layout_of, speech_from_layout
from seq2engine.runtime.text.sources import random_sources


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


Sources = list[Any]  # of a case: lists of token ids, or arrays of features of audio or images
SHOWN = {"target": "output"}  # sizes whose name in reports and errors is another

CASES = (
    Case("one-greedy", batch=1, beam=1, source=32, target=32),
    Case("one-beam", batch=1, beam=4, source=32, target=32),
    Case("batch-greedy", batch=8, beam=1, source=32, target=32),
    Case("batch-beam", batch=8, beam=4, source=32, target=32),
)


def cases_for(config: ModelConfig) -> tuple[Case, ...]:
    """The default workloads, limited to the lengths that a model takes."""
    return tuple(
        dataclasses.replace(case, source=source_length(config, case.source), target=min(case.target, config.max_target))
        for case in CASES
    )


def source_length(config: ModelConfig, usual: int) -> int:
    """A usual source length, or the most that a model takes; audio and images have one length."""
    return config.max_source if config.takes_features else min(usual, config.max_source)


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
        "source": [source_length(config, length) for length in GRID["source"]],
        "target": [min(length, config.max_target) for length in GRID["target"]],
    }
    axes = [grid.get(axis) or usual[axis] for axis in GRID]
    return tuple(Case("x".join(map(str, each)), *each) for each in dict.fromkeys(product(*axes)))


def cases_at_lengths(cases: Sequence[Case], lengths: Sequence[int]) -> tuple[Case, ...]:
    """Every case at each output length, for curves of the time per token; duplicates are merged."""
    sizes = dict.fromkeys((case.batch, case.beam, case.source, length) for case in cases for length in lengths)
    return tuple(Case("x".join(map(str, each)), *each) for each in sizes)


def size_problems(cases: Sequence[Case]) -> list[str]:
    """Problems of these cases with any model."""
    found = [] if cases else ["no case to time"]
    names = [case.name for case in cases]
    found += [f"two cases are called {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    for case in cases:
        for size in ("batch", "beam", "source", "target"):
            if getattr(case, size) < 1:
                found.append(f"case {case.name}: {SHOWN.get(size, size)} {getattr(case, size)}, expected at least 1")
    return found


def case_problems(cases: Sequence[Case], config: ModelConfig) -> list[str]:
    """Problems of these cases with this model."""
    found = []
    for case in cases:
        if config.takes_features and case.source != config.max_source:
            what = "an image" if config.takes_images else "a window of audio"
            found.append(f"case {case.name}: source {case.source}, {what} has {config.max_source}")
        elif case.source > config.max_source:
            found.append(f"case {case.name}: source {case.source}, the model takes at most {config.max_source}")
        most = config.max_target - len(audio_prompt(config))
        if case.target > most:
            found.append(f"case {case.name}: output {case.target}, the model gives at most {most}")
    if not config.takes_features and not ordinary_ids(config).size:
        found.append(f"the source vocabulary of {config.source_vocab} has nothing but special tokens")
    return found


def sources_for(case: Case, config: ModelConfig, seed: int = 0) -> Sources:
    """The sources of a case, the same on every machine. All have the full length."""
    if config.takes_features:
        return random_sources(config, case.batch, seed)
    generator = np.random.default_rng([seed, case.batch, case.source])
    ids = ordinary_ids(config)
    return ids[generator.integers(0, len(ids), (case.batch, case.source))].tolist()


def audio_prompt(config: ModelConfig) -> tuple[int, ...]:
    """What the decoder of such a model is fed after its start token: English text without timestamps."""
    layout = layout_of(config.target_vocab) if config.takes_audio else None
    return () if layout is None else tuple(speech_from_layout(layout, ()).prompt())


def ordinary_ids(config: ModelConfig) -> np.ndarray:
    """Source ids that are not special tokens."""
    return np.setdiff1d(np.arange(config.source_vocab), [config.pad_id, config.start_id, config.end_id])
