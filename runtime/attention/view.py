"""Where a model looks: the cross-attention weights of one decode, from ONNX Runtime, held against PyTorch's.

text -> ids -> decode on ONNX Runtime -> the output forced step by step through three sessions
                                         ONNX Runtime | PyTorch at its precision | PyTorch in fp64, the truth
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.contract import attention_name, oracle_of
from seq2engine.model.tokenizers.base import Coder, unknown_text
from seq2engine.model.tokenizers.ids import IdsTokenizer

from ..generate import generate
from ..model_options import first_token, options_from_session
from ..numerics.budgets import WORST_FACTOR, finite, ratio, times
from ..numerics.error_scale import EPSILON
from ..numerics.teacher_forcing import ForcedRun, Tokens
from ..opening import open_session
from ..search.options import SearchOptions
from ..session import Session


@dataclass(frozen=True)
class LayerCheck:
    """One layer's weights by ONNX Runtime and by PyTorch: how far apart, and how far from fp64 at worst.

    `floor` is the least error to reckon with, one unit in the last place of the largest weight: of a decode of a few
    tokens PyTorch may happen to get every weight right. Good exports were measured at up to 4.1 times PyTorch's error,
    decodes of a single token among them.
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
            return f"layer {self.layer}: errs {times(much)} as much as PyTorch itself, allowed {WORST_FACTOR:g}x"
        return ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class AttentionView:
    """One decode and where it looked. True if ONNX Runtime looked where PyTorch looks, up to rounding."""

    text: str  # what was given
    output: str  # what was said
    source: tuple[str, ...]  # a label for every source token
    target: tuple[str, ...]  # and for every output token
    source_ids: Tokens
    target_ids: Tokens
    precision: str
    cache_form: str
    beam: int
    weights: np.ndarray = field(repr=False)  # [layers, heads, T, S], row t: while target token t was being chosen
    checks: tuple[LayerCheck, ...]
    unknown: tuple[str, ...] = ()  # of the text: what the model has no token for

    @property
    def reason(self) -> str:
        if bad := next((check.reason for check in self.checks if not check), ""):
            return bad
        largest = max(check.difference for check in self.checks)
        return f"ONNX Runtime and PyTorch look at the same tokens; largest difference {largest:.2g}"

    def __bool__(self) -> bool:
        return all(self.checks)

    def to_json(self) -> str:
        """Weights with 7 decimals, which is all that fp32 has; not a number becomes null."""
        values: dict[str, Any] = {"verdict": bool(self), "reason": self.reason, **dataclasses.asdict(self)}
        values["weights"] = self.weights.astype(np.float64).round(7).tolist()
        for check, described in zip(self.checks, values["checks"], strict=True):
            described.update(verdict=bool(check))
        return json.dumps(finite(values), ensure_ascii=False, allow_nan=False) + "\n"


def attention_of(
    bundle: Bundle | str | os.PathLike[str],
    text: str,
    ids: bool = False,
    beam: int | None = None,
    precision: str | None = None,
    max_length: int | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    source_language: str | None = None,
    target_language: str | None = None,
    strict: bool = False,
) -> AttentionView:
    """Decodes a line of text, or of token ids where `ids` or where the model has no tokenizer, and looks into it.

    If `strict`, text that the model has no token for is refused.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    tokenizer = opened.tokenizer() if opened.takes_text else None
    coder: Coder = IdsTokenizer() if ids or tokenizer is None else tokenizer
    precision = precision or default_precision(opened)
    source = coder.encode_source(checked_line(text), source_language)
    unknown = tuple(coder.unknown_source(text))
    if strict and unknown:
        raise RequestError(f"the text has {unknown_text(unknown)}")
    progress("attention: decode", 0.0)
    with open_session(opened, "onnxruntime", precision, threads) as session:
        first = first_token(session, coder, target_language)
        options = options_from_session(session, beam=beam, max_length=max_length, nbest=1, forced_bos=first)
        said = generate(session, [source], options)[0][0].tokens
    progress("attention: decode", 1.0)
    seen = []
    # The candidate, the reference and the oracle.
    arms = (("onnxruntime", precision), ("torch", precision), ("torch", oracle_of(precision)))
    for done, (backend, computes_in) in enumerate(arms):
        progress("attention: look", done / len(arms))
        with open_session(opened, backend, computes_in, threads, attention=True) as session:
            seen.append(looks_of(session, source, said, options))
    progress("attention: look", 1.0)
    candidate, reference, oracle = seen
    return AttentionView(
        text=text.strip(),
        output=" ".join(map(str, said)) if tokenizer is None else tokenizer.decode_target(said),
        source=tuple(map(str, source) if tokenizer is None else tokenizer.source_tokens(source)),
        target=tuple(map(str, said) if tokenizer is None else tokenizer.target_tokens(said)),
        source_ids=tuple(source),
        target_ids=said,
        precision=precision,
        cache_form=opened.cache_form,
        beam=options.beam,
        weights=candidate.astype(np.float32),
        checks=checks_of(candidate, reference, oracle, precision),
        unknown=unknown,
    )


def checked_line(text: str) -> str:
    """Refuses text that is empty, or that no file could hold: a shell may pass on bytes that are no text at all."""
    if not text.strip():
        raise RequestError("the text is empty; give a line to decode")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("the text is not UTF-8; give a line of text, or token ids with --ids")
    return text


def looks_of(session: Session, source: Sequence[int], said: Tokens, options: SearchOptions) -> np.ndarray:
    """Forces one output through a session that keeps where it looks -> weights [layers, heads, T, S]."""
    start = session.config.start_id if options.start is None else options.start
    run = ForcedRun(session, [source], len(said))
    names = [attention_name(layer) for layer in range(session.config.decoder_layers)]
    steps = []
    for token in (start, *said[:-1]):
        run.step(np.array([token], dtype=np.int64))
        steps.append([run.tensor(name)[0, :, 0] for name in names])  # [layers, H, S]
    return np.stack(steps, axis=2)


def checks_of(
    candidate: np.ndarray, reference: np.ndarray, oracle: np.ndarray, precision: str
) -> tuple[LayerCheck, ...]:
    """Three times weights [layers, heads, T, S] -> a check of every layer."""

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
