"""A config is right or its error lists everything that is wrong with it, in one line."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import ConfigError
from seq2engine.model.config import CHOICES, ModelConfig, config_from_dict
from seq2engine.model.presets import PRESETS

FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


def problems(**values: object) -> list[str]:
    """What a config with these values complains about."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**values)
    message = str(caught.value)
    assert message.startswith("config: ")
    assert "\n" not in message
    return message.removeprefix("config: ").split("; ")


def test_the_defaults_are_the_base_model_of_the_paper() -> None:
    base = PRESETS["base"]
    assert base == ModelConfig()
    assert (base.encoder_layers, base.decoder_layers) == (6, 6)
    assert (base.d_model, base.heads, base.d_ff, base.head_dim) == (512, 8, 2048, 64)
    assert (base.norm, base.positions, base.activation) == ("post", "sinusoidal", "relu")
    assert base.share_embeddings
    assert base.tie_output
    assert base.scale_embeddings


def test_big_is_the_big_model_of_the_paper() -> None:
    big = PRESETS["big"]
    assert (big.encoder_layers, big.decoder_layers) == (6, 6)
    assert (big.d_model, big.heads, big.d_ff, big.head_dim) == (1024, 16, 4096, 64)


def test_tiny_is_tiny() -> None:
    tiny = PRESETS["tiny"]
    assert set(PRESETS) == {
        "tiny",
        "base",
        "big",
        "t5-small",
        "flan-t5-base",
        "whisper-tiny.en",
        "trocr-base",
        "trocr-small",
    }
    assert (tiny.encoder_layers, tiny.decoder_layers, tiny.d_model) == (2, 2, 64)
    assert tiny.source_vocab == tiny.target_vocab == 256


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().heads = 4


def test_all_mistakes_are_listed_at_once() -> None:
    assert problems(encoder_layers=0, d_model=510, norm="middle", norm_epsilon=0.0, end_id=40000) == [
        "encoder_layers is 0, expected at least 1",
        "norm is 'middle', expected one of post, pre",
        "d_model 510 is not divisible by heads 8",
        "norm_epsilon is 0.0, expected between 0 and 1",
        "end_id 40000 is outside the target vocabulary of 32000",
    ]


