"""Imports state dicts of models around torch.nn.Transformer: a folder with weights and a seq2engine.json about them.

Such a model has no config of its own, so the JSON has what a state dict lacks; sizes are read from the weights.
Every field must be there, null where there is no such thing:

    {
      "weights": "model.pt",                a .pt file of names and tensors, or a .safetensors file, in this folder
      "state_dict": null,                   the entry of the .pt file that holds them, as "model_state_dict"
      "transformer": "transformer.",        what the names of nn.Transformer's weights begin with
      "heads": 8,
      "activation": "relu",                 relu, gelu or silu
      "norm_first": false,
      "norm_epsilon": 1e-5,                 nn.Transformer's layer_norm_eps
      "final_norms": true,                  nn.Transformer has them unless it is given its own encoder and decoder
      "bias": true,                         nn.Transformer's bias
      "source_embedding": "source.weight",  names of weights; equal ones are one table, under
      "target_embedding": "target.weight",  one name or several
      "output_weight": "output.weight",
      "output_bias": "output.bias",
      "scale_embeddings": true,             embeddings are multiplied by sqrt(d_model)
      "positions": "sinusoidal",            the paper's, or "learned": the tables named here, in whatever way they came
      "source_positions": null,             about; [length, d_model], axes of size 1 do not matter
      "target_positions": null,
      "max_source": 512,
      "max_target": 512,
      "pad_id": 0,
      "start_id": 1,
      "end_id": 2,
      "ignored": ["positions.pe"]           names that are in the file and not needed
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from seq2engine.common.json_files import read_object
from seq2engine.errors import CheckpointError, ConfigError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, config_problem
from .conversion.renames import layer_renames, renamed_weights
from .conversion.weight_fixes import first_rows, shape_of, split_projections, with_parts, zero_biases
from .files.pickles import entry, read_pickle, tensors
from .imported import Imported

DESCRIPTION = "seq2engine.json"
NOTHING = type(None)
FIELDS: dict[str, tuple[type, ...]] = {
    "weights": (str,),
    "state_dict": (str, NOTHING),
    "transformer": (str,),
    "heads": (int,),
    "activation": (str,),
    "norm_first": (bool,),
    "norm_epsilon": (float,),
    "final_norms": (bool,),
    "bias": (bool,),
    "source_embedding": (str,),
    "target_embedding": (str,),
    "output_weight": (str,),
    "output_bias": (str, NOTHING),
    "scale_embeddings": (bool,),
    "positions": (str,),
    "source_positions": (str, NOTHING),
    "target_positions": (str, NOTHING),
    "max_source": (int,),
    "max_target": (int,),
    "pad_id": (int,),
    "start_id": (int,),
    "end_id": (int,),
    "ignored": (list,),
}
POSITIONS = ("sinusoidal", "learned")
ENCODER_LAYER = {
    "encoder.{i}.self_attn.qkv.weight": (
        "encoder.layers.{i}.self_attn.in_proj_weight[q]",
        "encoder.layers.{i}.self_attn.in_proj_weight[k]",
        "encoder.layers.{i}.self_attn.in_proj_weight[v]",
    ),
    "encoder.{i}.self_attn.qkv.bias": (
        "encoder.layers.{i}.self_attn.in_proj_bias[q]",
        "encoder.layers.{i}.self_attn.in_proj_bias[k]",
        "encoder.layers.{i}.self_attn.in_proj_bias[v]",
    ),
    **with_parts(
        {
            "encoder.{i}.self_attn.out": ("encoder.layers.{i}.self_attn.out_proj",),
            "encoder.{i}.self_residual.norm": ("encoder.layers.{i}.norm1",),
            "encoder.{i}.feed_forward.up": ("encoder.layers.{i}.linear1",),
            "encoder.{i}.feed_forward.down": ("encoder.layers.{i}.linear2",),
            "encoder.{i}.feed_residual.norm": ("encoder.layers.{i}.norm2",),
        }
    ),
}
DECODER_LAYER = {
    "decoder.{i}.self_attn.qkv.weight": (
        "decoder.layers.{i}.self_attn.in_proj_weight[q]",
        "decoder.layers.{i}.self_attn.in_proj_weight[k]",
        "decoder.layers.{i}.self_attn.in_proj_weight[v]",
    ),
    "decoder.{i}.self_attn.qkv.bias": (
        "decoder.layers.{i}.self_attn.in_proj_bias[q]",
        "decoder.layers.{i}.self_attn.in_proj_bias[k]",
        "decoder.layers.{i}.self_attn.in_proj_bias[v]",
    ),
    "decoder.{i}.cross_attn.q.weight": ("decoder.layers.{i}.multihead_attn.in_proj_weight[q]",),
    "decoder.{i}.cross_attn.q.bias": ("decoder.layers.{i}.multihead_attn.in_proj_bias[q]",),
    "decoder.{i}.cross_attn.kv.weight": (
        "decoder.layers.{i}.multihead_attn.in_proj_weight[k]",
        "decoder.layers.{i}.multihead_attn.in_proj_weight[v]",
    ),
    "decoder.{i}.cross_attn.kv.bias": (
        "decoder.layers.{i}.multihead_attn.in_proj_bias[k]",
        "decoder.layers.{i}.multihead_attn.in_proj_bias[v]",
    ),
    **with_parts(
        {
            "decoder.{i}.self_attn.out": ("decoder.layers.{i}.self_attn.out_proj",),
            "decoder.{i}.self_residual.norm": ("decoder.layers.{i}.norm1",),
            "decoder.{i}.cross_attn.out": ("decoder.layers.{i}.multihead_attn.out_proj",),
            "decoder.{i}.cross_residual.norm": ("decoder.layers.{i}.norm2",),
            "decoder.{i}.feed_forward.up": ("decoder.layers.{i}.linear1",),
            "decoder.{i}.feed_forward.down": ("decoder.layers.{i}.linear2",),
            "decoder.{i}.feed_residual.norm": ("decoder.layers.{i}.norm3",),
        }
    ),
}
FINAL_NORMS = with_parts({"encoder_norm": ("encoder.norm",), "decoder_norm": ("decoder.norm",)})


def checkpoint_from_torch(source: Path) -> Imported:
    """The model of a folder with weights and seq2engine.json."""
    about = read_about(source / DESCRIPTION)
    path = source / about["weights"]
    weights = split_projections(read_weights(path, about["state_dict"]), "in_proj_{kind}[{part}]")
    config = config_from_about(about, weights, path)
    renames = transformer_renames(config, about["transformer"])
    biases = [name for theirs in renames.values() for name in theirs if "bias" in name.rpartition(".")[2]]
    weights = zero_biases(weights, biases, about["bias"], "bias", str(path))
    ignored = set(about["ignored"])
    renames["target_embedding.tokens.weight"] = (about["target_embedding"],)
    for shared, name, theirs in (
        (config.share_embeddings, "source_embedding.tokens.weight", about["source_embedding"]),
        (config.tie_output, "output.weight", about["output_weight"]),
    ):
        if shared:
            ignored.add(theirs)
        else:
            renames[name] = (theirs,)
    if config.output_bias:
        renames["output.bias"] = (about["output_bias"],)
    if config.positions == "learned":
        for side, length in (("source", config.max_source), ("target", config.max_target)):
            table = about[f"{side}_positions"]
            renames[f"{side}_embedding.positions"] = (table,)
            if table in weights:  # one table may serve both sides, at different lengths
                ignored.add(table)
                renames[f"{side}_embedding.positions"] = (f"{table}[:{length}]",)
                weights[f"{table}[:{length}]"] = first_rows(weights[table], length)
    ours = renamed_weights(weights, renames, ignored, str(path))
    return Imported(model_from_weights(config, ours, str(path)), {}, (), "torch.nn.Transformer", None)


def read_weights(path: Path, inside: str | None) -> dict[str, Tensor]:
    """Names and tensors of a .safetensors file, or of a .pt file or one entry of it."""
    if path.suffix != ".safetensors":
        content = read_pickle(path, f"save model.state_dict() alone as {path.name}")
        return tensors(content if inside is None else entry(content, inside, path, f"{DESCRIPTION}'s kind"), path)
    if not path.is_file():
        raise CheckpointError(f"no file at {path}; expected the weights that {DESCRIPTION} names")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the checkpoint again") from error


def config_from_about(about: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> ModelConfig:
    """Sizes from the weights, the rest from the JSON."""
    prefix = about["transformer"]
    source, target, output = (about[name] for name in ("source_embedding", "target_embedding", "output_weight"))
    source_vocab, d_model = shape_of(weights, source, str(path))
    target_vocab, _ = shape_of(weights, target, str(path))
    shape_of(weights, output, str(path))
    d_ff, _ = shape_of(weights, f"{prefix}encoder.layers.0.linear1.weight", str(path))
    try:
        return ModelConfig(
            encoder_layers=layers_of(weights, f"{prefix}encoder.layers."),
            decoder_layers=layers_of(weights, f"{prefix}decoder.layers."),
            heads=about["heads"],
            d_model=d_model,
            d_ff=d_ff,
            source_vocab=source_vocab,
            target_vocab=target_vocab,
            norm="pre" if about["norm_first"] else "post",
            positions=about["positions"],
            activation=about["activation"],
            share_embeddings=torch.equal(weights[source], weights[target]),  # one table, even if it has two names
            tie_output=torch.equal(weights[output], weights[target]),
            scale_embeddings=about["scale_embeddings"],
            output_bias=about["output_bias"] is not None,
            final_norm=about["final_norms"],
            norm_epsilon=about["norm_epsilon"],
            max_source=about["max_source"],
            max_target=about["max_target"],
            pad_id=about["pad_id"],
            start_id=about["start_id"],
            end_id=about["end_id"],
        )
    except ConfigError as error:
        raise config_problem(path.parent / DESCRIPTION, error) from error


def layers_of(weights: Mapping[str, Tensor], prefix: str) -> int:
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix)}
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def transformer_renames(config: ModelConfig, prefix: str) -> dict[str, tuple[str, ...]]:
    """The table of nn.Transformer's own weights."""
    table = layer_renames(ENCODER_LAYER, config.encoder_layers)
    table |= layer_renames(DECODER_LAYER, config.decoder_layers)
    table |= FINAL_NORMS if config.final_norm else {}
    return {ours: tuple(prefix + name for name in theirs) for ours, theirs in table.items()}


