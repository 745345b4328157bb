"""Golden samples of a package: inputs of encoder and steps, and the outputs of the model in fp64.

Beam 0 of every source follows the oracle's best tokens; the others are its next best, so that the cache is a tree:

    step        0    1    2         beam 1 of step 2 continues beam 0 of step 1, like every beam of step 2
    beam 0      a -- b -- d
    beam 1      a  \\ c  \\ e

Errors are measured as in parity: in units of each element's scale (error_scale.py), logits only where a
search could choose them. What a script needs for that is recorded, so that it only compares:

    NAME.scale      scale of every row of a tensor; the unit of an element is the larger of it and the element
    logits.lowest   lower clamp for the logits of a row, too low to be chosen; recorded logits are clamped already
    budgets         allowed median, 90th percentile and maximum: PyTorch's own error times parity's factors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.numerics.budgets import DIVERGENCE_FACTOR, FACTORS, ErrorTally
from seq2engine.runtime.numerics.error_scale import EPSILON, LEAST, least_logits, row_scales, upper_logits, within_reach
from seq2engine.runtime.numerics.teacher_forcing import spreads_of
from seq2engine.runtime.parity.levels.tensors import positions_of
from seq2engine.runtime.session import Session

from ..errors import SessionError

COLUMNS = 1024  # logits of a row that are recorded where a vocabulary is larger; the best token is looked for in all
BEST = 8  # best tokens of a row whose logits are recorded after those columns
SEED = 7
STAGE = "package: record"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Budget:
    """Allowed median, 90th percentile and maximum of a tensor's errors, and PyTorch's own."""

    median: float
    most: float
    worst: float
    pytorch_median: float
    pytorch_most: float
    pytorch_worst: float


@dataclass(frozen=True)
class Recording:
    """`batches` has the arrays of each run; `outputs` the oracle's greedy decode of every source."""

    batches: tuple[Arrays, ...]
    budgets: dict[str, Budget]
    outputs: tuple[tuple[int, ...], ...]
    beams: int
    steps: int


@dataclass
class Tallies:
    """PyTorch's errors at a precision, by tensor; `add` returns the scales to record."""

    precision: str
    tallies: dict[str, ErrorTally] = field(default_factory=dict)

    def add(self, name: str, exact: np.ndarray, rounded: np.ndarray) -> np.ndarray:
        """Arrays [rows, ...] of the oracle and of PyTorch -> the scale of every row [rows]."""
        self.tally(name).add(exact, rounded, rounded)
        return np.maximum(row_scales(exact), LEAST[self.precision])

    def add_logits(
        self, name: str, exact: np.ndarray, rounded: np.ndarray, scales: np.ndarray, lowest: np.ndarray
    ) -> None:
        """Some columns [rows, C] of the logits, with the scales and the lowest values [rows] of whole rows."""
        arrays = within_reach(exact, (rounded, rounded), scales, lowest, self.precision)
        self.tally(name).count(scales, arrays)

    def tally(self, name: str) -> ErrorTally:
        return self.tallies.setdefault(name, ErrorTally(self.precision))

    def budgets(self) -> dict[str, Budget]:
        """The budgets; raises if PyTorch itself is not finite at this precision."""
        factors, floor = FACTORS[self.precision], EPSILON[self.precision]
        found = {}
        for name, tally in self.tallies.items():
            own = tally.errors(0)
            if not np.isfinite(own.worst):
                raise SessionError(
                    f"{name}: PyTorch itself is not finite in {self.precision}, which leaves nothing to compare with; "
                    "package another precision with: --precision"
                )
            found[name] = Budget(
                max(factors.median * own.median, floor),
                max(factors.median * own.most, floor),
                max(factors.worst * own.worst, floor),
                own.median,
                own.most,
                own.worst,
            )
        return found


def recorded(
    oracle: Session,
    reference: Session,
    sources: Sequence[Sequence[int]],
    batch: int,
    beams: int,
    steps: int,
    slots: int,
    progress: Progress = silent,
) -> Recording:
    """Runs both sessions side by side over the sources, `batch` at a time, for this many steps and beams.

    `slots` is the length of an engine's static cache, which masks are recorded for. The sessions here have as many as
    the steps write: a slot that no row attends to changes nothing, and those of an engine would take gigabytes.
    """
    tallies = Tallies(reference.precision)
    vocabulary = oracle.config.target_vocab
    chosen = np.random.default_rng(SEED).choice(vocabulary, size=min(vocabulary, COLUMNS), replace=False)
    batches: list[Arrays] = []
    outputs: list[tuple[int, ...]] = []
    for first in range(0, len(sources), batch):
        given = sources[first : first + batch]
        report = partial(reported, progress, first / len(sources), len(given) / len(sources))
        run = SideBySide(oracle, reference, given, beams, steps, slots, tallies)
        batches.append(run.arrays(np.sort(chosen), report))
        outputs += outputs_from(batches[-1]["top_ids"][:, :, 0, 0], oracle.config.end_id)
    usual = float(np.median(np.concatenate([arrays["spread"].ravel() for arrays in batches])))
    for arrays in batches:
        spread = np.minimum(np.maximum(arrays.pop("spread"), usual), arrays.pop("largest_spread"))
        arrays["allowed_margin"] = DIVERGENCE_FACTOR * spread
    return Recording(tuple(batches), tallies.budgets(), tuple(outputs), beams, steps)


