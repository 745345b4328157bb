"""What a model is, as one frozen value: sizes, variants, limits and special tokens."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from seq2engine.errors import ConfigError

CHOICES = {
    "norm": ("post", "pre"),
    "positions": ("sinusoidal", "learned", "rotary"),
    "activation": ("relu", "gelu", "silu"),
}


@dataclass(frozen=True)
class ModelConfig:
    """An encoder-decoder Transformer. Lengths (`max_source`, `max_target`) are limits of the model, not widths.

    `max_target` counts generated tokens, the end token included; the start token is not one of them.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    heads: int = 8
    d_model: int = 512
    d_ff: int = 2048
    source_vocab: int = 32000
    target_vocab: int = 32000
    norm: str = "post"
    positions: str = "sinusoidal"
    activation: str = "relu"
    share_embeddings: bool = True  # source and target ids read one table
    tie_output: bool = True  # the output projection is the target table
    scale_embeddings: bool = True  # by sqrt(d_model), as in the paper
    output_bias: bool = False
    embedding_norm: bool = False  # a norm after the embeddings, as in BART
    final_norm: bool = False  # a norm after the last layer; a pre-norm model always has it
    norm_epsilon: float = 1e-5
    dropout: float = 0.0  # in training only, on embeddings and on every residual branch
    max_source: int = 512
    max_target: int = 512
    pad_id: int = 0
    start_id: int = 1
    end_id: int = 2

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ConfigError("config: " + "; ".join(problems))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def shape(self) -> str:
        """The config in a few words, for people who know the model."""
        return (
            f"{self.encoder_layers}+{self.decoder_layers} layers, d_model {self.d_model}, {self.heads} heads, "
            f"vocabulary {self.source_vocab}/{self.target_vocab}"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def _problems(config: ModelConfig) -> list[str]:
    """Everything that is wrong with a config, so that a user fixes it in one go."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        wanted = type(field.default)
        if wanted is float and type(value) is int:
            continue
        if type(value) is not wanted:
            found.append(f"{field.name} is {value!r}, expected {wanted.__name__}")
    if found:
        return found  # the rules below would only trip over the same values again

    for name in ("encoder_layers", "decoder_layers", "heads", "d_model", "d_ff", "max_source", "max_target"):
        if getattr(config, name) < 1:
            found.append(f"{name} is {getattr(config, name)}, expected at least 1")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            found.append(f"{name} is {getattr(config, name)!r}, expected one of {', '.join(choices)}")
    if config.heads >= 1 and config.d_model % config.heads:
        found.append(f"d_model {config.d_model} is not divisible by heads {config.heads}")
    elif config.positions == "rotary" and config.heads >= 1 and config.head_dim % 2:
        found.append(f"rotary positions need an even head size, got {config.head_dim}")
    if config.positions == "sinusoidal" and config.d_model % 2:
        found.append(f"sinusoidal positions need an even d_model, got {config.d_model}")
    if config.share_embeddings and config.source_vocab != config.target_vocab:
        found.append(
            f"share_embeddings needs equal vocabularies, got source {config.source_vocab}, target {config.target_vocab}"
        )
    if not 0 <= config.dropout < 1:
        found.append(f"dropout is {config.dropout}, expected 0 to below 1")
    if not 0 < config.norm_epsilon < 1:
        found.append(f"norm_epsilon is {config.norm_epsilon}, expected between 0 and 1")
    for name in ("pad_id", "start_id", "end_id"):
        token = getattr(config, name)
        if not 0 <= token < config.target_vocab:
            found.append(f"{name} {token} is outside the target vocabulary of {config.target_vocab}")
    if not 0 <= config.pad_id < config.source_vocab:
        found.append(f"pad_id {config.pad_id} is outside the source vocabulary of {config.source_vocab}")
    if config.pad_id == config.end_id:
        found.append(f"pad_id and end_id are both {config.pad_id}; a padded row would look like a finished one")
    return found


def config_from_dict(values: dict[str, Any], where: str = "config") -> ModelConfig:
    """A config from parsed JSON; unknown and missing names are errors, listed together."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    problems = [f"unknown field {name!r}" for name in sorted(values.keys() - known)]
    problems += [f"missing field {name!r}" for name in sorted(known - values.keys())]
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: " + str(error).removeprefix("config: ")) from error


PRESETS = {
    "tiny": ModelConfig(
        encoder_layers=2,
        decoder_layers=2,
        heads=4,
        d_model=64,
        d_ff=128,
        source_vocab=256,
        target_vocab=256,
        tie_output=False,  # so that seeded random weights wander through the vocabulary
        max_source=64,
        max_target=64,
    ),
    "base": ModelConfig(),
    "big": ModelConfig(heads=16, d_model=1024, d_ff=4096),
}
