"""Imported TrOCR models compute and emit what the real library does, from pixels."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rounding import double_error
from support.trocr_models import (
    END,
    LENGTH,
    PATCHES,
    VOCAB,
    library_outputs,
    pixels,
    saved_trocr,
    small_trocr,
)

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.images import ImageConfig, read_images
from seq2engine.model.importers.detect import import_checkpoint, source_of
from seq2engine.model.importers.imported import Imported
from seq2engine.model.importers.trocr import checkpoint_from_trocr
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import options_from_values
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

# seed (of a model whose outputs wander), kind of the encoder, and changes of it and of the decoder
CASES: dict[str, dict[str, Any]] = {
    "base": {"seed": 8},
    "deit, relu, scaled, untied": {
        "seed": 10,
        "kind": "deit",
        "activation_function": "relu",
        "scale_embedding": True,
        "tied": False,
    },
    "sinusoidal, no norm of embeddings, no biases of qkv": {
        "seed": 8,
        "encoder": {"qkv_bias": False, "hidden_act": "relu"},
        "use_learned_position_embeddings": False,
        "layernorm_embedding": False,
    },
    "projected": {"seed": 9, "cross_attention_hidden_size": None},
    "one width, gray, oblong patches": {
        "seed": 7,
        "encoder": {"hidden_size": 32, "num_attention_heads": 4, "num_channels": 1, "patch_size": [8, 12]},
        "cross_attention_hidden_size": None,
    },
}
BEAM = 4


@dataclass(frozen=True)
class Pair:
    theirs: Any
    folder: Path
    imported: Imported
    sources: list[np.ndarray]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    changes = CASES[request.param]
    model = small_trocr(**changes)
    channels = model.config.encoder.num_channels
    processor = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    folder = saved_trocr(model, tmp_path_factory.mktemp("model"), processor)
    # Not loaded again: transformers 5.22 leaves the table of sinusoidal positions without numbers (a meta tensor).
    return Pair(model, folder, checkpoint_from_trocr(folder), pixels(6, channels))


def test_states_and_logits_are_the_library_s_in_fp64(pair: Pair) -> None:
    given = torch.from_numpy(np.stack(pair.sources))
    ours, theirs = checkpoint_from_trocr(pair.folder).model, pair.theirs.double()
    mask = torch.ones((len(given), ours.config.max_source), dtype=torch.bool)
    forced = torch.randint(3, VOCAB, (len(given), LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        rounded_states, rounded_logits = ours.encode(given, mask)[0], ours(given, mask, forced)
        ours, given = ours.double(), given.double()
        states, logits = ours.encode(given, mask)[0], ours(given, mask, forced)
        their_states = theirs.encoder(given).last_hidden_state
        if ours.config.project_states:
            their_states = theirs.enc_to_dec_proj(their_states)
        their_logits = theirs(pixel_values=given, decoder_input_ids=forced).logits
    pair.theirs.float()
    torch.testing.assert_close(states, their_states, rtol=0, atol=min(double_error(rounded_states, states), 1e-10))
    torch.testing.assert_close(logits, their_logits, rtol=0, atol=min(double_error(rounded_logits, logits), 1e-10))
    assert their_logits.std() > 0.1


def outputs(session: Session, pair: Pair, beam: int) -> list[list[int]]:
    options = options_from_values(pair.imported.generation, session.limits.target, "generation", beam=beam)
    return [list(best.tokens) for best, *_ in generate(session, pair.sources, options)]


def test_outputs_are_the_library_s_token_for_token(pair: Pair, tmp_path: Path) -> None:
    expected = {beam: library_outputs(pair.theirs, pair.sources, num_beams=beam) for beam in (1, BEAM)}
    assert len({tuple(row) for row in expected[1]}) >= 5, "outputs depend on the image"
    assert len({len(row) for row in expected[1]}) >= 3, "they end at various lengths"
    with TorchSession(pair.imported.model) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected
    with open_session(onnx_from_model(pair.imported.model, tmp_path / "bundle", ("fp32",))) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected
        options = options_from_values(pair.imported.generation, session.limits.target, "generation", beam=1)
        found = dict(translate_many(session, pair.sources, options, batch=2))  # continuous batching
        assert [list(found[row][0].tokens) for row in range(6)] == expected[1]
