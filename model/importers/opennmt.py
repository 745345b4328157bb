"""Imports Transformers trained by OpenNMT-py 3: one .pt file with `model`, `generator`, `vocab` and `opt`.

They are pre-norm with final norms. The file holds the table of positions that was trained with; it becomes a table of
ours like a learned one, so it stays the same to the bit, whether sines and cosines alternate in it or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from seq2engine.errors import CheckpointError, ConfigError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, config_problem
from ..tokenizers.importing import tokenizer_from_opennmt
from .conversion.renames import layer_renames, renamed_weights
from .conversion.weight_fixes import check_same, first_rows, shape_of, with_parts, zero_biases
from .files.pickles import entry, pickle_in, read_pickle, settings_of, tensors
from .imported import Imported, tokenizer_or_note

LONGEST = 1024  # of the table's 5000 positions; caches and engines are made for the longest
ACCEPTED: dict[str, tuple[Any, ...]] = {  # options may be missing: older versions did not have them
    "copy_attn": (False,),
    "decoder_type": ("transformer",),
    "encoder_type": ("transformer",),
    "generator_function": ("softmax",),
    "layer_norm": ("standard",),
    "max_relative_positions": (0,),  # above: relative positions; -1: rotary, -2: alibi
    "model_task": ("seq2seq",),
    "multiquery": (False,),
    "num_experts": (0,),
    "num_kv": (0,),
    "parallel_residual": (False,),
    "pos_ffn_activation_fn": ("relu", "gelu"),  # silu and gated-gelu have a third matrix here
    "position_encoding": (True,),
    "relative_positions_buckets": (0,),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "shared_layer_norm": (False,),
    "sliding_window": (0,),
}
SPECIALS = ("<unk>", "<blank>", "<s>", "</s>")
NEEDED = ("enc_layers", "dec_layers", "heads", "transformer_ff", "position_encoding")
ENCODER_LAYER = {
    "encoder.{i}.self_attn.qkv": (
        "encoder.transformer.{i}.self_attn.linear_query",
        "encoder.transformer.{i}.self_attn.linear_keys",
        "encoder.transformer.{i}.self_attn.linear_values",
    ),
    "encoder.{i}.self_attn.out": ("encoder.transformer.{i}.self_attn.final_linear",),
    "encoder.{i}.self_residual.norm": ("encoder.transformer.{i}.layer_norm",),
    "encoder.{i}.feed_forward.up": ("encoder.transformer.{i}.feed_forward.w_1",),
    "encoder.{i}.feed_forward.down": ("encoder.transformer.{i}.feed_forward.w_2",),
    "encoder.{i}.feed_residual.norm": ("encoder.transformer.{i}.feed_forward.layer_norm",),
}
DECODER_LAYER = {
    "decoder.{i}.self_attn.qkv": (
        "decoder.transformer_layers.{i}.self_attn.linear_query",
        "decoder.transformer_layers.{i}.self_attn.linear_keys",
        "decoder.transformer_layers.{i}.self_attn.linear_values",
    ),
    "decoder.{i}.self_attn.out": ("decoder.transformer_layers.{i}.self_attn.final_linear",),
    "decoder.{i}.self_residual.norm": ("decoder.transformer_layers.{i}.layer_norm_1",),
    "decoder.{i}.cross_attn.q": ("decoder.transformer_layers.{i}.context_attn.linear_query",),
    "decoder.{i}.cross_attn.kv": (
        "decoder.transformer_layers.{i}.context_attn.linear_keys",
        "decoder.transformer_layers.{i}.context_attn.linear_values",
    ),
    "decoder.{i}.cross_attn.out": ("decoder.transformer_layers.{i}.context_attn.final_linear",),
    "decoder.{i}.cross_residual.norm": ("decoder.transformer_layers.{i}.layer_norm_2",),
    "decoder.{i}.feed_forward.up": ("decoder.transformer_layers.{i}.feed_forward.w_1",),
    "decoder.{i}.feed_forward.down": ("decoder.transformer_layers.{i}.feed_forward.w_2",),
    "decoder.{i}.feed_residual.norm": ("decoder.transformer_layers.{i}.feed_forward.layer_norm",),
}
FINAL_NORMS = {"encoder_norm": ("encoder.layer_norm",), "decoder_norm": ("decoder.layer_norm",)}
SOURCE_TABLE = "encoder.embeddings.make_embedding.emb_luts.0.weight"
TARGET_TABLE = "decoder.embeddings.make_embedding.emb_luts.0.weight"
POSITIONS = ("encoder.embeddings.make_embedding.pe.pe", "decoder.embeddings.make_embedding.pe.pe")
OUTPUT, OUTPUT_BIAS = "generator.weight", "generator.bias"
BIASES = {  # kinds of modules that have a bias or not all together, and their option
    (".linear_query.", ".linear_keys.", ".linear_values."): "add_qkvbias",
    (".final_linear.",): None,  # goes with add_qkvbias in later versions, is always there in earlier ones
    (".w_1.", ".w_2."): "add_ffnbias",
}


def checkpoint_from_opennmt(source: Path) -> Imported:
    """The model of one .pt file, or of a folder with one."""
    names = ("model", "generator", "vocab", "opt")
    path = pickle_in(source)
    content = read_pickle(path)
    model, generator, vocab, opt = (entry(content, name, path, "OpenNMT-py") for name in names)
    options = settings_of(opt, "opt", path)
    refuse(options, vocab, path)
    weights = tensors(model, path)
    weights |= {f"generator.{name}": tensor for name, tensor in tensors(generator, path).items()}
    weights |= {name: first_rows(weights[name], LONGEST) for name in POSITIONS if name in weights}  # of [5000, 1, D]
    config = config_from_options(options, vocab, weights, path)
    weights = with_biases(weights, config, options, path)
    ignored = []
    if config.share_embeddings:
        check_same(weights, TARGET_TABLE, SOURCE_TABLE, "share_embeddings", str(path))
        ignored.append(SOURCE_TABLE)
    if config.tie_output:
        check_same(weights, TARGET_TABLE, OUTPUT, "share_decoder_embeddings", str(path))
        ignored.append(OUTPUT)
    ours = renamed_weights(weights, renames_of(config), ignored, str(path))
    notes = (
        "ids are those of the file's src and tgt vocabularies; sources are taken without <s> and </s>",
        f"sources and outputs of up to {config.max_source} tokens",
    )
    read = partial(tokenizer_from_opennmt, path, vocab["src"], vocab["tgt"], SPECIALS)
    tokenizer, why = tokenizer_or_note(read)
    return Imported(model_from_weights(config, ours, str(path)), {}, (*notes, *why), "OpenNMT-py", tokenizer)


def refuse(options: Mapping[str, Any], vocab: Any, path: Path) -> None:
    """Names every option that this importer cannot keep."""
    problems = [f"no {name}" for name in NEEDED if name not in options]
    for name, accepted in ACCEPTED.items():
        if options.get(name, accepted[0]) not in accepted:
            problems.append(f"{name} {options[name]}, expected {' or '.join(map(str, accepted))}")
    if not isinstance(vocab, Mapping) or not all(isinstance(vocab.get(side), list) for side in ("src", "tgt")):
        problems.append("a vocab of another version, expected lists of tokens for src and tgt")
    elif vocab.get("src_feats"):
        problems.append("source features (src_feats), which are not supported")
    if problems:
        raise CheckpointError(f"{path} cannot be imported: it has " + "; ".join(problems))


def config_from_options(
    options: Mapping[str, Any], vocab: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path
) -> ModelConfig:
    sizes = []
    for side, table in (("src", SOURCE_TABLE), ("tgt", TARGET_TABLE)):
        rows, width = shape_of(weights, table, str(path))
        sizes.append(rows)
        if rows != len(vocab[side]):
            raise CheckpointError(f"{path}: {side} has {len(vocab[side])} tokens, but {table} has {rows} rows")
    start = vocab.get("decoder_start_token") or options.get("decoder_start_token") or "<s>"
    missing = [token for token in ("<blank>", start, "</s>") if token not in vocab["tgt"]]
    if missing:
        raise CheckpointError(f"{path}: the tgt vocabulary has no {', '.join(missing)}")
    pad = vocab["tgt"].index("<blank>")
    if vocab["src"][pad : pad + 1] != ["<blank>"]:
        raise CheckpointError(f"{path}: <blank> is token {pad} of tgt but not of src, expected the same in both")
    longest = min(shape_of(weights, name, str(path))[0] for name in POSITIONS)
    try:
        return ModelConfig(
            encoder_layers=options["enc_layers"],
            decoder_layers=options["dec_layers"],
            heads=options["heads"],
            d_model=width,
            d_ff=options["transformer_ff"],
            source_vocab=sizes[0],
            target_vocab=sizes[1],
            norm="pre",
            positions="learned",
            activation=options.get("pos_ffn_activation_fn", "relu"),
            share_embeddings=bool(options.get("share_embeddings")),
            tie_output=bool(options.get("share_decoder_embeddings")),
            output_bias=OUTPUT_BIAS in weights,
            norm_epsilon=float(options.get("norm_eps", 1e-6)),
            max_source=longest,
            max_target=longest,
            pad_id=pad,
            start_id=vocab["tgt"].index(start),
            end_id=vocab["tgt"].index("</s>"),
        )
    except ConfigError as error:
        raise config_problem(path, error) from error


def with_biases(
    weights: Mapping[str, Tensor], config: ModelConfig, options: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Zeros for the kinds of biases that the model was trained without."""
    biases = [name for theirs in renames_of(config).values() for name in theirs if name.endswith(".bias")]
    filled = dict(weights)
    for kinds, option in BIASES.items():
        group = [name for name in biases if any(kind in name for kind in kinds)]
        stated = options.get(option) if option else None
        filled = zero_biases(filled, group, stated, str(option), str(path))
    return filled


def renames_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The whole table of a model of this config."""
    table = layer_renames(with_parts(ENCODER_LAYER), config.encoder_layers)
    table |= layer_renames(with_parts(DECODER_LAYER), config.decoder_layers)
    table |= with_parts(FINAL_NORMS)
    table |= {"target_embedding.tokens.weight": (TARGET_TABLE,)}
    table |= {} if config.share_embeddings else {"source_embedding.tokens.weight": (SOURCE_TABLE,)}
    table |= {} if config.tie_output else {"output.weight": (OUTPUT,)}
    table |= {"output.bias": (OUTPUT_BIAS,)} if config.output_bias else {}
    return table | {"source_embedding.positions": (POSITIONS[0],), "target_embedding.positions": (POSITIONS[1],)}
