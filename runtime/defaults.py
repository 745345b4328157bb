"""A model's own decoding defaults.

generation.json of a bundle -> Defaults, which every session of the bundle has
Defaults, and what a user asks for -> SearchOptions (model_options.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seq2engine.export.artifact.bundle import GENERATION, Bundle

from .search.options import checked_values


@dataclass(frozen=True)
class Defaults:
    """Fields of SearchOptions, of the right types, and the name of the file that they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = GENERATION

    @property
    def start(self) -> int | None:
        """The first token of the decoder's input; None: the start token of the model's config."""
        return self.values.get("start")

    @property
    def prompt(self) -> tuple[int, ...]:
        """What the decoder is fed after the start token, before it emits anything."""
        return tuple(self.values.get("prompt", ()))

    @property
    def needs_attention(self) -> bool:
        """Whether they need a session that keeps its cross-attention weights."""
        return bool(self.values.get("alignments") or self.values.get("coverage_penalty"))


def defaults_of(bundle: Bundle) -> Defaults:
    where = str(bundle.root / GENERATION)
    return Defaults(checked_values(bundle.generation(), where), where)
