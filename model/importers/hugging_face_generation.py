"""A Hugging Face model's generation settings as fields of our SearchOptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seq2engine.common.json_files import Read, shortened, typed_from_json
from seq2engine.errors import CheckpointError

from .hugging_face_config import single_token

# their field -> ours and our default, for those that mean the same number
SAME: dict[str, tuple[str, Any]] = {
    "num_beams": ("beam", 1),
    "length_penalty": ("length_penalty", 1.0),
    "early_stopping": ("early_stopping", False),
    "min_length": ("min_length", 0),
    "no_repeat_ngram_size": ("no_repeat_ngram", 0),
    "encoder_no_repeat_ngram_size": ("source_no_repeat_ngram", 0),
    "repetition_penalty": ("repetition_penalty", 1.0),
}
TOKENS = {"forced_bos_token_id": "forced_bos", "forced_eos_token_id": "forced_eos"}
# fields that affect outputs and have no equivalent here -> their neutral value
NOT_CARRIED: dict[str, Any] = {
    "do_sample": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "num_return_sequences": 1,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_decoder_ids": None,
    "guidance_scale": None,
    "penalty_alpha": None,
    "renormalize_logits": False,
    "stop_strings": None,
    "max_time": None,
    "force_bos_token_to_be_generated": False,
}
LENGTHS = ("max_length", "max_new_tokens", "min_new_tokens")
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
FIELDS = (*SAME, *TOKENS, *LENGTHS, *SUPPRESSED, "bad_words_ids", *NOT_CARRIED)


def generation_from_files(
    config: Mapping[str, Any], own: Mapping[str, Any] | None, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fields of SearchOptions, and notes on what was not carried over, from config.json and generation_config.json.

    As in the library, generation_config.json replaces the decoding fields of an older config.json as a whole. Fields
    of config.json count only without it (None), and then only those that are written there.
    """
    values = {name: value for name, value in (config if own is None else own).items() if value is not None}
    notes = []
    if own is not None:
        left = [name for name in FIELDS if config.get(name) is not None and config[name] != own.get(name)]
        if left:
            notes.append(f"generation_config.json is used; config.json differs in {', '.join(left)}")
    for name, idle in NOT_CARRIED.items():
        if values.get(name, idle) != idle:
            notes.append(f"{name} {values[name]!r} is not carried over")
    options = options_from_fields(values, where)
    if values.get("eos_token_id") in (values.get("suppress_tokens") or ()):
        notes.append("suppress_tokens has the end token, which stays allowed: a search must be able to end")
    return options, notes


def checked(kind: type[Read], value: Any, name: str, wanted: str, where: str) -> Read:
    try:
        return typed_from_json(kind, value)
    except ValueError as error:
        raise CheckpointError(f"{where}: {name} is {shortened(value)}, expected {wanted}") from error


def options_from_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, (ours, default) in SAME.items():
        value = values.get(name, default)
        if name == "early_stopping":
            fits, wanted = value in (True, False, "never"), "true, false or never"
        elif type(default) is int:
            fits, wanted = type(value) is int and value >= default, f"a whole number from {default} on"
        else:
            fits, wanted = type(value) in (int, float), "a number"
            if name == "repetition_penalty" and fits:
                fits, wanted = value > 0, "more than 0"
        if not fits:
            raise CheckpointError(f"{where}: {name} is {value!r}, expected {wanted}")
        if value != default:
            options[ours] = value
    for name in LENGTHS:
        if name in values and (type(values[name]) is not int or values[name] < 0):
            raise CheckpointError(f"{where}: {name} is {values[name]!r}, expected a whole number from 0 on")
    # They count the start token, we do not. Their minimum counts it too, but not the end token, which we count.
    if "max_new_tokens" in values:
        options["max_length"] = values["max_new_tokens"]
    elif "max_length" in values:
        options["max_length"] = values["max_length"] - 1
    if options.get("max_length", 1) < 1:
        raise CheckpointError(f"{where}: max_length leaves no token to emit, expected at least 2 (or 1 new token)")
    if values.get("min_new_tokens"):
        options["min_length"] = values["min_new_tokens"] + 1
    for name, ours in TOKENS.items():
        if name in values:
            options[ours] = single_token(values[name], name, where)
    if banned := values.get("bad_words_ids"):
        lists = checked(list[list[int]], banned, "bad_words_ids", "lists of token ids", where)
        if not all(lists):
            raise CheckpointError(f"{where}: bad_words_ids is {shortened(banned)}, expected lists of token ids")
        options["banned"] = lists
    for name in SUPPRESSED:
        checked(list[int], values.get(name) or [], name, "a list of token ids", where)
    if tokens := values.get("suppress_tokens"):
        options["banned"] = [*options.get("banned", []), *([token] for token in tokens)]
    if tokens := values.get("begin_suppress_tokens"):
        options["first_banned"] = tokens
    return options
