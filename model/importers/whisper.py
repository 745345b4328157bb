"""Whisper: Hugging Face folders of every size, distilled ones too, and OpenAI's own .pt files.

Layers are named as in Hugging Face's other families; a table maps OpenAI's names to them. New is the front
end: two convolutions instead of an embedding. Keys have no bias: it is zero in ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError, ConfigError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, check_computed_positions, config_problem
from ..speech import SpeechConfig
from ..tokenizers.base import Tokenizer
from ..tokenizers.importing import tokenizer_from_hugging_face, tokenizer_from_tiktoken
from ..whisper_tokens import alignment_heads, layout_of, speech_from_layout
from .conversion.position_tables import whisper_positions
from .conversion.renames import layer_renames, renamed_weights
from .conversion.weight_fixes import zero_biases
from .files.pickles import entry, pickle_in, read_pickle, tensors
from .files.weights import read_weights
from .hugging_face import CONFIG, DECODER_LAYER, ENCODER_LAYER, FINAL_NORMS, GENERATION, both
from .hugging_face_config import read_json
from .hugging_face_generation import generation_from_files
from .imported import Imported, tokenizer_or_note

TABLE, OUTPUT = "model.decoder.embed_tokens.weight", "proj_out.weight"
SOURCE_POSITIONS = "model.encoder.embed_positions.weight"
FRONT_END = {
    **both("source_embedding.first", "model.encoder.conv1"),
    **both("source_embedding.second", "model.encoder.conv2"),
    "source_embedding.positions": (SOURCE_POSITIONS,),
    "target_embedding.positions": ("model.decoder.embed_positions.weight",),
    "target_embedding.tokens.weight": (TABLE,),
}
SIZES = {  # fields of config.json, and what the library takes where a file does not name them
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "d_model": 384,
    "vocab_size": 51865,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 50257,
    "eos_token_id": 50256,
    "pad_token_id": 50256,
}
REQUIRED = {"activation_function": "gelu", "scale_embedding": False, "is_encoder_decoder": True}
DIMENSIONS = {  # OpenAI's name of a size -> Hugging Face's
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}
OPENAI_NAMES = (  # part of a name -> Hugging Face's, in this order
    ("encoder.positional_embedding", "encoder.embed_positions.weight"),
    ("decoder.positional_embedding", "decoder.embed_positions.weight"),
    ("decoder.token_embedding", "decoder.embed_tokens"),
    ("encoder.ln_post", "encoder.layer_norm"),
    ("decoder.ln.", "decoder.layer_norm."),
    (".blocks.", ".layers."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".mlp_ln.", ".final_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn.", ".self_attn."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    ("_attn.query.", "_attn.q_proj."),
    ("_attn.key.", "_attn.k_proj."),
    ("_attn.value.", "_attn.v_proj."),
    ("_attn.out.", "_attn.out_proj."),
)


def checkpoint_from_whisper(source: Path) -> Imported:
    """A folder of config.json, generation_config.json and weights, as `save_pretrained` writes it."""
    where = str(source / CONFIG)
    values = read_json(source / CONFIG)
    settings = settings_from_file(values, where)
    config = config_from_sizes(settings, where)  # first: what follows makes lists of these sizes
    own = read_json(source / GENERATION) if (source / GENERATION).is_file() else None
    fields = values if own is None else own
    speech = speech_from_fields(fields, settings, where if own is None else str(source / GENERATION))
    carried = {name: value for name, value in fields.items() if name != "forced_decoder_ids"}
    generation, notes = generation_from_files({}, carried, where)
    if "max_length" in generation and "max_new_tokens" not in carried:  # theirs counts the prompt
        generation["max_length"] -= len(speech.prompt())
    weights = read_weights(source)
    if not any(name.startswith("model.") for name in weights):  # of the bare WhisperModel
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_hugging_face(source))
    model_notes = (*notes, *why)
    return imported(config, weights, generation, speech, model_notes, "Whisper", tokenizer, str(source))


def checkpoint_from_openai(source: Path) -> Imported:
    """A .pt file of OpenAI's, such as tiny.en.pt; gpt2.tiktoken or multilingual.tiktoken beside it is its tokenizer."""
    path = pickle_in(source)
    content = read_pickle(path)
    dims = entry(content, "dims", path, "openai-whisper")
    weights = tensors(entry(content, "model_state_dict", path, "openai-whisper"), path)
    if not isinstance(dims, Mapping) or (missing := [name for name in DIMENSIONS if type(dims.get(name)) is not int]):
        raise CheckpointError(f"{path}: dims lack {', '.join(missing)}, expected sizes of a Whisper model")
    settings = {**SIZES, **{theirs: dims[ours] for ours, theirs in DIMENSIONS.items()}}
    settings["encoder_ffn_dim"] = settings["decoder_ffn_dim"] = 4 * settings["d_model"]
    layout = layout_of(settings["vocab_size"])
    if layout is None:
        raise CheckpointError(f"{path} has a vocabulary of {settings['vocab_size']}, expected 51864, 51865 or 51866")
    settings |= {"eos_token_id": layout.end, "pad_token_id": layout.end, "decoder_start_token_id": layout.start}
    config = config_from_sizes(settings, str(path))  # first: what follows makes lists of these sizes
    heads = alignment_heads(path.stem, settings["decoder_layers"], settings["decoder_attention_heads"])
    speech = speech_from_layout(layout, heads)
    generation = {
        "banned": [[token] for token in speech.suppressed],
        "first_banned": list(speech.first_suppressed),
        "max_length": settings["max_target_positions"] // 2,
    }
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_tiktoken(path.parent, layout))
    if tokenizer is None and not why:
        file = "multilingual.tiktoken" if layout.multilingual else "gpt2.tiktoken"
        why = (f"gives token ids, no text: copy {file} of openai-whisper's whisper/assets beside {path.name}",)
    named = {openai_name(name): tensor for name, tensor in weights.items()}
    return imported(config, named, generation, speech, why, "Whisper", tokenizer, str(path))


