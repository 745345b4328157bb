"""config.json and generation_config.json: what every field becomes, whose default stands in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hugging_face_models import CLASSES, END, LENGTH, START, VOCAB, library_outputs, saved, small_model, sources

from seq2engine.errors import CheckpointError
from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.importers.hugging_face_config import (
    FAMILIES,
    config_from_settings,
    family_of,
    settings_of,
    start_field,
)
from seq2engine.model.importers.hugging_face_generation import generation_from_files
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import options_from_values
from seq2engine.runtime.torch_session import TorchSession


def config_of(model_type: Any, generation: dict[str, Any] | None = None, **values: Any) -> ModelConfig:
    values = {"model_type": model_type, "vocab_size": 60000, **values}
    family = family_of(values, "config.json")
    settings = settings_of(family, values, "config.json")
    return config_from_settings(family, settings, generation or {}, True, True, False, "config.json")


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_fields_are_the_library_s_defaults(name: str) -> None:
    config_class, _ = CLASSES[name]
    library = config_class()
    for field, value in FAMILIES[name].defaults.items():
        assert getattr(library, field, None) == value, field


@pytest.mark.parametrize(
    ("name", "norm", "embedding_norm", "activation", "scaled"),
    [
        ("marian", "post", False, "gelu", False),
        ("bart", "post", True, "gelu", False),
        ("mbart", "pre", True, "gelu", False),
        ("m2m_100", "pre", False, "relu", True),
        ("pegasus", "pre", False, "gelu", False),
        ("blenderbot", "pre", False, "gelu", False),
    ],
)
def test_the_structure_is_the_family_s(
    name: str, norm: str, embedding_norm: bool, activation: str, scaled: bool
) -> None:
    config = config_of(name)
    assert (config.norm, config.embedding_norm, config.positions) == (norm, embedding_norm, "learned")
    assert (config.activation, config.scale_embeddings, config.final_norm) == (activation, scaled, False)
    assert config.max_source == config.max_target == FAMILIES[name].defaults["max_position_embeddings"]


@pytest.mark.parametrize(("theirs", "ours"), [("swish", "silu"), ("silu", "silu"), ("gelu", "gelu"), ("relu", "relu")])
def test_activations(theirs: str, ours: str) -> None:
    assert config_of("bart", activation_function=theirs).activation == ours


def test_fields_of_older_files_that_agree_are_welcome() -> None:
    config_of("bart", normalize_before=False, normalize_embedding=True, add_final_layer_norm=False)
    config_of("mbart", normalize_before=True, layernorm_embedding=True, static_position_embeddings=False)
    config_of("pegasus", normalize_before=True, normalize_embedding=False, static_position_embeddings=True)
    config_of("m2m_100", scale_embedding=None, dropout=0.1)  # null is as good as no field


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bart", {"normalize_before": True}, "normalize_before is True, supported for BART is False"),
        ("pegasus", {"normalize_before": False}, "normalize_before is False, supported for Pegasus is True"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding is True, supported for Marian is False"),
        ("mbart", {"layernorm_embedding": False}, "layernorm_embedding is False, supported for mBART is True"),
        ("bart", {"add_final_layer_norm": True}, "add_final_layer_norm is True, supported for BART is False"),
        ("bart", {"static_position_embeddings": True}, "static_position_embeddings is True, supported for BART"),
        ("bart", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
        ("bart", {"decoder_attention_heads": 8}, "decoder_attention_heads is 8, supported for BART is 16"),
        ("bart", {"encoder_ffn_dim": 8}, "decoder_ffn_dim is 4096, supported for BART is 8"),
        ("bart", {"activation_function": "gelu_new"}, "'gelu_new', supported are relu, gelu, silu, swish"),
        ("bart", {"activation_function": ["gelu"]}, "activation_function is \\['gelu'\\], expected str"),
        ("bart", {"d_model": "big"}, "d_model is 'big', expected int"),
        ("bart", {"d_model": 24, "encoder_attention_heads": 7, "decoder_attention_heads": 7}, "not divisible by heads"),
        ("bart", {"pad_token_id": "<pad>"}, "pad_token_id is '<pad>', expected int"),
        ("bart", {"pad_token_id": None}, "pad_token_id is None, supported is one token id"),
        ("bart", {"eos_token_id": [2, 3]}, "eos_token_id is \\[2, 3\\], supported is one token id"),
        ("bart", {"decoder_start_token_id": [2, 3]}, "decoder_start_token_id is \\[2, 3\\], supported is one token id"),
        ("bart", {"pad_token_id": 2}, "pad_id and end_id are both 2"),
        ("marian", {"decoder_start_token_id": None}, "decoder_start_token_id is None, supported is one token id"),
        (["bart"], {}, "model_type is \\['bart'\\], expected one of"),
        ("gpt2", {}, "model_type is 'gpt2', expected one of marian, bart, mbart, m2m_100, pegasus, blenderbot"),
    ],
)
def test_what_is_not_supported_is_named(name: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}") as caught:
        config_of(name, **values)
    assert "\n" not in str(caught.value)


def test_all_problems_of_a_file_are_listed_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"normalize_before is True.*; activation_function is 'tanh'"):
        config_of("bart", normalize_before=True, activation_function="tanh")


@pytest.mark.parametrize(
    ("name", "values", "generation", "expected"),
    [
        ("bart", {}, {}, ("decoder_start_token_id", 2)),
        ("bart", {"decoder_start_token_id": 7}, {}, ("decoder_start_token_id", 7)),
        ("bart", {"decoder_start_token_id": 7}, {"decoder_start_token_id": 8}, ("decoder_start_token_id", 8)),
        ("bart", {"decoder_start_token_id": 7}, {"bos_token_id": 9}, ("bos_token_id", 9)),  # as `generate` has it
        ("bart", {"decoder_start_token_id": 7}, {"num_beams": 4}, ("decoder_start_token_id", 7)),
        ("mbart", {"bos_token_id": 5}, {}, ("bos_token_id", 5)),
        ("marian", {}, {}, ("decoder_start_token_id", 58100)),
    ],
)
def test_where_the_start_token_is_looked_for(
    name: str, values: dict[str, Any], generation: dict[str, Any], expected: tuple[str, int]
) -> None:
    assert start_field(settings_of(FAMILIES[name], values, ""), generation) == expected
    assert config_of(name, generation, **values).start_id == expected[1]


def test_the_end_token_is_the_one_generation_stops_at() -> None:
    assert config_of("bart", {"eos_token_id": [7]}).end_id == 7
    assert config_of("bart", {"num_beams": 2}).end_id == 2


def test_two_vocabularies() -> None:
    values = {"model_type": "marian", "vocab_size": 60000, "decoder_vocab_size": 59000}
    family = family_of(values, "")
    for share, target in ((True, 60000), (False, 59000)):
        settings = settings_of(family, values | {"share_encoder_decoder_embeddings": share}, "")
        config = config_from_settings(family, settings, {}, share, True, False, "")
        assert (config.source_vocab, config.target_vocab) == (60000, target)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"num_beams": 5, "early_stopping": True}, {"beam": 5, "early_stopping": True}),
        ({"length_penalty": 2}, {"length_penalty": 2}),
        ({"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "min_length": 0}, {}),
        ({"early_stopping": "never", "num_beams": None}, {"early_stopping": "never"}),
        ({"max_length": 200}, {"max_length": 199}),
        ({"max_length": 20, "max_new_tokens": 50}, {"max_length": 50}),
        ({"min_length": 10}, {"min_length": 10}),
        ({"min_length": 30, "min_new_tokens": 10}, {"min_length": 11}),
        ({"forced_bos_token_id": 0, "forced_eos_token_id": [2]}, {"forced_bos": 0, "forced_eos": 2}),
        ({"bad_words_ids": [[7], [8, 9]]}, {"banned": [[7], [8, 9]]}),
        ({"bad_words_ids": [[8, 9]], "suppress_tokens": [7, 6]}, {"banned": [[8, 9], [7], [6]]}),
        ({"suppress_tokens": [], "begin_suppress_tokens": [2, 7]}, {"first_banned": [2, 7]}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram": 3}),
        ({"encoder_no_repeat_ngram_size": 4}, {"source_no_repeat_ngram": 4}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_generation_fields(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for files in ((theirs, None), ({}, theirs)):
        generation, notes = generation_from_files(*files, "config.json")
        assert (generation, notes) == (ours, [])
        options_from_values(json.loads(json.dumps(generation)), 300, "generation.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": "4"}, "num_beams is '4', expected a whole number from 1 on"),
        ({"num_beams": 0}, "num_beams is 0, expected a whole number from 1 on"),
        ({"length_penalty": "long"}, "length_penalty is 'long', expected a number"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon', expected true, false or never"),
        ({"max_length": 3.5}, "max_length is 3.5, expected a whole number"),
        ({"max_length": 1}, "max_length leaves no token to emit"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected more than 0"),
        ({"forced_eos_token_id": [2, 3]}, "forced_eos_token_id is \\[2, 3\\], supported is one token id"),
        ({"bad_words_ids": [7]}, "bad_words_ids is \\[7\\], expected lists of token ids"),
        ({"suppress_tokens": 7}, "suppress_tokens is 7, expected a list of token ids"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens is \\['a'\\], expected a list of token ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is \\[\\[\\]\\], expected lists of token ids"),
    ],
)
def test_generation_fields_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^generation_config.json: {message}"):
        generation_from_files({}, values, "generation_config.json")


def test_settings_left_behind_are_noted() -> None:
    fields = {"do_sample": True, "num_beam_groups": 2, "eos_token_id": 3, "suppress_tokens": [3]}
    _, notes = generation_from_files({}, fields, "")
    assert notes == [
        "do_sample True is not carried over",
        "num_beam_groups 2 is not carried over",
        "suppress_tokens has the end token, which stays allowed: a search must be able to end",
    ]
    generation, notes = generation_from_files({"num_beams": 5, "max_length": 9}, {"max_length": 9}, "")
    assert generation == {"max_length": 8}
    assert notes == ["generation_config.json is used; config.json differs in num_beams"]


@pytest.mark.parametrize(
    "own", [None, {"num_beams": 2, "max_length": 9, "eos_token_id": END, "forced_bos_token_id": 11}]
)
def test_of_two_files_the_library_s_choice_is_ours(own: dict[str, Any] | None, tmp_path: Path) -> None:
    """An older config.json with decoding options, without and with a generation_config.json beside it."""
    model = small_model("bart", seed=3, biased=True)
    folder = saved(model, tmp_path / "model")
    legacy = {"num_beams": 4, "max_length": 12, "no_repeat_ngram_size": 2, "forced_bos_token_id": 9, "min_length": 4}
    values = json.loads((folder / "config.json").read_text()) | legacy
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").unlink()
    if own is not None:
        start = {"decoder_start_token_id": START, "pad_token_id": 1}
        (folder / "generation_config.json").write_text(json.dumps(own | start))
    imported = checkpoint_from_hugging_face(folder)
    session = TorchSession(imported.model)
    options = options_from_values(imported.generation, LENGTH, "generation.json")
    theirs = library_outputs(type(model).from_pretrained(folder).eval(), sources(VOCAB))
    assert [list(best.tokens) for best, *_ in generate(session, sources(VOCAB), options)] == theirs
    assert options.forced_bos == (9 if own is None else 11)


def test_notes_tell_what_a_user_must_know(tmp_path: Path) -> None:
    def notes(family: str, **changes: Any) -> tuple[str, ...]:
        model = small_model(family, **changes)
        model.save_pretrained(tmp_path / family)
        return checkpoint_from_hugging_face(tmp_path / family).notes

    assert notes("bart") == ()
    assert notes("marian") == ("Marian's sinusoidal positions are stored as a table of 24 positions",)
    assert "the target language's token must be given as forced_bos" in notes("m2m_100")[1]
    assert "decoding starts on the bos token; an mBART" in notes("mbart", decoder_start_token_id=None)[0]


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json; expected a Hugging Face model folder"):
        checkpoint_from_hugging_face(tmp_path)
    for content, message in (("{", "not JSON"), ("[]", "expected an object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            checkpoint_from_hugging_face(tmp_path)
