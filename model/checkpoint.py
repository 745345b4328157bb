"""Checkpoints: a folder of config.json and model.safetensors. Nothing in it is ever unpickled.

Companions may be in the folder and go wherever the model goes: `generation.json`, the model's own decoding defaults
(fields of `SearchOptions`), `speech.json` of a model that takes audio, `image.json` of one that takes images, and
`tokenizer/`. `origin.json` records where an imported model comes from: its name on the hub, the commit, the licence.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from seq2engine.common.atomic_folders import new_folder
from seq2engine.common.json_files import read_json, read_object, shortened, typed_from_json
from seq2engine.errors import CheckpointError, ConfigError

from .config import ModelConfig, config_from_dict
from .images import IMAGES
from .presets import PRESETS
from .speech import SPEECH
from .tokenizers.base import FOLDER as TOKENIZER
from .transformer import DecoderLayer, EncoderLayer, ImagePatches, Transformer

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
GENERATION = "generation.json"
ORIGIN = "origin.json"
COMPANIONS = (GENERATION, SPEECH, IMAGES)  # and the tokenizer's folder
SMALL, SMALL_LAYERS = 2**20, 16  # elements and layers that are cheap to allocate even for a damaged file
GAIN = 1.5  # gain of random weights, 1.0 keeps the variance; with 3.0 a deep model amplifies rounding 300-fold


def tied_names(config: ModelConfig) -> set[str]:
    """Weights that are another name for the target embedding table; they are stored once, under the table's name."""
    names = set()
    if config.share_embeddings:
        names.add("source_embedding.tokens.weight")
    if config.tie_output:
        names.add("output.weight")
    return names


def save_checkpoint(model: Transformer, folder: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes config and weights as a new folder and returns its path."""
    target = Path(folder)
    with new_folder(target, force, marker=CONFIG) as beside:
        write_checkpoint(model, beside)
    return target


def write_checkpoint(model: Transformer, folder: Path) -> None:
    """Writes config.json and model.safetensors into an existing folder."""
    tied = tied_names(model.config)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    (folder / CONFIG).write_text(model.config.to_json())
    write_weights(weights, folder / WEIGHTS, {"format": "seq2engine"})


def write_weights(weights: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file. The library reports system errors as text only; here they are OSErrors."""
    try:
        save_file(weights, path, metadata=metadata)
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise


def copy_companions(source: Path, target: Path) -> list[Path]:
    """Copies the companions of a checkpoint, where they are, to another folder; returns the new files."""
    files = [source / name for name in COMPANIONS if os.path.lexists(source / name)]
    if (source / TOKENIZER).is_dir():
        (target / TOKENIZER).mkdir()
        files += sorted((source / TOKENIZER).iterdir())
    for path in files:
        if not path.is_file():  # a device has no end, and a pipe cannot be copied
            raise CheckpointError(f"{path} is not a regular file; copy the checkpoint again")
        shutil.copyfile(path, target / path.relative_to(source))
    copied = [*(target / name for name in COMPANIONS), *sorted((target / TOKENIZER).rglob("*"))]
    return [path for path in copied if path.is_file()]


def write_origin(origin: Mapping[str, str], folder: Path) -> None:
    if origin:
        (folder / ORIGIN).write_text(json.dumps(dict(origin), indent=2) + "\n", encoding="utf-8")


def read_origin(folder: Path | None) -> dict[str, str]:
    """Where the model of a checkpoint folder comes from; empty where it is not recorded."""
    if folder is None or not (folder / ORIGIN).is_file():
        return {}
    try:
        return typed_from_json(dict[str, str], read_json(folder / ORIGIN))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / ORIGIN} cannot be read ({error}); remove it, or import the model again"
        ) from error


