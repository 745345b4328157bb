"""A decoder step as a program, its inputs at the beginning of a decode, and greedy search by its steps in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort

from seq2engine.export.kernel_forms.program import CHOSEN, STEP_OUTPUTS, as_program
from seq2engine.export.kernel_forms.step import kernel_step
from seq2engine.export.ort_forms.screened_argmax import WANTED
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from support.kernel_sessions import run_in_place

Arrays = dict[str, np.ndarray]
VOCAB, LAYERS = 60, 2
CONFIG = ModelConfig(1, LAYERS, 2, 64, 96, VOCAB, VOCAB, max_source=12, max_target=24)
CACHES = [f"self_{kind}.{layer}" for layer in range(LAYERS) for kind in "kv"]
NEW = [f"new_{name}" for name in CACHES]


@cache
def step_program() -> onnx.ModelProto:
    """Not to be changed."""
    return as_program(kernel_step(graphs_from_model(random_model(CONFIG, 1))["decoder_step"], screened=False))


def first_inputs(batch: int, slots: int, seed: int = 0, wanted: int = -3, length: int = 5) -> Arrays:
    """Of the first step of this many sources."""
    rng = np.random.default_rng(seed)
    heads = (batch, CONFIG.heads)
    cross = {
        f"cross_{kind}.{layer}": rng.normal(size=(*heads, length, CONFIG.head_dim)).astype(np.float32)
        for layer in range(LAYERS)
        for kind in "kv"
    }
    mask = np.zeros((batch, 1, slots), dtype=bool)
    mask[:, :, 0] = True
    return {
        **cross,
        **{name: np.zeros((*heads, slots, CONFIG.head_dim), np.float32) for name in CACHES},
        "tokens": rng.integers(0, VOCAB, (batch, 1)),
        "position": np.zeros(batch, np.int64),
        "write_index": np.zeros(batch, np.int64),
        "self_mask": mask,
        "source_mask": np.arange(length) < rng.integers(1, length + 1, (batch, 1)),
        WANTED.name: np.array([wanted]),
    }


@dataclass(frozen=True)
class Plan:
    """The inputs of a plan, as in search/ahead/greedy_plan.py."""

    target: np.ndarray
    limit: np.ndarray
    banned: np.ndarray
    end: int

    def inputs(self, steps: int) -> Arrays:
        return {
            "steps": np.array([steps]),
            "target": self.target,
            "limit": self.limit,
            "banned": self.banned,
            "end": np.array([self.end]),
        }


def open_plan(batch: int, longest: int, end: int = -1) -> Plan:
    """Without rules."""
    target, limit = np.full((batch, longest), -1), np.full(batch, longest)
    return Plan(target, limit, np.zeros((4, VOCAB), dtype=bool), end)


def planned(session: ort.InferenceSession, given: Mapping[str, np.ndarray], plan: Plan, steps: int) -> Arrays:
    """What one call chooses, as far as it ran, and the caches, which are written in place."""
    chosen = [tensor.name for tensor in CHOSEN]
    found = run_in_place(session, {**given, **plan.inputs(steps)}, [*chosen, *NEW])
    ran = int(found["ran"][0])
    return {**found, **{name: found[name][:, :ran] for name in chosen[:-1]}}


def by_steps(session: ort.InferenceSession, given: Mapping[str, np.ndarray], plan: Plan, steps: int) -> Arrays:
    """The same by a call for every step, with greedy search in numpy between them."""
    state = dict(given)
    batch, position = len(state["position"]), state["position"].copy()
    tokens, slots = state["tokens"][:, 0].copy(), np.arange(state["self_mask"].shape[2])
    done = (position > 0) & (tokens == plan.end)
    records: list[np.ndarray] = []  # [4, B] of every step
    while len(records) < steps:
        state |= {"tokens": tokens[:, None], "position": position, "write_index": position}
        state["self_mask"] = (slots <= position[:, None])[:, None]
        outputs = [*STEP_OUTPUTS, *NEW]
        found = dict(zip(outputs, session.run(outputs, state), strict=True))
        gone = done[:, None, None, None]  # a source that is done is left out: its cache stays as it is
        state |= {name: np.where(gone, state[name], found[f"new_{name}"]) for name in CACHES}
        record = np.tile(np.array([plan.end, 0.0, 0.0, 1.0]), (batch, 1))
        for row in np.flatnonzero(~done):
            best, logits = found["best_tokens"][row, 0], found["best_logits"][row, 0]
            target, total = plan.target[row, position[row]], found["exp_sum"][row, 0]
            free = np.flatnonzero(~plan.banned[-1 - target][best]) if target < 0 else np.array([], dtype=int)
            rank = free[0] if len(free) else 0
            tokens[row] = best[rank] if target < 0 else target
            record[row] = tokens[row], logits[0] if np.isfinite(total) else np.nan, logits[rank], total
        ends = ~done & ((tokens == plan.end) | (position + 1 >= plan.limit))
        position = np.where(done | ends, position, position + 1)
        done |= ends
        records.append(record.T)
        if done.all() or not np.isfinite(record[:, 1]).all():
            break
    chosen = [array.astype(tensor.dtype) for array, tensor in zip(np.stack(records, axis=-1), CHOSEN, strict=False)]
    names = [tensor.name for tensor in CHOSEN]
    found = dict(zip(names, [*chosen, np.array([len(records)])], strict=True))
    return {**found, **{f"new_{name}": state[name] for name in CACHES}}
