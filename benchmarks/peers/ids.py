"""Conversion of our token ids and weights for a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from seq2engine.model.config import ModelConfig
from seq2engine.model.transformer import Transformer


@dataclass(frozen=True)
class Ids:
    """What a peer adds to our ids, its special tokens, and what it is fed after the start token."""

    source: int
    target: int
    vocab: int
    pad: int
    start: int
    end: int
    prompt: tuple[int, ...] = ()


def ids_of(config: ModelConfig) -> Ids:
    """Two vocabularies become one, the target's ids after the source's."""
    shift = 0 if config.share_embeddings else config.source_vocab
    return Ids(
        source=0,
        target=shift,
        vocab=shift + config.target_vocab,
        pad=shift + config.pad_id,
        start=shift + config.start_id,
        end=shift + config.end_id,
    )


def cut_weights(model: Transformer, renames: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Our weights under their names; what we keep in one tensor (q|k|v) is cut into its parts."""
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    theirs: dict[str, Tensor] = {}
    for name, parts in renames.items():
        pieces = ours[name].chunk(len(parts))
        theirs |= {part: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    return theirs
