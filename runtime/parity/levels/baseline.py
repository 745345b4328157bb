"""The baseline that a candidate's decodes are compared with: PyTorch in fp32, or what `--against` names."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import PRECISE_FIRST
from seq2engine.export.contract import PRECISIONS, QUANTISED, oracle_of

from ...backends import BACKENDS
from ...session import Session

Open = Callable[[Bundle, str, str], Session]  # bundle, backend, precision


@dataclass(frozen=True)
class Against:
    """The session that `--against` names: a bundle, a backend and a precision; None is the candidate's own."""

    bundle: Bundle | None = None
    backend: str | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        """For the name of a report."""
        folder = None if self.bundle is None else self.bundle.root.resolve().name
        return " ".join(filter(None, (folder, self.backend, self.precision)))


def against_from_text(text: str) -> Against:
    """`torch`, `onnxruntime:fp16`, `:fp16`, `BUNDLE`, `BUNDLE@onnxruntime:fp16`."""
    folder, at, session = text.rpartition("@")
    if not at and text.partition(":")[0] not in ("", *BACKENDS):
        folder, session = text, ""
    backend, _, precision = session.partition(":")
    problems = []
    if backend and backend not in BACKENDS:
        problems.append(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    if precision and precision not in PRECISIONS:
        problems.append(f"unknown precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if problems:
        raise RequestError(
            f"--against {shlex.quote(text)}: {'; '.join(problems)}; write BACKEND:PRECISION, a bundle folder, or "
            "FOLDER@BACKEND:PRECISION"
        )
    return Against(open_bundle(folder) if folder else None, backend or None, precision or None)


@dataclass(frozen=True)
class Baseline:
    """The session whose decodes are compared, and the PyTorch sessions whose rounding error explains divergences."""

    bundle: Bundle
    backend: str
    precision: str  # as open_session has it: "fp32:int8" computes in fp32 over int8's weights
    name: str
    judges: tuple[str, str]  # precisions of the oracle and of the reference

    @property
    def command(self) -> str:
        """The parity run of the baseline itself."""
        precision = self.precision.rpartition(":")[2]
        return (
            f"seq2engine parity {shlex.quote(str(self.bundle.root))} --backend {self.backend} --precision {precision}"
        )


def baseline_of(bundle: Bundle, backend: str, precision: str, against: Against | None) -> Baseline:
    """Without `against`, PyTorch in fp32 with the candidate's own weights: faster than fp16 on a CPU, and more exact.
    PyTorch's error at the candidate's precision is measured only where the two diverge.
    """
    if against is None:
        own = f"fp32:{precision}" if precision in QUANTISED else "fp32"
        return Baseline(bundle, "torch", own, f"PyTorch {own}", (oracle_of(precision), precision))
    other = against.bundle or bundle
    theirs = against.precision or precision
    on = against.backend or backend
    ours, given = bundle.config, other.config
    if (ours.source_vocab, ours.target_vocab, ours.start_id, ours.end_id) != (
        given.source_vocab,
        given.target_vocab,
        given.start_id,
        given.end_id,
    ):
        raise RequestError(
            f"{other.root} has other vocabularies or special tokens than {bundle.root}, so their decodes cannot be "
            "compared; give two bundles of one model"
        )
    name = f"{'PyTorch' if on == 'torch' else on} {theirs}" + (f" of {other.root}" if against.bundle else "")
    coarser = max(precision, theirs, key=PRECISE_FIRST.index)  # the less precise one's error explains a divergence
    return Baseline(other, on, theirs, name, (oracle_of(precision) if precision == theirs else "fp64", coarser))
