"""The cross-attention weights of one decode, from ONNX Runtime, compared with PyTorch's.

source and target ids -> teacher forcing, step by step, on three sessions -> weights, and a check of every layer
                         ONNX Runtime | PyTorch at its precision | PyTorch in fp64, the oracle
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import attention_name, oracle_of

from ..numerics.budgets import WORST_FACTOR, finite, ratio, times
from ..numerics.error_scale import EPSILON
from ..numerics.teacher_forcing import ForcedRun, Tokens
from ..opening import open_session
from ..search.options import SearchOptions
from ..session import Session
from ..text.scoring import problem_with


@dataclass(frozen=True)
class LayerCheck:
    """One layer's weights by ONNX Runtime and by PyTorch: their largest difference, and the largest error of each.

    `floor` is the least error to expect, one unit in the last place of the largest weight: in a decode of a few tokens
    PyTorch may happen to get every weight right. Good exports were measured at up to 4.1 times PyTorch's error, decodes
    of a single token among them.
    """

    layer: int
    difference: float
    candidate: float
    reference: float
    floor: float

    @property
    def reason(self) -> str:
        if not math.isfinite(self.reference):
            return f"layer {self.layer}: PyTorch itself is not finite at this precision"
        if not math.isfinite(self.candidate):
            return f"layer {self.layer}: not finite"
        much = ratio(self.candidate, self.reference, self.floor)
        if much > WORST_FACTOR:
            return f"layer {self.layer}: error {times(much)} that of PyTorch, allowed {WORST_FACTOR:g}x"
        return ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class AttentionView:
    """The cross-attention weights of one decode. True if ONNX Runtime's equal PyTorch's up to rounding."""

    text: str  # the source
    output: str
    source: tuple[str, ...]  # a label for every source token
    target: tuple[str, ...]  # and for every output token
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    precision: str
    cache_form: str
    beam: int
    weights: np.ndarray = field(repr=False)  # [layers, heads, T, S], row t: in the step that chose target token t
    checks: tuple[LayerCheck, ...]
    unknown: tuple[str, ...] = ()  # parts of the text that the model has no token for

    @property
    def reason(self) -> str:
        if bad := next((check.reason for check in self.checks if not check), ""):
            return bad
        largest = max(check.difference for check in self.checks)
        return f"ONNX Runtime and PyTorch attend to the same tokens; largest difference {largest:.2g}"

    def __bool__(self) -> bool:
        return all(self.checks)

    def to_json(self) -> str:
        """Weights with 7 decimals, the precision of fp32; NaN becomes null."""
        values: dict[str, Any] = {"verdict": bool(self), "reason": self.reason, **dataclasses.asdict(self)}
        values["weights"] = self.weights.astype(np.float64).round(7).tolist()
        for check, described in zip(self.checks, values["checks"], strict=True):
            described.update(verdict=bool(check))
        return json.dumps(finite(values), ensure_ascii=False, allow_nan=False) + "\n"


def attention_view(
    bundle: Bundle,
    precision: str,
    source: Sequence[int],
    target: Sequence[int],
    options: SearchOptions,
    threads: int | None = None,
    progress: Progress = silent,
) -> AttentionView:
    """Feeds a target to three sessions by teacher forcing, and compares their weights. Labels are token ids."""
    wanted = tuple(target)
    if problem := problem_with("target", wanted, bundle.config.max_target, bundle.config.target_vocab):
        raise RequestError(problem)
    seen = []
    for done, (backend, computing) in enumerate(sessions_of(precision)):
        progress("attention: weights", done / 3)
        with open_session(bundle, backend, computing, threads, attention=True) as session:
            seen.append(weights_of(session, source, wanted, options))
    progress("attention: weights", 1.0)
    candidate, reference, oracle = seen
    return AttentionView(
        text=" ".join(map(str, source)),
        output=" ".join(map(str, wanted)),
        source=tuple(map(str, source)),
        target=tuple(map(str, wanted)),
        source_ids=tuple(source),
        target_ids=wanted,
        precision=precision,
        cache_form=bundle.cache_form,
        beam=options.beam,
        weights=candidate.astype(np.float32),
        checks=checks_of(candidate, reference, oracle, precision),
    )


def sessions_of(precision: str) -> tuple[tuple[str, str], ...]:
    """Backend and precision of the candidate, the reference and the oracle."""
    return ("onnxruntime", precision), ("torch", precision), ("torch", oracle_of(precision))


def checked_line(text: str) -> str:
    """Refuses text that is empty or not UTF-8: a shell passes on bytes that are not text."""
    if not text.strip():
        raise RequestError("the text is empty; give a line to decode")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("the text is not UTF-8; give a line of text, or token ids with --ids")
    return text


def weights_of(session: Session, source: Sequence[int], target: Tokens, options: SearchOptions) -> np.ndarray:
    """Feeds a target to a session that keeps its cross-attention -> weights [layers, heads, T, S]."""
    start = session.config.start_id if options.start is None else options.start
    run = ForcedRun(session, [source], len(target), options.prompt)
    names = [attention_name(layer) for layer in range(session.config.decoder_layers)]
    steps = []
    for token in (start, *target[:-1]):
        run.step(np.array([token], dtype=np.int64))
        steps.append([run.tensor(name)[0, :, 0] for name in names])  # [layers, H, S]
    return np.stack(steps, axis=2)


def checks_of(
    candidate: np.ndarray, reference: np.ndarray, oracle: np.ndarray, precision: str
) -> tuple[LayerCheck, ...]:
    """The weights [layers, heads, T, S] of three sessions -> a check of every layer."""

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())

    return tuple(
        LayerCheck(
            layer=layer + 1,
            difference=apart(candidate[layer], reference[layer]),
            candidate=apart(candidate[layer], oracle[layer]),
            reference=apart(reference[layer], oracle[layer]),
            floor=EPSILON[precision] * float(oracle[layer].max()),
        )
        for layer in range(len(oracle))
    )
