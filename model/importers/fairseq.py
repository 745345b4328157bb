"""Imports Transformers trained by fairseq: a checkpoint_*.pt with dict.SRC.txt and dict.TGT.txt in its folder.

fairseq numbers positions from padding_idx + 1 and has tensor2tensor's table, sines in one half and cosines in the
other. It becomes a table of ours like a learned one, made with fairseq's own fp32 arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, check_computed_positions
from ..tokenizers.importing import tokenizer_from_fairseq
from .conversion.renames import layer_renames, renamed_weights
from .conversion.weight_fixes import check_same, shape_of, split_projections, with_parts
from .fairseq_settings import END, PAD, SIDES, config_from_settings, refuse, settings_from_content
from .files.pickles import entry, pickle_in, read_pickle, tensors
from .imported import Imported, tokenizer_or_note

FILES = ("checkpoint_best.pt", "checkpoint_last.pt")  # preferred in a folder with several
SPECIALS = 4  # <s> <pad> </s> <unk>, then the lines of the dictionary
IGNORED = (  # version numbers, and placeholders of computed tables
    "encoder.version",
    "decoder.version",
    "encoder.embed_positions._float_tensor",
    "decoder.embed_positions._float_tensor",
    "encoder.embed_positions.weights",
    "decoder.embed_positions.weights",
)
ENCODER_LAYER = {
    "encoder.{i}.self_attn.qkv": (
        "encoder.layers.{i}.self_attn.q_proj",
        "encoder.layers.{i}.self_attn.k_proj",
        "encoder.layers.{i}.self_attn.v_proj",
    ),
    "encoder.{i}.self_attn.out": ("encoder.layers.{i}.self_attn.out_proj",),
    "encoder.{i}.self_residual.norm": ("encoder.layers.{i}.self_attn_layer_norm",),
    "encoder.{i}.feed_forward.up": ("encoder.layers.{i}.fc1",),
    "encoder.{i}.feed_forward.down": ("encoder.layers.{i}.fc2",),
    "encoder.{i}.feed_residual.norm": ("encoder.layers.{i}.final_layer_norm",),
}
DECODER_LAYER = {
    "decoder.{i}.self_attn.qkv": (
        "decoder.layers.{i}.self_attn.q_proj",
        "decoder.layers.{i}.self_attn.k_proj",
        "decoder.layers.{i}.self_attn.v_proj",
    ),
    "decoder.{i}.self_attn.out": ("decoder.layers.{i}.self_attn.out_proj",),
    "decoder.{i}.self_residual.norm": ("decoder.layers.{i}.self_attn_layer_norm",),
    "decoder.{i}.cross_attn.q": ("decoder.layers.{i}.encoder_attn.q_proj",),
    "decoder.{i}.cross_attn.kv": (
        "decoder.layers.{i}.encoder_attn.k_proj",
        "decoder.layers.{i}.encoder_attn.v_proj",
    ),
    "decoder.{i}.cross_attn.out": ("decoder.layers.{i}.encoder_attn.out_proj",),
    "decoder.{i}.cross_residual.norm": ("decoder.layers.{i}.encoder_attn_layer_norm",),
    "decoder.{i}.feed_forward.up": ("decoder.layers.{i}.fc1",),
    "decoder.{i}.feed_forward.down": ("decoder.layers.{i}.fc2",),
    "decoder.{i}.feed_residual.norm": ("decoder.layers.{i}.final_layer_norm",),
}
FINAL_NORMS = {"encoder_norm": ("encoder.layer_norm",), "decoder_norm": ("decoder.layer_norm",)}
EMBEDDING_NORMS = {
    "source_embedding.norm": ("encoder.layernorm_embedding",),
    "target_embedding.norm": ("decoder.layernorm_embedding",),
}
SOURCE_TABLE, TARGET_TABLE = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT = "decoder.output_projection.weight"
OLD_NORMS = {  # of fairseq before 0.6
    "encoder": {"0": "self_attn_layer_norm", "1": "final_layer_norm"},
    "decoder": {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"},
}


def checkpoint_from_fairseq(source: Path) -> Imported:
    """The model of a folder with one checkpoint and its dictionaries, or of a .pt file with them in its folder."""
    path = pickle_in(source, FILES)
    content = read_pickle(path)
    weights = new_names(tensors(entry(content, "model", path, "fairseq"), path))
    settings = settings_from_content(content, path)
    refuse(settings, path)
    dictionaries = [dictionary_file(settings, side, path) for side in ("source_lang", "target_lang")]
    vocabularies = [SPECIALS + len(file.read_bytes().splitlines()) for file in dictionaries]
    for file, size, table in zip(dictionaries, vocabularies, (SOURCE_TABLE, TARGET_TABLE), strict=True):
        rows, _ = shape_of(weights, table, str(path))
        if rows != size:
            raise CheckpointError(
                f"{file} makes a vocabulary of {size} ({SPECIALS} specials and its lines), but {table} has "
                f"{rows} rows; copy the dictionary that the model was trained with"
            )
    config = config_from_settings(settings, vocabularies, path)
    tables = {}
    for side, length in zip(SIDES, (config.max_source, config.max_target), strict=True):
        learned = bool(settings.get(f"{side}_learned_pos"))
        tables[side] = f"{side}.embed_positions.{'weight' if learned else 'computed'}"
        if not learned:
            check_computed_positions(config, str(path))
            weights[tables[side]] = halves_of_sinusoids(PAD + 1 + length, config.d_model)
        if tables[side] in weights and weights[tables[side]].ndim:
            weights[tables[side]] = weights[tables[side]][PAD + 1 :]
    ignored = list(IGNORED)
    if config.share_embeddings:
        check_same(weights, TARGET_TABLE, SOURCE_TABLE, "share_all_embeddings", str(path))
        ignored.append(SOURCE_TABLE)
    if config.tie_output:
        check_same(weights, TARGET_TABLE, OUTPUT, "share_decoder_input_output_embed", str(path))
        ignored.append(OUTPUT)
    ours = renamed_weights(weights, renames_of(config, tables), ignored, str(path))
    notes = (
        f"ids are those of {dictionaries[0].name} and {dictionaries[1].name}: <s> <pad> </s> <unk>, then their lines",
        f"sources must end with </s> (id {END}), as fairseq makes them; decoding starts with it too",
    )
    pair = settings["source_lang"], settings["target_lang"]
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_fairseq(source, pair))
    return Imported(model_from_weights(config, ours, str(path)), {}, (*notes, *why), "fairseq", tokenizer)


def dictionary_file(settings: Mapping[str, Any], side: str, path: Path) -> Path:
    language = settings.get(side)
    if not isinstance(language, str):
        raise CheckpointError(f"{path} names no {side}, so its dictionary cannot be found")
    file = path.parent / f"dict.{language}.txt"
    if not file.is_file():
        raise CheckpointError(f"{path.parent} has no {file.name}; copy it there from the folder of the training data")
    return file


def new_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Today's names for those of fairseq before 0.9: stacked projections, numbered norms, `embed_out`."""
    renamed = {}
    for name, tensor in split_projections(weights, "{part}_proj.{kind}").items():
        owner, numbered, rest = name.partition(".layer_norms.")
        number, _, kind = rest.partition(".")
        new = OLD_NORMS.get(name.partition(".")[0], {}).get(number) if numbered else None
        renamed[f"{owner}.{new}.{kind}" if new else name] = tensor
    if "decoder.embed_out" in renamed:
        renamed[OUTPUT] = renamed.pop("decoder.embed_out")
    return renamed


def halves_of_sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: the sines of all rates, then their cosines; in fp32 from the start, as fairseq has them."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates  # [length, half]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def renames_of(config: ModelConfig, tables: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The whole table of a model of this config; `tables` are the names of its positions."""
    table = layer_renames(with_parts(ENCODER_LAYER), config.encoder_layers)
    table |= layer_renames(with_parts(DECODER_LAYER), config.decoder_layers)
    table |= with_parts(FINAL_NORMS) if config.norm == "pre" else {}
    table |= with_parts(EMBEDDING_NORMS) if config.embedding_norm else {}
    table |= {"target_embedding.tokens.weight": (TARGET_TABLE,)}
    table |= {} if config.share_embeddings else {"source_embedding.tokens.weight": (SOURCE_TABLE,)}
    table |= {} if config.tie_output else {"output.weight": (OUTPUT,)}
    return table | {
        "source_embedding.positions": (tables["encoder"],),
        "target_embedding.positions": (tables["decoder"],),
    }