def load_checkpoint(folder: str | os.PathLike[str]) -> Transformer:
    """The model of a checkpoint folder, in fp32 and ready to run."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}; expected a folder with {CONFIG} and {WEIGHTS}")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} has no {name}; expected a folder with {CONFIG} and {WEIGHTS}")
    config = read_config(path / CONFIG)
    try:
        weights = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS} cannot be read ({error}); copy the checkpoint again") from error
    return model_from_weights(config, weights, where=str(path / WEIGHTS))


def read_config(path: Path) -> ModelConfig:
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy the checkpoint again") from error
    if "model_type" in values or "architectures" in values:
        kind = shortened(values.get("model_type", "another library"))
        raise CheckpointError(
            f"{path} describes a model of {kind}; make it ours with: seq2engine import {path.parent} CHECKPOINT"
        )
    try:
        return config_from_dict(values, where=str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def model_from_weights(config: ModelConfig, weights: dict[str, Tensor], where: str) -> Transformer:
    """A model that holds exactly these weights; every name or shape that does not fit is listed."""
    stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    refuse(problems_with_sizes(config, stored), where)  # before anything of the config's sizes is allocated
    model = build_model(config)
    tied = tied_names(config)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    problems = [f"missing {name}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"unexpected {shortened(name)}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != (want := tuple(expected[name].shape)):
            problems.append(f"{name} is {list(stored[name])}, expected {list(want)}")
    refuse(problems, where)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])
    return model


def refuse(problems: list[str], where: str) -> None:
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{where} does not fit its config: {shown}")


def problems_with_sizes(config: ModelConfig, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Problems of a config that is much larger than the weights. They bound the size of a model: layers by their count,
    and each width, vocabulary and length by one weight named here."""
    problems = []
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        there = {name.split(".")[1] for name in stored if re.fullmatch(rf"{stack}\.\d+\..*", name, re.DOTALL)}
        if layers > max(len(there), SMALL_LAYERS):
            problems.append(f"it has {len(there)} layers of the {stack}, expected {layers}")
    encoder, width = config.encoder_config, config.d_model
    gate = 2 if config.gated else 1
    sizes: dict[str, tuple[int, ...]] = {
        "target_embedding.tokens.weight": (config.target_vocab, width),
        "encoder.0.self_attn.qkv.weight": (3 * encoder.attention_width, encoder.d_model),
        "encoder.0.feed_forward.up.weight": (encoder.d_ff * gate, encoder.d_model),
        "decoder.0.self_attn.qkv.weight": (3 * config.attention_width, width),
        "decoder.0.feed_forward.up.weight": (config.d_ff * gate, width),
    }
    if config.takes_audio:
        sizes["source_embedding.first.weight"] = (encoder.d_model, config.mels, 3)
    elif config.takes_images:
        patch = (config.channels, config.patch_height, config.patch_width)
        sizes["source_embedding.patches.weight"] = (encoder.d_model, *patch)
        sizes["source_embedding.class_tokens"] = (config.class_tokens, encoder.d_model)
    elif not config.share_embeddings:
        sizes["source_embedding.tokens.weight"] = (config.source_vocab, width)
    if config.positions == "learned":
        sizes["source_embedding.positions"] = (config.max_source, encoder.d_model)
        sizes["target_embedding.positions"] = (config.max_target, width)
    if config.relative:
        layers = config.decoder_layers if config.distances_per_layer else 1
        sizes["decoder_distances.table"] = (config.max_distance + 1, config.heads * layers)
    for name, want in sizes.items():
        if math.prod(want) > max(math.prod(stored.get(name, (0,))), SMALL):
            have = list(stored[name]) if name in stored else "missing"
            problems.append(f"{name} is {have}, expected {list(want)}")
    return problems


def build_model(config: ModelConfig) -> Transformer:
    """A model in evaluation mode whose weights are still to be filled in."""
    return Transformer(config).eval()


def random_model(preset: str | ModelConfig, seed: int = 0) -> Transformer:
    """A model with seeded random weights: the same seed gives the same model on every machine.

    Norms and biases are random too, so that tests notice when one weight is swapped for another. And decodes
    vary and end at various lengths instead of repeating one token forever: branches are strong against the skip
    connection, the source's influence is weak, the end token's row is large, and the feed-forward's output is centred,
    because the mean of its activations would push every state the same way. Where scores are not scaled, queries are
    small instead, because a deep model would amplify rounding.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}, expected one of {', '.join(PRESETS)}")
    config = PRESETS[preset] if isinstance(preset, str) else preset
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            fill_randomly(module, generator)
        learned = [part.positions for part in (model.source_embedding, model.target_embedding)]
        if isinstance(model.source_embedding, ImagePatches):
            learned.append(model.source_embedding.class_tokens)
        for table in learned:
            if isinstance(table, nn.Parameter):
                table.normal_(0.0, 1.0, generator=generator)
        for distances in (model.encoder_distances, model.decoder_distances):
            if distances is not None:
                distances.table.normal_(0.0, 1.0, generator=generator)
        for layer in (*model.encoder, *model.decoder):
            down = cast(EncoderLayer | DecoderLayer, layer).feed_forward.down.weight
            down -= down.mean(dim=1, keepdim=True)
        for layer in model.decoder:
            cast(DecoderLayer, layer).cross_attn.out.weight *= 0.3
        if not config.scale_attention:
            shrink_queries(model)
        model.output.weight[config.end_id] *= 3
    return model


def shrink_queries(model: Transformer) -> None:
    for layers, config in ((model.encoder, model.config.encoder_config), (model.decoder, model.config)):
        for layer in layers:
            attention = cast(EncoderLayer | DecoderLayer, layer).self_attn
            attention.qkv.weight[: config.attention_width] *= config.head_dim**-0.5
    for layer in model.decoder:
        cast(DecoderLayer, layer).cross_attn.q.weight *= model.config.head_dim**-0.5


def fill_randomly(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Linear):
        module.weight.normal_(0.0, GAIN * module.in_features**-0.5, generator=generator)
        if module.bias is not None:
            module.bias.normal_(0.0, 0.02, generator=generator)
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        module.weight.normal_(0.0, GAIN * module.weight[0].numel() ** -0.5, generator=generator)
        assert module.bias is not None
        module.bias.normal_(0.0, 0.02, generator=generator)
    elif isinstance(module, nn.Embedding):
        module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=generator)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.weight.normal_(1.0, 0.1, generator=generator)
        if isinstance(module, nn.LayerNorm):
            module.bias.normal_(0.0, 0.02, generator=generator)
