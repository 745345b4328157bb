"""What a machine with a GPU is to find: the inputs of encoder and steps, and what the model in fp64 makes of them.

Beam 0 of every source follows the oracle's best tokens; the others are its next best, so that the cache is a tree:

    step        0    1    2         beam 1 of step 2 continues beam 0 of step 1, like every beam of step 2
    beam 0      a -- b -- d
    beam 1      a  \\ c  \\ e

Beside every tensor stands what it may err: as many times PyTorch's own error at the precision as parity allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from seq2engine.runtime.generate import padded
from seq2engine.runtime.numerics.budgets import DIVERGENCE_FACTOR, MEDIAN_FACTOR, WORST_FACTOR
from seq2engine.runtime.numerics.error_scale import EPSILON
from seq2engine.runtime.numerics.teacher_forcing import spreads_of
from seq2engine.runtime.session import Session

COLUMNS = 1024  # logits of a row that are recorded where a vocabulary is larger; the best token is looked for in all
BEST = 8  # tokens of a row whose logits are recorded besides
SEED = 7

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Budget:
    """What the median and the worst error of a tensor may be, and PyTorch's own."""

    median: float
    worst: float
    pytorch_median: float
    pytorch_worst: float


@dataclass(frozen=True)
class Recording:
    """`batches` are the arrays of one run each; `outputs` what the oracle says, greedily, of every source."""

    batches: tuple[Arrays, ...]
    budgets: dict[str, Budget]
    outputs: tuple[tuple[int, ...], ...]
    beams: int
    steps: int


@dataclass
class Tallies:
    """Errors of PyTorch by tensor, and the squares of the oracle's elements."""

    errors: dict[str, list[np.ndarray]] = field(default_factory=dict)
    squares: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, exact: np.ndarray, rounded: np.ndarray) -> None:
        self.errors.setdefault(name, []).append(np.abs(rounded.astype(np.float64) - exact).ravel())
        self.squares.setdefault(name, []).append(float(np.square(exact).mean()))

    def budgets(self, precision: str) -> dict[str, Budget]:
        found = {}
        for name, parts in self.errors.items():
            errors = np.concatenate(parts)
            median, worst = float(np.median(errors)), float(errors.max())
            floor = EPSILON[precision] * float(np.sqrt(np.mean(self.squares[name])))  # one unit in the last place
            allowed = max(MEDIAN_FACTOR * median, floor), max(WORST_FACTOR * worst, floor)
            found[name] = Budget(*allowed, median, worst)
        return found


def recorded(
    oracle: Session,
    reference: Session,
    sources: Sequence[Sequence[int]],
    batch: int,
    beams: int,
    steps: int,
    slots: int,
) -> Recording:
    """Runs both sessions side by side over the sources, `batch` at a time, for so many steps of so many beams.

    `slots` is the length of a static cache. A growing one is as long as the beams of all steps before.
    """
    tallies = Tallies()
    vocabulary = oracle.config.target_vocab
    chosen = np.random.default_rng(SEED).choice(vocabulary, size=min(vocabulary, COLUMNS), replace=False)
    batches: list[Arrays] = []
    outputs: list[tuple[int, ...]] = []
    for first in range(0, len(sources), batch):
        run = SideBySide(oracle, reference, sources[first : first + batch], beams, slots, tallies)
        batches.append(run.arrays(steps, np.sort(chosen)))
        outputs += outputs_from(batches[-1]["top_ids"][:, :, 0, 0], oracle.config.end_id)
    usual = float(np.median(np.concatenate([arrays["spread"].ravel() for arrays in batches])))
    for arrays in batches:
        arrays["allowed_margin"] = DIVERGENCE_FACTOR * np.maximum(arrays.pop("spread"), usual)
    return Recording(tuple(batches), tallies.budgets(reference.precision), tuple(outputs), beams, steps)