def reported(progress: Progress, begin: float, share: float, part: float) -> None:
    """Progress of one batch as a part of the whole: it starts at some fraction and covers a share."""
    progress(STAGE, begin + share * part)


class SideBySide:
    """The oracle and PyTorch at some precision on one batch, fed the same."""

    def __init__(
        self,
        oracle: Session,
        reference: Session,
        sources: Sequence[Sequence[int]],
        beams: int,
        steps: int,
        slots: int,
        tallies: Tallies,
    ):
        self.sessions, self.beams, self.count, self.tallies = (oracle, reference), beams, steps, tallies
        self.static = oracle.cache_form == "static"
        self.written = beams * steps  # slots
        self.width = slots if self.static else self.written  # of recorded masks
        self.config = oracle.config
        self.ids, self.mask = padded(sources, oracle.config.pad_id)
        self.states = [session.encode(self.ids, self.mask) for session in self.sessions]
        for session, state in zip(self.sessions, self.states, strict=True):
            session.reserve(state, self.written if self.static else 0)

    def arrays(self, columns: np.ndarray, report: Callable[[float], None]) -> Arrays:
        found = {"source_ids": self.ids, "source_mask": self.mask, "columns": columns, **self.encoder_arrays()}
        parts: dict[str, list[np.ndarray]] = {}
        for step, arrays in enumerate(self.steps()):
            report(step / self.count)
            exact, rounded = arrays.pop("exact"), arrays.pop("rounded")  # [B, K, V]
            arrays |= self.logit_arrays(step, exact, rounded, columns)
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
        found |= {name: np.stack(list_of) for name, list_of in parts.items()}
        for name in (f"self_{part}.{i}" for i in range(self.config.decoder_layers) for part in "kv"):
            exact, rounded = (array[:, :, : self.written] for array in self.tensors(name))
            rows = [array.reshape(-1, *array.shape[2:]) for array in map(positions_of, (exact, rounded))]
            found |= {name: exact, f"{name}.scale": self.tallies.add(f"decoder_step {name}", *rows)}
        return found

    def logit_arrays(self, step: int, exact: np.ndarray, rounded: np.ndarray, columns: np.ndarray) -> Arrays:
        """Logits [B,K,V] of the oracle and of PyTorch -> what is recorded of them: some columns, and the best."""
        shape, precision = exact.shape[:2], self.sessions[1].precision
        exact, rounded = flat(exact).astype(np.float64), flat(rounded)
        best = np.argsort(-exact, axis=-1, kind="stable")[:, :BEST]
        places = np.hstack([np.broadcast_to(columns, (len(exact), len(columns))), best])
        kept, other = (np.take_along_axis(array, places, axis=1) for array in (exact, rounded))
        scales = np.maximum(row_scales(upper_logits(exact)), LEAST[precision])
        lowest = least_logits(exact)
        self.tallies.add_logits(f"decoder_step logits, step {step}", kept, other, scales, lowest)
        found = {
            "logits": np.maximum(kept, lowest[:, None]),
            "logits.scale": scales,
            "logits.lowest": lowest,
            "top_ids": best,
            "spread": spreads_of(exact, rounded, precision),
            "largest_spread": spreads_of(exact, rounded, precision, np.inf),
        }
        return {name: array.reshape(*shape, *array.shape[1:]) for name, array in found.items()}

    def encoder_arrays(self) -> Arrays:
        found: Arrays = {}
        layers = [f"cross_{part}.{i}" for i in range(self.config.decoder_layers) for part in "kv"]
        for name in (*layers, "encoder_states"):
            exact, rounded = self.tensors(name)
            rows = [positions_of(array)[self.mask] for array in (exact, rounded)]
            found |= {name: exact, f"{name}.scale": self.tallies.add(f"encoder {name}", *rows)}
        return found

    def tensors(self, name: str) -> list[np.ndarray]:
        return [session.tensor(state, name) for session, state in zip(self.sessions, self.states, strict=True)]

    def steps(self) -> Iterator[Arrays]:
        """The inputs of every step and both outputs. Masks are as wide as the last step's, or as a static cache."""
        batch, beams = len(self.ids), self.beams
        tokens = np.full((batch, beams), self.config.start_id, dtype=np.int64)
        for step in range(self.count):
            mask = np.zeros((batch, beams, self.width), dtype=bool)
            mask[:, :, 0 : beams * step : beams] = True  # what beam 0 wrote in every step before
            mask[:, np.arange(beams), beams * step + np.arange(beams)] = True
            position, place = np.full(batch, step, dtype=np.int64), np.full(batch, beams * step, dtype=np.int64)
            attended = self.written if self.static else beams * (step + 1)
            given = [tokens, position, place, np.ascontiguousarray(mask[:, :, :attended])]
            slots = np.minimum(np.arange(self.width) // beams, step)[None].repeat(batch, axis=0)
            if self.config.relative:
                given.append(np.ascontiguousarray(slots[:, :attended]))
            exact, rounded = (
                session.step(state, *given).logits.copy()
                for session, state in zip(self.sessions, self.states, strict=True)
            )
            yield {
                "tokens": tokens,
                "position": position,
                "write_index": place,
                "self_mask": mask,
                **({"slot_position": slots} if self.config.relative else {}),
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