def read_about(path: Path) -> dict[str, Any]:
    """The fields of a seq2engine.json; everything that is wrong with them is listed."""
    if not path.is_file():
        raise CheckpointError(f"no {DESCRIPTION} in {path.parent}; expected next to the weights to describe them")
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); correct it") from error
    problems = [f"unknown field {name!r}" for name in sorted(values.keys() - FIELDS.keys())]
    problems += [f"missing field {name!r}" for name in sorted(FIELDS.keys() - values.keys())]
    for name in sorted(FIELDS.keys() & values.keys()):
        if type(values[name]) not in FIELDS[name]:
            wanted = " or ".join("null" if kind is NOTHING else kind.__name__ for kind in FIELDS[name])
            problems.append(f"{name} is {values[name]!r}, expected {wanted}")
    if not problems:
        problems = contradictions(values)
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    return values


def contradictions(values: dict[str, Any]) -> list[str]:
    """What is wrong with fields that are all there and of the right type."""
    problems = []
    if values["weights"] != Path(values["weights"]).name:
        problems.append(f"weights is {values['weights']!r}, expected a file in the same folder")
    if not all(isinstance(name, str) for name in values["ignored"]):
        problems.append("ignored is not a list of names")
    if values["norm_first"] and not values["final_norms"]:
        problems.append("norm_first without final_norms, which is not supported")
    if values["positions"] not in POSITIONS:
        problems.append(f"positions is {values['positions']!r}, expected one of {', '.join(POSITIONS)}")
    for name in ("source_positions", "target_positions"):
        if (values[name] is None) != (values["positions"] == "sinusoidal"):
            problems.append(f"{name} is {values[name]!r}, expected a name with learned positions and null without")
    return problems