class SideBySide:
    """The oracle and PyTorch at some precision on one batch, fed the same."""

    def __init__(
        self,
        oracle: Session,
        reference: Session,
        sources: Sequence[Sequence[int]],
        beams: int,
        slots: int,
        tallies: Tallies,
    ):
        self.sessions, self.beams, self.slots, self.tallies = (oracle, reference), beams, slots, tallies
        self.static = oracle.cache_form == "static"
        self.config = oracle.config
        self.ids, self.mask = padded(sources, oracle.config.pad_id)
        self.states = [session.encode(self.ids, self.mask) for session in self.sessions]
        for session, state in zip(self.sessions, self.states, strict=True):
            session.reserve(state, slots if self.static else 0)

    def arrays(self, steps: int, columns: np.ndarray) -> Arrays:
        found = {"source_ids": self.ids, "source_mask": self.mask, "columns": columns, **self.encoder_arrays()}
        parts: dict[str, list[np.ndarray]] = {}
        for step, arrays in enumerate(self.steps(steps)):
            exact, rounded = arrays.pop("exact"), arrays.pop("rounded")  # [B, K, V]
            self.tallies.add(f"decoder_step logits, step {step}", exact[:, :, columns], rounded[:, :, columns])
            best = np.argsort(-exact, axis=-1, kind="stable")[:, :, :BEST]
            spreads = spreads_of(flat(exact), flat(rounded), self.sessions[1].precision)
            arrays |= {
                "logits": exact[:, :, columns],
                "top_ids": best,
                "top_values": np.take_along_axis(exact, best, axis=-1),
                "spread": spreads.reshape(exact.shape[:2]),
            }
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
        found |= {name: np.stack(list_of) for name, list_of in parts.items()}
        written = self.beams * steps
        for name in (f"self_{part}.{i}" for i in range(self.config.decoder_layers) for part in "kv"):
            exact, rounded = (array[:, :, :written] for array in self.tensors(name))
            self.tallies.add(f"decoder_step {name}", exact, rounded)
            found[name] = exact
        return found

    def encoder_arrays(self) -> Arrays:
        found = {}
        layers = [f"cross_{part}.{i}" for i in range(self.config.decoder_layers) for part in "kv"]
        for name in (*layers, "encoder_states"):
            exact, rounded = self.tensors(name)
            found[name] = exact
            if exact.ndim == 4:  # [B,H,S,E] -> [B,S,H,E]
                exact, rounded = exact.swapaxes(1, 2), rounded.swapaxes(1, 2)
            self.tallies.add(f"encoder {name}", exact[self.mask], rounded[self.mask])
        return found

    def tensors(self, name: str) -> list[np.ndarray]:
        return [session.tensor(state, name) for session, state in zip(self.sessions, self.states, strict=True)]

    def steps(self, steps: int) -> Iterator[Arrays]:
        """The inputs of every step, and both answers. Masks are as wide as the last step's, or as a static cache."""
        batch, beams = len(self.ids), self.beams
        width = self.slots if self.static else beams * steps
        tokens = np.full((batch, beams), self.config.start_id, dtype=np.int64)
        for step in range(steps):
            mask = np.zeros((batch, beams, width), dtype=bool)
            mask[:, :, 0 : beams * step : beams] = True  # what beam 0 wrote in every step before
            mask[:, np.arange(beams), beams * step + np.arange(beams)] = True
            position, place = np.full(batch, step, dtype=np.int64), np.full(batch, beams * step, dtype=np.int64)
            seen = mask if self.static else mask[:, :, : beams * (step + 1)]
            exact, rounded = (
                session.step(state, tokens, position, place, np.ascontiguousarray(seen)).logits.copy()
                for session, state in zip(self.sessions, self.states, strict=True)
            )
            yield {
                "tokens": tokens,
                "position": position,
                "write_index": place,
                "self_mask": mask,
                "exact": exact,
                "rounded": rounded,
            }
            tokens = np.ascontiguousarray(np.argsort(-exact[:, 0], axis=-1, kind="stable")[:, :beams])


def flat(logits: np.ndarray) -> np.ndarray:
    return logits.reshape(-1, logits.shape[-1])  # [B, K, V] -> [B * K, V]


def outputs_from(best: np.ndarray, end_id: int) -> list[tuple[int, ...]]:
    """Best tokens [T,B] -> each source's output, up to its end token where there is one."""
    outputs = []
    for row in best.T.tolist():
        length = row.index(end_id) + 1 if end_id in row else len(row)
        outputs.append(tuple(row[:length]))
    return outputs
