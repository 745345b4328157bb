"""A decoded corpus: the sources, the search options, and the outputs of every session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.tokenizers.base import Tokenizer

from ...numerics.teacher_forcing import Tokens
from ...quality.metrics import References
from ...search.options import SearchOptions
from .decodes import Outputs


@dataclass(frozen=True)
class Corpus:
    """`outputs` are token ids, stored once where two sides agree; nothing else grows with the corpus."""

    bundle: Bundle
    sources: Sequence[Sequence[int]]
    searches: Sequence[SearchOptions]
    outputs: Outputs
    references: References | None = None  # their texts are the sources
    metrics: Sequence[str] = ("errors",)
    batch: int = 32
    threads: int | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.bundle.tokenizer()

    def texts(self, outputs: Mapping[int, Tokens], rows: Sequence[int] | None = None) -> dict[str, str]:
        """Outputs as text, by the text of their source; of all references or of some rows."""
        assert self.references is not None
        texts = list(self.references)
        chosen = range(len(texts)) if rows is None else rows
        return {texts[row]: self.tokenizer.decode_target(outputs[row]) for row in chosen}
