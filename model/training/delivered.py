"""Quality of a trained checkpoint: loss and exact match of the averaged weights, and sample decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..tokenizers.base import Tokenizer
from ..transformer import Transformer
from .data import Pair, batch_from_pairs
from .loop import greedy_ids, validate

SAMPLES = 12


@dataclass(frozen=True)
class Sample:
    """A dev pair as text, and the greedy decode of its source."""

    source: str
    reference: str
    output: str

    @property
    def right(self) -> bool:
        return self.output == self.reference


@dataclass(frozen=True)
class Delivered:
    """The checkpoint's own weights on the dev set."""

    dev_loss: float
    exact_match: float
    samples: tuple[Sample, ...] = ()


def delivered_from_model(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], pairs: Sequence[Pair]
) -> Delivered:
    """Measures a model on dev pairs, of which `texts` are the texts, and decodes some from all over the set."""
    dev_loss, exact_match = validate(model, pairs)
    count = min(SAMPLES, len(pairs))
    places = [i * len(pairs) // count for i in range(count)]
    batch = batch_from_pairs([pairs[place] for place in places])
    with torch.inference_mode():
        decoded = greedy_ids(model, batch.source, batch.source_mask, model.config.max_target)
    samples = (Sample(*texts[place], tokenizer.decode_target(ids)) for place, ids in zip(places, decoded, strict=True))
    return Delivered(dev_loss, exact_match, tuple(samples))
