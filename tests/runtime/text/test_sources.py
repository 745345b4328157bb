"""How many sources parity compares tensors on: fewer where a vocabulary is large, never too few."""

from __future__ import annotations

import dataclasses

import pytest

from seq2engine.model.presets import PRESETS
from seq2engine.runtime.text.sources import FEWEST_SOURCES, STEP_LOGITS, TENSOR_SOURCES, tensor_sources


@pytest.mark.parametrize(
    ("vocab", "expected"),
    [
        (40, TENSOR_SOURCES),
        (STEP_LOGITS // TENSOR_SOURCES, TENSOR_SOURCES),
        (STEP_LOGITS // 32, 32),
        (STEP_LOGITS, FEWEST_SOURCES),
    ],
)
def test_a_step_has_so_many_logits(vocab, expected):
    assert tensor_sources(dataclasses.replace(PRESETS["base"], target_vocab=vocab, share_embeddings=False)) == expected