@pytest.mark.parametrize(
    "name", ["encoder_layers", "decoder_layers", "heads", "d_model", "d_ff", "max_source", "max_target"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_and_sizes_are_at_least_one(name: str, value: int) -> None:
    assert f"{name} is {value}, expected at least 1" in problems(**{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_names_the_known_ones(name: str) -> None:
    assert problems(**{name: "other"}) == [f"{name} is 'other', expected one of {', '.join(CHOICES[name])}"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("heads", 8.0, "heads is 8.0, expected int"),
        ("heads", "8", "heads is '8', expected int"),
        ("pad_id", None, "pad_id is None, expected int"),
        ("d_model", True, "d_model is True, expected int"),  # a bool is an int to Python, never to a config
        ("tie_output", 1, "tie_output is 1, expected bool"),
        ("norm", ["post"], "norm is ['post'], expected str"),
        ("norm_epsilon", "1e-5", "norm_epsilon is '1e-5', expected float"),
    ],
)
def test_a_wrong_type_is_named(name: str, value: object, message: str) -> None:
    assert problems(**{name: value}) == [message]


def test_all_wrong_types_are_listed_at_once() -> None:
    assert problems(heads="8", norm=1, tie_output="no") == [
        "heads is '8', expected int",
        "norm is 1, expected str",
        "tie_output is 'no', expected bool",
    ]


@pytest.mark.parametrize("epsilon", [0, 0.0, 1, 1.0, -1e-5, math.nan, math.inf])
def test_norm_epsilon_lies_between_zero_and_one(epsilon: float) -> None:
    assert problems(norm_epsilon=epsilon) == [f"norm_epsilon is {epsilon}, expected between 0 and 1"]


@pytest.mark.parametrize("dropout", [-0.1, 1, 1.0, math.nan])
def test_dropout_leaves_something(dropout: float) -> None:
    assert problems(dropout=dropout) == [f"dropout is {dropout}, expected 0 to below 1"]
    assert ModelConfig(dropout=0).dropout == ModelConfig().dropout == 0


def test_widths_fit_the_positions() -> None:
    odd = {"heads": 3, "d_model": 9}
    assert problems(**odd) == ["sinusoidal positions need an even d_model, got 9"]
    assert problems(**odd, positions="rotary") == ["rotary positions need an even head size, got 3"]
    assert ModelConfig(**odd, positions="learned").head_dim == 3


def test_one_table_needs_one_vocabulary() -> None:
    assert problems(source_vocab=100) == ["share_embeddings needs equal vocabularies, got source 100, target 32000"]
    assert ModelConfig(source_vocab=100, share_embeddings=False).source_vocab == 100


@pytest.mark.parametrize("name", ["pad_id", "start_id", "end_id"])
@pytest.mark.parametrize("token", [-1, 50])
def test_special_ids_lie_in_the_target_vocabulary(name: str, token: int) -> None:
    found = problems(**{name: token}, source_vocab=50, target_vocab=50)
    assert found[0] == f"{name} {token} is outside the target vocabulary of 50"
    assert ModelConfig(**{name: 49}, source_vocab=50, target_vocab=50)


def test_the_pad_id_lies_in_the_source_vocabulary_too() -> None:
    assert problems(source_vocab=20, target_vocab=50, share_embeddings=False, pad_id=20) == [
        "pad_id 20 is outside the source vocabulary of 20"
    ]
    assert ModelConfig(source_vocab=20, target_vocab=50, share_embeddings=False, end_id=20)


def test_padding_is_not_the_end() -> None:
    assert problems(pad_id=2) == ["pad_id and end_id are both 2", "a padded row would look like a finished one"]
    assert ModelConfig(pad_id=1).start_id == 1  # many models start from the padding token


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name: str) -> None:
    values = json.loads(PRESETS[name].to_json())
    assert list(values) == FIELDS
    assert config_from_dict(values) == PRESETS[name]


def test_unknown_and_missing_fields_are_listed_together() -> None:
    values = json.loads(ModelConfig().to_json())
    del values["heads"], values["d_ff"]
    values |= {"n_heads": 8, "layerdrop": 0.1}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, where="some/config.json")
    unknown, missing = (
        "unknown field 'layerdrop'; unknown field 'n_heads'",
        "missing field 'd_ff'; missing field 'heads'",
    )
    assert str(caught.value) == f"some/config.json: {unknown}; {missing}"


def test_wrong_values_name_the_file_they_stand_in() -> None:
    values = json.loads(ModelConfig().to_json()) | {"heads": 7, "norm": "none"}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, where="some/config.json")
    assert str(caught.value) == (
        "some/config.json: norm is 'none', expected one of post, pre; d_model 512 is not divisible by heads 7"
    )


words = st.sampled_from(["", "post", "pre", "learned", "rotary", "gelu", "8"])
json_values = st.none() | st.booleans() | st.integers() | st.integers(0, 64) | st.floats() | words | st.just([])


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_gives_a_config_or_a_config_error(changes: dict[str, object]) -> None:
    values = json.loads(PRESETS["tiny"].to_json()) | changes
    try:
        config = config_from_dict(values)
    except ConfigError:
        return
    assert config.head_dim * config.heads == config.attention_width == (config.d_kv * config.heads or config.d_model)
    assert 0 <= max(config.pad_id, config.start_id, config.end_id) < config.target_vocab


