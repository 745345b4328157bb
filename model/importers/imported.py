"""What every importer gives back: a model of ours, how its makers decode with it, and what the user should know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..transformer import Transformer


@dataclass(frozen=True)
class Imported:
    """A foreign checkpoint as one of ours.

    `generation` holds fields of the runtime's SearchOptions as JSON values; a field it does not name keeps its default.
    `notes` are one line each: settings that were not carried over, or tables that changed their form.
    """

    model: Transformer
    generation: dict[str, Any]
    notes: tuple[str, ...]
    kind: str
