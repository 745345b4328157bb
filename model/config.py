"""The config of a model, as one frozen value: sizes, variants, limits and special tokens."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from seq2engine.common.json_files import shortened
from seq2engine.errors import CheckpointError, ConfigError

CHOICES = {
    "norm": ("post", "pre"),
    "norm_kind": ("layer", "rms"),
    "positions": ("sinusoidal", "learned", "rotary", "relative"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "front_end": ("tokens", "mel", "image"),
}
ENCODER_CHOICES = {"encoder_norm": "norm", "encoder_activation": "activation"}  # empty: as the decoder's
# Fields added after the first release: older files lack them and mean the defaults.
LATER = (
    "d_kv",
    "norm_kind",
    "max_distance",
    "distances_per_layer",
    "gated",
    "biases",
    "scale_attention",
    "scale_output",
    "front_end",
    "mels",
    "encoder_width",
    "encoder_heads",
    "encoder_d_ff",
    "encoder_norm",
    "encoder_activation",
    "encoder_norm_epsilon",
    "project_states",
    "channels",
    "image_height",
    "image_width",
    "patch_height",
    "patch_width",
    "class_tokens",
)
# The largest sensible values. A file with larger ones is damaged or hostile: nothing is allocated for it.
LARGEST = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "heads", "encoder_heads", "class_tokens"), 1024),
    **dict.fromkeys(("d_model", "d_kv", "encoder_width"), 2**17),
    **dict.fromkeys(("d_ff", "encoder_d_ff", "max_source", "max_target", "max_distance"), 2**20),
    **dict.fromkeys(("image_height", "image_width", "patch_height", "patch_width"), 2**14),
    **dict.fromkeys(("source_vocab", "target_vocab"), 2**24),
    **dict.fromkeys(("mels", "channels"), 2**12),
}
IMAGE = ("channels", "image_height", "image_width", "patch_height", "patch_width", "class_tokens")
LARGEST_TABLE = 2**24  # numbers of a computed table of positions, which no file size bounds
FRAMES = 2  # frames of audio features that become one position of the encoder


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
    d_kv: int = 0  # width of a head; 0: d_model / heads
    norm: str = "post"
    norm_kind: str = "layer"  # rms: no centring and no bias, as in T5
    positions: str = "sinusoidal"
    max_distance: int = 128  # relative positions: larger distances count as this one
    distances_per_layer: bool = False  # relative positions: every layer has a table of its own, as in UMT5
    activation: str = "relu"
    gated: bool = False  # the feed-forward is down(activation(gate(x)) * up(x)), as in T5 v1.1
    biases: bool = True  # of all products but the output projection
    scale_attention: bool = True  # scores by 1 / sqrt(head width), as in the paper
    share_embeddings: bool = True  # source and target ids read one table
    tie_output: bool = True  # the output projection is the target table
    scale_embeddings: bool = True  # by sqrt(d_model), as in the paper
    scale_output: bool = False  # what the output projection reads by 1 / sqrt(d_model), as in T5 v1.0
    output_bias: bool = False
    embedding_norm: bool = False  # a norm after the embeddings, as in BART
    final_norm: bool = False  # a norm after the last layer; a pre-norm model always has it
    norm_epsilon: float = 1e-5
    encoder_width: int = 0  # of the encoder's states, and likewise the next five; 0 or empty: as the decoder's
    encoder_heads: int = 0
    encoder_d_ff: int = 0
    encoder_norm: str = ""
    encoder_activation: str = ""
    encoder_norm_epsilon: float = 0.0
    project_states: bool = (
        False  # a product makes states of d_model of the encoder's, before cross-attention reads them
    )
    front_end: str = "tokens"  # what the encoder reads: token ids, log-mel features of audio ("mel"), pixels ("image")
    mels: int = 80  # mel bands of audio features; without meaning for others
    channels: int = 3  # of an image, and likewise the next five; without meaning for others
    image_height: int = 384
    image_width: int = 384
    patch_height: int = 16
    patch_width: int = 16
    class_tokens: int = 1  # learned vectors before those of the patches: 1 in ViT, 2 in DeiT
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
        return self.d_kv or self.d_model // self.heads

    @property
    def attention_width(self) -> int:
        """All heads side by side: d_model, unless heads have a width of their own."""
        return self.heads * self.head_dim

    @property
    def relative(self) -> bool:
        """Whether self-attention knows positions as distances, so that a decoder step needs those of its slots."""
        return self.positions == "relative"

    @property
    def encoder_config(self) -> ModelConfig:
        """What the encoder's layers are made by: this config, with sizes and variants of the encoder's own in it."""
        own: dict[str, Any] = {
            "d_model": self.encoder_width,
            "heads": self.encoder_heads,
            "d_ff": self.encoder_d_ff,
            "norm": self.encoder_norm,
            "activation": self.encoder_activation,
            "norm_epsilon": self.encoder_norm_epsilon,
        }
        changed = {name: value for name, value in own.items() if value and value != getattr(self, name)}
        return dataclasses.replace(self, **changed) if changed else self

    def heads_of(self, module: str) -> int:
        """The heads of an attention, by its name in the model."""
        return self.encoder_config.heads if module.startswith("encoder.") else self.heads

    @property
    def state_width(self) -> int:
        """Width of the states that cross-attention reads."""
        return self.d_model if self.project_states else self.encoder_width or self.d_model

    @property
    def takes_audio(self) -> bool:
        """Whether a source is log-mel features [mels, frames]."""
        return self.front_end == "mel"

    @property
    def takes_images(self) -> bool:
        """Whether a source is the pixels of an image [channels, height, width]."""
        return self.front_end == "image"

    @property
    def takes_features(self) -> bool:
        """Whether a source is an array of one shape, of audio or of an image; else it is token ids."""
        return self.takes_audio or self.takes_images

    @property
    def source_kind(self) -> str:
        """What a user gives such a model."""
        return {"tokens": "text", "mel": "audio", "image": "images"}[self.front_end]

    @property
    def features_shape(self) -> tuple[int, ...]:
        """The shape of the features of one source."""
        if self.takes_images:
            return self.channels, self.image_height, self.image_width
        return self.mels, self.frames

    @property
    def frames(self) -> int:
        """Frames of the features of one source: `max_source` positions, neither more nor fewer."""
        return FRAMES * self.max_source

    @property
    def shape(self) -> str:
        """The config in a few words, for people who know the model."""
        encoder = self.encoder_config
        width, heads = self.d_model, self.heads
        sizes = f"d_model {width}, {heads} heads"
        if (encoder.d_model, encoder.heads) != (width, heads):
            sizes = f"d_model {encoder.d_model}+{width}, {encoder.heads}+{heads} heads"
        vocabulary = f"{self.target_vocab}" if self.takes_features else f"{self.source_vocab}/{self.target_vocab}"
        source = {
            "tokens": "",
            "mel": f"{self.mels} mel bands, ",
            "image": f"images {self.image_height}x{self.image_width}, ",
        }
        return (
            f"{self.encoder_layers}+{self.decoder_layers} layers, {sizes}, {source[self.front_end]}"
            f"vocabulary {vocabulary}"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def _problems(config: ModelConfig) -> list[str]:
    """Everything that is wrong with a config, so that a user fixes it in one go."""
    if found := _type_problems(config):
        return found  # the checks below would report the same values again
    found = [*_size_problems(config), *_position_problems(config), *_encoder_problems(config)]
    if config.share_embeddings and config.source_vocab != config.target_vocab:
        found.append(
            f"share_embeddings needs equal vocabularies, got source {config.source_vocab}, target {config.target_vocab}"
        )
    if not 0 <= config.dropout < 1:
        found.append(f"dropout is {config.dropout}, expected 0 to below 1")
    if not 0 < config.norm_epsilon < 1:
        found.append(f"norm_epsilon is {config.norm_epsilon}, expected between 0 and 1")
    if not 0 <= config.encoder_norm_epsilon < 1:
        found.append(f"encoder_norm_epsilon is {config.encoder_norm_epsilon}, expected 0 to below 1")
    for name in ("pad_id", "start_id", "end_id"):
        token = getattr(config, name)
        if not 0 <= token < config.target_vocab:
            found.append(f"{name} {token} is outside the target vocabulary of {config.target_vocab}")
    return found + (_features_problems(config) if config.takes_features else _padding_problems(config))


def _type_problems(config: ModelConfig) -> list[str]:
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        wanted = type(field.default)
        if wanted is float and type(value) is int:
            continue
        if type(value) is not wanted:
            found.append(f"{field.name} is {shortened(value)}, expected {wanted.__name__}")
    return found


def _size_problems(config: ModelConfig) -> list[str]:
    """Sizes that are too small or too large, and names that are none of their choices."""
    found = []
    for name in ("encoder_layers", "decoder_layers", "heads", "d_model", "d_ff", "max_source", "max_target"):
        if getattr(config, name) < 1:
            found.append(f"{name} is {getattr(config, name)}, expected at least 1")
    for name, most in LARGEST.items():
        if getattr(config, name) > most:
            found.append(f"{name} is {getattr(config, name)}, expected at most {most}")
    table = max(config.max_source, config.max_target) * max(config.d_model, config.head_dim if config.heads >= 1 else 0)
    if config.positions in ("sinusoidal", "rotary"):
        found += problems_with_table(table)
    optional = {name: ("", *CHOICES[both]) for name, both in ENCODER_CHOICES.items()}
    for name, choices in (CHOICES | optional).items():
        if getattr(config, name) not in choices:
            found.append(
                f"{name} is {shortened(getattr(config, name))}, expected one of {', '.join(filter(None, choices))}"
            )
    for name, least in (("d_kv", 0), ("max_distance", 1), *((f"encoder_{n}", 0) for n in ("width", "heads", "d_ff"))):
        if getattr(config, name) < least:
            found.append(f"{name} is {getattr(config, name)}, expected at least {least}")
    return found


def _position_problems(config: ModelConfig) -> list[str]:
    """Widths that heads or positions do not fit."""
    found = []
    if config.heads >= 1 and not config.d_kv and config.d_model % config.heads:
        found.append(f"d_model {config.d_model} is not divisible by heads {config.heads}")
    elif config.positions == "rotary" and config.heads >= 1 and config.head_dim % 2:
        found.append(f"rotary positions need an even head size, got {config.head_dim}")
    if config.positions == "sinusoidal" and (config.d_model % 2 or config.encoder_width % 2):
        width = config.d_model if config.d_model % 2 else config.encoder_width
        found.append(f"sinusoidal positions need an even d_model, got {width}")
    return found


def _encoder_problems(config: ModelConfig) -> list[str]:
    """Problems of sizes that the encoder has of its own."""
    width, heads = config.encoder_width or config.d_model, config.encoder_heads or config.heads
    if (width, heads) == (config.d_model, config.heads) or heads < 1 or config.heads < 1:
        return []
    found = []
    if not config.d_kv and width % heads:
        found.append(f"the encoder's width {width} is not divisible by its heads {heads}")
    elif config.positions == "rotary" and (own := config.d_kv or width // heads) != config.head_dim:
        found.append(f"rotary positions need one head size, got {own} in the encoder and {config.head_dim}")
    if config.share_embeddings and width != config.d_model:
        found.append(f"share_embeddings needs one width, got {width} in the encoder and {config.d_model}")
    return found


def _padding_problems(config: ModelConfig) -> list[str]:
    found = []
    if not 0 <= config.pad_id < config.source_vocab:
        found.append(f"pad_id {config.pad_id} is outside the source vocabulary of {config.source_vocab}")
    if config.pad_id == config.end_id:
        found.append(f"pad_id and end_id are both {config.pad_id}; a padded row would look like a finished one")
    return found


def problems_with_table(numbers: int) -> list[str]:
    if numbers <= LARGEST_TABLE:
        return []
    return [f"a computed table of positions has {numbers} numbers, expected at most {LARGEST_TABLE}"]


def check_computed_positions(config: ModelConfig, where: str) -> None:
    """For importers that compute a table which the model then has as weights."""
    if problems := problems_with_table(max(config.max_source, config.max_target) * config.d_model):
        raise ConfigError(f"{where}: {problems[0]}")


def _features_problems(config: ModelConfig) -> list[str]:
    """An encoder of audio or of images has no tokens; its features are never padded."""
    found = []
    names = IMAGE if config.takes_images else ("mels",)
    for name in names:
        least = 0 if name == "class_tokens" else 1
        if getattr(config, name) < least:
            found.append(f"{name} is {getattr(config, name)}, expected at least {least}")
    kind = config.source_kind
    if config.source_vocab or config.share_embeddings:
        found.append(f"an encoder of {kind} has no tokens: expected source_vocab 0 and share_embeddings false")
    if config.positions != "learned":
        found.append(f"positions are {config.positions!r}, expected 'learned' with front_end {config.front_end!r}")
    if config.takes_images and not found:
        patches = (config.image_height // config.patch_height) * (config.image_width // config.patch_width)
        if config.max_source != config.class_tokens + patches or not patches:
            found.append(
                f"max_source is {config.max_source}, expected {config.class_tokens} class tokens and {patches} patches"
            )
    return found


def config_from_dict(values: dict[str, Any], where: str = "config") -> ModelConfig:
    """A config from parsed JSON; unknown and missing names are errors, listed together, but for fields of LATER."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    problems = [f"unknown field {shortened(name)}" for name in sorted(values.keys() - known)]
    problems += [f"missing field {name!r}" for name in sorted(known - values.keys() - set(LATER))]
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: " + str(error).removeprefix("config: ")) from error


def config_problem(where: object, error: ConfigError) -> CheckpointError:
    """Problems of a config as those of the checkpoint that it was read from."""
    return CheckpointError(f"{where}: " + str(error).removeprefix("config: "))