def test_a_model_of_audio_has_no_source_tokens():
    audio = {
        "source_vocab": 0,
        "share_embeddings": False,
        "positions": "learned",
        "front_end": "mel",
        "pad_id": 2,  # audio is never padded, so this may be the end token
    }
    config = ModelConfig(**audio)
    assert config.takes_audio
    assert config.frames == 2 * config.max_source
    assert "80 mel bands, vocabulary 32000" in config.shape
    wrong = {"mels": 0, "source_vocab": 7, "positions": "sinusoidal"}
    with pytest.raises(ConfigError, match=r"mels is 0.*expected source_vocab 0.*positions are 'sinusoidal'"):
        ModelConfig(**{**audio, **wrong})


def test_configs_of_earlier_versions_are_read():
    values = dataclasses.asdict(ModelConfig())
    for name in ("front_end", "mels"):
        del values[name]
    assert config_from_dict(values) == ModelConfig()


IMAGES = {name: getattr(PRESETS["trocr-small"], name) for name in FIELDS}


def test_an_encoder_may_have_sizes_of_its_own() -> None:
    small = PRESETS["trocr-small"]
    encoder = small.encoder_config
    assert (encoder.d_model, encoder.heads, encoder.d_ff, encoder.head_dim) == (384, 6, 1536, 64)
    assert (encoder.norm, encoder.activation, encoder.norm_epsilon) == ("pre", "gelu", 1e-12)
    assert encoder.encoder_config == encoder
    assert (small.state_width, dataclasses.replace(small, project_states=True).state_width) == (384, 256)
    assert (small.heads_of("encoder.0.self_attn.qkv"), small.heads_of("decoder.0.self_attn.qkv")) == (6, 8)
    base = ModelConfig()
    assert (base.encoder_config, base.state_width) == (base, 512)
    assert "d_model 384+256, 6+8 heads, images 384x384" in small.shape


def test_sizes_of_an_encoder_are_checked() -> None:
    learned = {"positions": "learned", "share_embeddings": False}
    assert problems(encoder_width=30, encoder_heads=4, **learned) == [
        "the encoder's width 30 is not divisible by its heads 4"
    ]
    assert problems(encoder_width=256) == ["share_embeddings needs one width, got 256 in the encoder and 512"]
    assert problems(encoder_width=255, share_embeddings=False) == [
        "sinusoidal positions need an even d_model, got 255",
        "the encoder's width 255 is not divisible by its heads 8",
    ]
    assert problems(positions="rotary", encoder_heads=4) == [
        "rotary positions need one head size, got 128 in the encoder and 64"
    ]
    assert problems(encoder_norm="middle") == ["encoder_norm is 'middle', expected one of post, pre"]
    assert problems(encoder_d_ff=-1) == ["encoder_d_ff is -1, expected at least 0"]
    assert problems(encoder_norm_epsilon=1.0) == ["encoder_norm_epsilon is 1.0, expected 0 to below 1"]


def test_an_image_has_as_many_positions_as_patches_and_class_tokens() -> None:
    small = PRESETS["trocr-small"]
    assert (small.takes_images, small.takes_features, small.takes_audio) == (True, True, False)
    assert (small.source_kind, small.features_shape) == ("images", (3, 384, 384))
    assert problems(**{**IMAGES, "max_source": 577}) == ["max_source is 577, expected 2 class tokens and 576 patches"]
    assert problems(**{**IMAGES, "patch_height": 400, "max_source": 2}) == [
        "max_source is 2, expected 2 class tokens and 0 patches"
    ]
    assert problems(**{**IMAGES, "patch_width": 0}) == ["patch_width is 0, expected at least 1"]
    assert problems(**{**IMAGES, "source_vocab": 7, "positions": "sinusoidal"}) == [
        "an encoder of images has no tokens: expected source_vocab 0 and share_embeddings false",
        "positions are 'sinusoidal', expected 'learned' with front_end 'image'",
    ]
    assert problems(**{**IMAGES, "image_height": 2**15})[0] == f"image_height is {2**15}, expected at most {2**14}"