def openai_name(name: str) -> str:
    for theirs, ours in OPENAI_NAMES:
        name = name.replace(theirs, ours)
    return f"model.{name}"


def imported(
    config: ModelConfig,
    weights: dict[str, Tensor],
    generation: dict[str, Any],
    speech: SpeechConfig,
    notes: tuple[str, ...],
    kind: str,
    tokenizer: Tokenizer | None,
    where: str,
) -> Imported:
    """A model of ours from weights with Hugging Face's names."""
    if SOURCE_POSITIONS not in weights:
        check_computed_positions(config, where)
        weights[SOURCE_POSITIONS] = whisper_positions(config.max_source, config.d_model)
    renames = {
        **FRONT_END,
        **FINAL_NORMS,
        **layer_renames(ENCODER_LAYER, config.encoder_layers),
        **layer_renames(DECODER_LAYER, config.decoder_layers),
    }
    if OUTPUT in weights and not torch.equal(weights[OUTPUT], weights[TABLE]):
        raise CheckpointError(f"{where}: {OUTPUT} differs from {TABLE}, expected one table for both")
    biases = {name for theirs in renames.values() for name in theirs if name.endswith(".k_proj.bias")}
    weights = zero_biases(weights, biases, None, "key bias", where)
    ours = renamed_weights(weights, renames, {OUTPUT}, where)
    generation = {**generation, "prompt": speech.prompt()}
    model = model_from_weights(config, ours, where)
    return Imported(model, generation, notes, kind, tokenizer, speech)


def settings_from_file(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sizes of a config.json; everything that cannot be ours is listed."""
    settings = {name: default if values.get(name) is None else values[name] for name, default in SIZES.items()}
    problems = [
        f"{name} is {value!r}, expected a whole number" for name, value in settings.items() if type(value) is not int
    ]
    problems += [
        f"{name} is {values[name]!r}, supported for Whisper is {wanted!r}"
        for name, wanted in REQUIRED.items()
        if values.get(name, wanted) != wanted
    ]
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return settings


def config_from_sizes(settings: Mapping[str, Any], where: str) -> ModelConfig:
    pairs = (("attention_heads", "heads"), ("ffn_dim", "feed-forward widths"))
    for name, what in pairs:
        encoder, decoder = settings[f"encoder_{name}"], settings[f"decoder_{name}"]
        if encoder != decoder:
            raise CheckpointError(f"{where}: {what} of encoder and decoder are {encoder} and {decoder}, expected one")
    try:
        return ModelConfig(
            encoder_layers=settings["encoder_layers"],
            decoder_layers=settings["decoder_layers"],
            heads=settings["encoder_attention_heads"],
            d_model=settings["d_model"],
            d_ff=settings["encoder_ffn_dim"],
            source_vocab=0,
            target_vocab=settings["vocab_size"],
            norm="pre",
            positions="learned",
            activation="gelu",
            share_embeddings=False,
            tie_output=True,
            scale_embeddings=False,
            front_end="mel",
            mels=settings["num_mel_bins"],
            max_source=settings["max_source_positions"],
            max_target=settings["max_target_positions"],
            pad_id=settings["pad_token_id"],
            start_id=settings["decoder_start_token_id"],
            end_id=settings["eos_token_id"],
        )
    except ConfigError as error:
        raise config_problem(where, error) from error


def speech_from_fields(fields: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> SpeechConfig:
    """The special tokens from generation_config.json; what it lacks from the layout of OpenAI's vocabularies."""
    layout = layout_of(settings["vocab_size"])
    heads = alignment_heads("", settings["decoder_layers"], settings["decoder_attention_heads"])
    known = None if layout is None else speech_from_layout(layout, heads)
    none = fields.get("no_timestamps_token_id")
    if none is None and known is not None:
        none = known.no_timestamps
    if type(none) is not int:
        raise CheckpointError(f"{where} has no no_timestamps_token_id, expected one; copy generation_config.json again")
    multilingual = fields.get("is_multilingual", known is not None and known.multilingual)
    languages = {language_code(name): i for name, i in (fields.get("lang_to_id") or {}).items()}
    if multilingual and not languages and known is not None:
        languages = known.languages
    tasks = fields.get("task_to_id") or {}
    previous = fields.get("prev_sot_token_id")
    suppressed = fields.get("suppress_tokens")
    first = fields.get("begin_suppress_tokens")
    try:
        return SpeechConfig(
            transcribe=int(tasks.get("transcribe", none - 4)),
            translate=int(tasks.get("translate", none - 5)),
            start_of_previous=int(none - 2 if previous is None else previous),
            no_speech=none - 1,
            no_timestamps=none,
            languages=languages if multilingual else {},
            suppressed=tuple(suppressed or ()) if suppressed is not None or known is None else known.suppressed,
            first_suppressed=tuple(first or ()),
            latest_first_timestamp=fields.get("max_initial_timestamp_index", 50),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in fields.get("alignment_heads") or heads),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: tokens of speech cannot be read ({error}); copy the model again") from error


def language_code(name: str) -> str:
    """<|en|> -> en"""
    return re.sub(r"^<\|(.*)\|>$", r"\1", name)
