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


def test_the_imported_folder_keeps_its_settings_for_pictures(pair: Pair, tmp_path: Path) -> None:
    assert source_of(pair.folder).read is checkpoint_from_trocr
    result = import_checkpoint(pair.folder, tmp_path / "ours")
    assert (result.kind, result.takes_text) == ("TrOCR", True)
    images = read_images(tmp_path / "ours", pair.imported.model.config)
    assert images == pair.imported.images
    assert isinstance(images, ImageConfig)
    assert json.loads((tmp_path / "ours" / "generation.json").read_text()) == {"max_length": LENGTH - 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_trocr(small_trocr(8), tmp_path_factory.mktemp("one"))


def changed(folder: Path, target: Path, part: str = "", **values: Any) -> Path:
    """A copy with other fields in config.json, or in a part of it; None removes one."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    inner = config[part] if part else config
    inner |= values
    for name, value in values.items():
        if value is None:
            del inner[name]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("encoder", {"model_type": "donut-swin"}, "the encoder is 'donut-swin', supported are vit and deit"),
        ("decoder", {"model_type": "gpt2"}, "the decoder is 'gpt2', supported are trocr"),
        ("", {"encoder": None, "decoder": 7}, "the encoder is None, .*; the decoder is 7, supported"),
        ("encoder", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', supported are relu, gelu"),
        ("decoder", {"activation_function": "tanh"}, "activation_function is 'tanh', supported are"),
        (
            "decoder",
            {"cross_attention_hidden_size": 99},
            "cross_attention_hidden_size is 99, expected the encoder's 24",
        ),
        ("encoder", {"image_size": "big"}, "image_size is 'big', expected a number or height and width"),
        ("encoder", {"patch_size": [8, 0]}, "patch_size is .8, 0., expected at least 1"),
        ("encoder", {"hidden_size": "24"}, "encoder hidden_size is '24', expected int"),
        ("encoder", {"head_dim": 5}, "head_dim is 5, supported is hidden_size / num_attention_heads"),
        ("encoder", {"num_hidden_layers": 10**9}, "encoder_layers is 1000000000, expected at most 1024"),
        ("encoder", {"num_hidden_layers": 3}, "missing encoder.encoder.layer.2"),
        ("encoder", {"qkv_bias": False}, "qkv_bias is False, but there is a encoder"),
        ("encoder", {"image_size": 64, "patch_size": 8}, "pixels would be 32x48, expected the encoder's 64x64"),
        ("decoder", {"eos_token_id": [1, 2]}, None),  # generation_config.json has one
        ("decoder", {"d_model": 40}, "does not|missing|is not divisible|expected"),
    ],
)
def test_what_cannot_be_ours_is_refused(
    part: str, values: dict[str, Any], message: str | None, folder: Path, tmp_path: Path
) -> None:
    copy = changed(folder, tmp_path / "copy", part, **values)
    if message is None:
        assert checkpoint_from_trocr(copy).model.config.end_id == END
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint_from_trocr(copy)
    assert "\n" not in str(caught.value)


def test_fields_that_a_file_does_not_name_are_the_library_s(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy", "encoder", qkv_bias=None, hidden_act=None, layer_norm_eps=None)
    assert checkpoint_from_trocr(copy).model.config == checkpoint_from_trocr(folder).model.config


def test_an_old_folder_has_its_generation_settings_in_config_json(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy", "decoder", max_length=20, num_beams=3, length_penalty=2.0)
    (copy / "generation_config.json").unlink()
    imported = checkpoint_from_trocr(copy)
    assert imported.generation == {"beam": 3, "length_penalty": 2.0}
    assert (imported.model.config.start_id, imported.model.config.end_id) == (2, END)


def test_without_settings_of_the_processor_there_is_a_note(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "preprocessor_config.json").unlink()
    imported = checkpoint_from_trocr(copy)
    assert imported.images is None
    assert any("takes pixels, no pictures" in note for note in imported.notes)
    (copy / "processor_config.json").write_text(
        json.dumps({"image_processor": json.loads((folder / "preprocessor_config.json").read_text())})
    )
    assert checkpoint_from_trocr(copy).images == checkpoint_from_trocr(folder).images


def test_a_byte_level_tokenizer_needs_no_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    """As the published models have it: vocab.json and merges.txt."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    vocabulary = json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"]
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text(json.dumps(vocabulary))
    (copy / "merges.txt").write_text("#version: 0.2\n")
    ours, whole = checkpoint_from_trocr(copy).tokenizer, checkpoint_from_trocr(folder).tokenizer
    assert ours is not None
    assert whole is not None
    tokens = [0, 7, 30, vocabulary["Ġ"], 9, 1, END]
    assert ours.decode_target(tokens) == whole.decode_target(tokens)
    assert ours.encode_target("ab c") == whole.encode_target("ab c")
    assert ours.encode_source("ab") == [0, *ours.encode_target("ab")]  # as RoBERTa and BART frame a text


def test_pixels_of_another_shape_are_refused(pair: Pair) -> None:
    with (
        TorchSession(pair.imported.model) as session,
        pytest.raises(RequestError, match=r"expected .*: resize the image"),
    ):
        generate(session, [np.zeros((1, 3, 3), np.float32)], options_from_values({"max_length": 4}, 31, "here"))


def test_positions_of_an_image(pair: Pair) -> None:
    config = pair.imported.model.config
    patches = PATCHES if config.patch_width == 8 else PATCHES * 8 // 12
    assert config.max_source == config.class_tokens + patches
