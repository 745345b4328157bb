"""The role of another exporter's ONNX graph of an encoder-decoder model, and of each of its inputs.

    encoder           ids, mask -> states
    decoder           ids of all steps, states, mask -> logits                    (Optimum's decoder_model)
    with past         ids of one step, keys and values so far -> logits            (Optimum's decoder_with_past_model)
    merged            both, chosen by use_cache_branch                             (Optimum's decoder_model_merged)
    whole             source ids, decoder ids, masks -> logits                     (torch.onnx of the model)

Inputs are recognised by their names, as Optimum and transformers write them, or by types and ranks where names differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from seq2engine.errors import ConfigError
from seq2engine.export.artifact.graph_files import graph_from_file
from seq2engine.model.config import ModelConfig

from ...ort.graphs import Placement, inference_session

BRANCH = "use_cache_branch"
PAST = re.compile("^past_key_values?")  # in front of keys as of values
LAYER = re.compile(r"(?:^|[^0-9])([0-9]+)(?:[^0-9]|$)")
NUMPY: dict[str, Any] = {  # ONNX Runtime's names of the types that inputs may have
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


@dataclass(frozen=True)
class ForeignGraph:
    """An opened graph: its role, and what each of its inputs is fed: one of the names below, or `self_k.0` and so on.

    ids, source_ids, source_mask, target_mask, states, positions, branch
    """

    path: Path
    role: str
    session: ort.InferenceSession
    inputs: dict[str, str]
    types: dict[str, str]
    output: str
    precision: str

    @property
    def name(self) -> str:
        return self.path.stem


def foreign_graph(path: Path, config: ModelConfig, threads: int | None = None) -> ForeignGraph:
    """Opens a graph and determines its role; raises with its inputs if it has none of these."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; name an ONNX graph of this model's encoder or decoder")
    graph_from_file(path)  # checks what ONNX Runtime would take on trust
    session = inference_session(path, Placement(threads))
    given = {value.name: value for value in session.get_inputs()}
    caches = [name for name, value in given.items() if "float" in value.type and len(value.shape) == 4]
    decodes = any(is_states(name, value) for name, value in given.items()) or bool(caches)
    whole = any("decoder_input_ids" in name for name in given)
    inputs = {name: kind_of(name, value, decodes, whole) for name, value in given.items() if name not in caches}
    inputs |= caches_of(caches, config.decoder_layers)
    role = role_of(set(inputs.values()), bool(caches), whole)
    output = output_of(session, config.state_width if role == "encoder" else config.target_vocab)
    unknown = sorted(name for name, kind in inputs.items() if not kind)
    if unknown or not role or not output:
        shapes = ", ".join(f"{name} {value.type} {value.shape}" for name, value in given.items())
        raise ConfigError(
            f"{path} is not an encoder or decoder with known inputs ({shapes}); expected input_ids, masks, "
            "encoder_hidden_states and past_key_values as Optimum and transformers name them, and an output of "
            f"{config.state_width} states or {config.target_vocab} logits"
        )
    types = {name: value.type for name, value in given.items()}
    if odd := [f"{name} {kind}" for name, kind in types.items() if kind not in NUMPY]:
        raise ConfigError(f"{path} takes {', '.join(odd)}, expected inputs of {', '.join(NUMPY)}")
    kinds = {value.name: value.type for value in session.get_outputs()}
    half = "float16" in kinds[output] or any("float16" in kind for kind in types.values())
    return ForeignGraph(path, role, session, inputs, types, output, "fp16" if half else "fp32")


def is_states(name: str, value: ort.NodeArg) -> bool:
    return ("float" in value.type and len(value.shape) == 3) or "hidden_states" in name


def kind_of(name: str, value: ort.NodeArg, decodes: bool, whole: bool) -> str:
    """What an input that is not a cache is fed; '' if unknown."""
    if name == BRANCH:
        return "branch"
    if is_states(name, value):
        return "states"
    if "position" in name:
        return "positions"
    if "mask" in name:
        own = (decodes and "encoder" not in name) or "decoder" in name
        return "target_mask" if own else "source_mask"
    if "int" in value.type and len(value.shape) == 2:
        return "source_ids" if not decodes and (not whole or "decoder" not in name) else "ids"
    return ""


def role_of(kinds: set[str], caches: bool, whole: bool) -> str:
    if whole:
        return "whole"
    if "branch" in kinds:
        return "merged"
    if caches:
        return "with past"
    if "states" in kinds:
        return "decoder"
    return "encoder" if "source_ids" in kinds else ""


def caches_of(names: list[str], layers: int) -> dict[str, str]:
    """Caches by layer, side and part, from their names; else in the order of transformers: self k, v, cross k, v."""
    found: dict[str, str] = {}
    for place, whole in enumerate(names):
        name = PAST.sub("", whole)
        numbered = LAYER.findall(name)
        per_layer = max(1, len(names) // max(1, layers))
        layer = int(numbered[-1]) if numbered and int(numbered[-1]) < layers else place // per_layer
        cross = "encoder" in name or "cross" in name
        value = "value" in name or name.endswith((".v", "_v"))
        named = cross or "decoder" in name or "self" in name or "key" in name or value
        if not named:
            cross, value = place % per_layer >= 2, bool(place % 2)
        found[whole] = f"{'cross' if cross else 'self'}_{'v' if value else 'k'}.{layer}"
    return found


def output_of(session: ort.InferenceSession, width: int) -> str:
    """The output of logits or states: by its name, else the first of rank 3 and that width."""
    outputs = session.get_outputs()
    named = [value.name for value in outputs if value.name in ("logits", "last_hidden_state")]
    shaped = [value.name for value in outputs if len(value.shape) == 3 and value.shape[-1] in (width, None)]
    shaped += [value.name for value in outputs if len(value.shape) == 3 and isinstance(value.shape[-1], str)]
    return next(iter([*named, *shaped]), "")
