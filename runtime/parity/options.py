"""What a parity run compares, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..defaults import Defaults
from ..quality.metrics import References
from .levels.baseline import Against

BEAM = 4  # of models that decode greedily by themselves


@dataclass(frozen=True)
class ParityOptions:
    """`sources` are token ids; without them, `count` random sources are drawn with `seed`.

    `beam` is that of the beam decodes (None: the model's own, or 4 if it decodes greedily), `max_length` the most
    tokens of a decode (None: 64, or the model's maximum if that is less), `batch` the number of sources decoded
    together. `threads`, `engine`, `deterministic` and `provider` open the candidate's session.

    With `references` (source texts and their right outputs) these texts are the sources, and both sides are scored with
    these `metrics`; `source_language` is theirs, as the model names it. `target_language` chooses the first token of
    every decode (None: the model's own). Decodes are compared with PyTorch's in fp32, or with the session that
    `against` names.
    """

    sources: Sequence[Sequence[int]] | None = None
    count: int = 64
    seed: int = 0
    beam: int | None = None
    max_length: int | None = None
    batch: int = 32
    threads: int | None = None
    engine: str | None = None
    references: References | None = None
    deterministic: bool = False
    provider: str | None = None
    against: Against | None = None
    metrics: Sequence[str] = ("errors",)
    command: str = "seq2engine parity BUNDLE"  # the command that a located fault refers to
    command_line: str = ""  # as it was given, for the report
    source_language: str | None = None
    target_language: str | None = None


def beam_of(beam: int | None, defaults: Defaults) -> int:
    """The beams of the beam decodes: as asked for, else the model's own, or 4 if it decodes greedily."""
    own = int(defaults.values.get("beam", 1))
    return beam if beam is not None else own if own > 1 else BEAM
