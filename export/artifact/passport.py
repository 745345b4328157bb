"""An engine's passport: graph hash, TensorRT version, GPUs, profiles, launches. A JSON file next to the engine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.errors import BundleError

from .build_flags import PLAIN, BuildFlags
from .profiles import FLAGS, Range, ShapeRanges, short

FORMAT = 2
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
    launches: int  # of the widest profile
    fused_attentions: int  # in every profile
    attentions: int
    build_seconds: float
    peak_memory: int = 0  # bytes that the build took; 0 where the system does not tell
    narrower_launches: tuple[int, ...] = ()  # of the other profiles
    key: str = ""  # what decides over the engine: equal keys, equal engines
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by type, read from the engine; empty if it cannot be


@dataclass(frozen=True)
class Passport:
    """`ranges` are those of the widest profile, which is TensorRT's profile 0; `narrower` the profiles 1, 2, ..."""

    flavour: str  # tensorrt or tensorrt_rtx
    version: str
    targets: tuple[str, ...]  # sm86, ...
    precision: str
    cache_form: str
    ranges: ShapeRanges
    slots: int
    engines: dict[str, EngineEntry]  # encoder, decoder_step
    narrower: tuple[ShapeRanges, ...] = ()
    flags: BuildFlags = PLAIN
    device: str = ""  # the GPU it was built on, where only that one can run it
    format: int = FORMAT

    @property
    def profiles(self) -> tuple[ShapeRanges, ...]:
        """The ranges of every profile, by TensorRT's number of it."""
        return (self.ranges, *self.narrower)

    @property
    def keys(self) -> dict[str, str]:
        return {name: entry.key for name, entry in self.engines.items()}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_passport(path: Path) -> Passport:
    repair = f"build the engine again with: seq2engine build {shlex.quote(str(path.parents[2]))} --force"
    try:
        return passport_from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); {repair}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} cannot be used ({' '.join(str(error).split())}); {repair}") from error


def passport_from_dict(values: dict[str, Any]) -> Passport:
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}, this version reads {FORMAT}")
    if missing := [field.name for field in dataclasses.fields(Passport) if field.name not in values]:
        raise ValueError(f"missing {', '.join(missing)}")
    return Passport(
        **{
            **values,
            "targets": tuple(values["targets"]),
            "ranges": ranges_from_dict(values["ranges"]),
            "narrower": tuple(ranges_from_dict(ranges) for ranges in values["narrower"]),
            "flags": BuildFlags(**values["flags"]),
            "engines": {name: entry_from_dict(entry) for name, entry in values["engines"].items()},
        }
    )


def ranges_from_dict(values: dict[str, Any]) -> ShapeRanges:
    return ShapeRanges(**{name: Range(**r) for name, r in values.items()})


def entry_from_dict(values: dict[str, Any]) -> EngineEntry:
    tensors = {side: tuple(tensor_from_dict(t) for t in values[side]) for side in ("inputs", "outputs")}
    return EngineEntry(**{**values, **tensors, "narrower_launches": tuple(values["narrower_launches"])})


def tensor_from_dict(values: dict[str, Any]) -> EngineTensor:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    return EngineTensor(values["name"], values["dtype"], tuple(values["axes"]), shapes)


def command_of_passport(root: Path, passport: Passport, targets: Sequence[str], **changed: Range | int) -> str:
    """The build of such an engine, with the given ranges or slots instead of its own."""
    options: dict[str, Range | int] = {name: getattr(passport.ranges, name) for name in FLAGS}
    if passport.cache_form == "static" and passport.slots != passport.ranges.slots:
        options["slots"] = passport.slots
    words = [build_command(root, passport.precision, targets), "--flavour", passport.flavour]
    for name, value in {**options, **changed}.items():
        values = [value, *(getattr(ranges, name) for ranges in passport.narrower)] if name in FLAGS else [value]
        values = values[:1] if len(set(values)) == 1 else values
        words += [f"--{FLAGS.get(name, name)}", *(short(value) for value in values)]
    return " ".join([*words, *passport.flags.options()])


def build_command(root: Path, precision: str, targets: Sequence[str]) -> str:
    words = ["seq2engine build", shlex.quote(str(root)), "--precision", precision]
    return " ".join(words + (["--gpu", *targets] if targets else []))
