"""A model's own decoding defaults.

generation.json of a bundle -> Defaults, which every session of the bundle has
Defaults, and what a user asks for -> SearchOptions (model_options.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seq2engine.export.artifact.bundle import GENERATION, Bundle


@dataclass(frozen=True)
class Defaults:
    """Fields of SearchOptions as JSON has them, and the name of the file that they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = GENERATION

    @property
    def start(self) -> int | None:
        """The first token of the decoder's input; None: the start token of the model's config."""
        return self.values.get("start")

    @property
    def needs_attention(self) -> bool:
        """Whether they need a session that keeps its cross-attention weights."""
        return bool(self.values.get("alignments") or self.values.get("coverage_penalty"))


def defaults_of(bundle: Bundle) -> Defaults:
    return Defaults(bundle.generation(), str(bundle.root / GENERATION))
