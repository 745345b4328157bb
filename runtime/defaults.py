"""A model's own way of decoding, and the options that follow from it: commands, Python, parity and benchmark ask here.

generation.json of a bundle -> Defaults, which every session of it carries
Defaults + what a user asked for -> SearchOptions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seq2engine.export.artifact.bundle import GENERATION, Bundle

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Defaults:
    """Fields of SearchOptions as JSON has them, and the name of the file that they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = GENERATION

    @property
    def start(self) -> int | None:
        """What the decoder is fed first; None: the start token of the model's config."""
        return self.values.get("start")

    @property
    def needs_attention(self) -> bool:
        """Whether it can be obeyed only by a session that keeps its cross-attention weights."""
        return bool(self.values.get("alignments") or self.values.get("coverage_penalty"))


def defaults_of(bundle: Bundle) -> Defaults:
    return Defaults(bundle.generation(), str(bundle.root / GENERATION))
