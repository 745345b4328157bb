"""seq2engine.json: what a state dict lacks. Its fields are explained in torch_transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seq2engine.errors import CheckpointError

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


def read_about(path: Path) -> dict[str, Any]:
    """The fields of a seq2engine.json; everything that is wrong with them is listed."""
    if not path.is_file():
        raise CheckpointError(f"no {DESCRIPTION} in {path.parent}; expected next to the weights to describe them")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); correct it") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; expected fields by name")
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
