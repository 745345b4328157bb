"""An engine's passport: what it was built from, with what, for what, and what came out. Written beside the engine."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BundleError
from .profiles import Range, ShapeRanges

FORMAT = 1
PASSPORT = "passport.json"


@dataclass(frozen=True)
class EngineTensor:
    """One input or output as the engine has it; `shapes` are those at min, opt and max (outputs: none)."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class EngineEntry:
    """One engine file. `aliases` maps a cache output to the input whose memory it must share."""

    file: str
    bytes: int
    sha256: str
    onnx_fingerprint: str
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    aliases: dict[str, str]
    launches: int
    fused_attentions: int
    attentions: int
    build_seconds: float
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by type, read from the engine; empty if it cannot be


@dataclass(frozen=True)
class Passport:
    flavour: str  # tensorrt or tensorrt_rtx
    version: str
    targets: tuple[str, ...]  # sm86, ...; or the device it was built on
    precision: str
    cache_form: str
    ranges: ShapeRanges
    slots: int
    engines: dict[str, EngineEntry]  # encoder, decoder_step
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_passport(path: Path) -> Passport:
    try:
        return passport_from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}); build the engine again with: seq2engine build"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} cannot be used ({error}); build the engine again with: seq2engine build") from error


def passport_from_dict(values: dict[str, Any]) -> Passport:
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}, this version reads {FORMAT}")
    return Passport(
        **{
            **values,
            "targets": tuple(values["targets"]),
            "ranges": ShapeRanges(**{name: Range(**r) for name, r in values["ranges"].items()}),
            "engines": {name: entry_from_dict(entry) for name, entry in values["engines"].items()},
        }
    )


def entry_from_dict(values: dict[str, Any]) -> EngineEntry:
    tensors = {side: tuple(tensor_from_dict(t) for t in values[side]) for side in ("inputs", "outputs")}
    return EngineEntry(**{**values, **tensors})


def tensor_from_dict(values: dict[str, Any]) -> EngineTensor:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    return EngineTensor(values["name"], values["dtype"], tuple(values["axes"]), shapes)
