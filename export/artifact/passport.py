"""An engine's passport: graph hash, TensorRT version, GPUs, profiles, launches. A JSON file next to the engine."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.inner_paths import problem_with_path
from seq2engine.common.json_files import read_object, shortened, typed_from_json
from seq2engine.common.tensorrt_module import FLAVOURS
from seq2engine.errors import BundleError

from ..contract import CACHE_FORMS, DEVICE_GRAPHS, GRAPHS, PRECISIONS
from .build_flags import PLAIN, BuildFlags
from .profiles import FLAGS, Range, ShapeRanges, short

FORMAT = 3
LOGITS = "logits"  # the reduction without an engine
LARGEST = 2**24  # sizes beyond this mean a damaged passport
AXES = ("B", "K", "S", "L", "M", "F", "R", "T")  # those of the contract, and the rows and slots of gather_slots
DTYPES = ("bool", "float16", "bfloat16", "int32", "float32", "int64")
SM = re.compile(r"sm\d{2,3}")
BEFORE_DEVICE_GRAPHS = 2  # the format of engines without device graphs
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
    peak_memory: int = 0  # memory of the build in bytes; 0 if unknown
    narrower_launches: tuple[int, ...] = ()  # of the other profiles
    key: str = ""  # hash of everything that affects the engine
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by type, read from the engine; empty if it cannot be


@dataclass(frozen=True)
class Reduction:
    """How a step's logits are reduced on the device: candidates per beam, and the searches that it serves."""

    candidates: int
    serves: str


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
    engines: dict[str, EngineEntry]  # encoder, decoder_step, and device graphs (contract.DEVICE_GRAPHS)
    reductions: dict[str, Reduction]  # by engine, or "logits"; a search takes the first that serves it
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
        values = read_object(path)
        if values.get("format") == BEFORE_DEVICE_GRAPHS:
            command = rebuild_of_older(path, values)
            raise BundleError(
                f"{path} is of format {BEFORE_DEVICE_GRAPHS}, of engines that can only output all logits, expected "
                f"{FORMAT}; build them again with: {command}"
            )
        passport = passport_from_dict(values)
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); {repair}") from error
    except ValueError as error:
        raise BundleError(f"{path} cannot be used ({' '.join(str(error).split())}); {repair}") from error
    expected = (*GRAPHS, *DEVICE_GRAPHS[passport.cache_form])
    if set(passport.engines) != set(expected):
        command = command_of_passport(path.parents[2], passport, passport.targets)
        raise BundleError(
            f"{path} describes {', '.join(passport.engines) or 'nothing'}, expected {', '.join(expected)}; "
            f"rebuild with: {command} --force"
        )
    return passport


def rebuild_of_older(path: Path, values: dict[str, Any]) -> str:
    """The command that rebuilds engines of the old format."""
    passport = passport_from_dict({**values, "format": FORMAT, "engines": {}, "reductions": {}})
    command = command_of_passport(path.parents[2], passport, passport.targets)
    return f"{command} --name {shlex.quote(path.parent.name)} --force"


def passport_from_dict(values: dict[str, Any]) -> Passport:
    """From parsed JSON; a ValueError lists everything that is wrong with it."""
    if values.get("format") != FORMAT:
        raise ValueError(f"format {shortened(values.get('format'))}, this version reads {FORMAT}")
    if missing := [field.name for field in dataclasses.fields(Passport) if field.name not in values]:
        raise ValueError(f"missing {', '.join(missing)}")
    passport = typed_from_json(Passport, values)
    if problems := problems_with(passport):
        raise ValueError("; ".join(problems))
    return passport


def problems_with(passport: Passport) -> list[str]:
    """Problems of fields whose types are right."""
    found = []
    for what, value, known in (
        ("flavour", passport.flavour, FLAVOURS),
        ("precision", passport.precision, PRECISIONS),
        ("cache form", passport.cache_form, CACHE_FORMS),
    ):
        if value not in known:
            found.append(f"{what} {shortened(value)}, expected one of {', '.join(known)}")
    found += [f"target {shortened(name)}, expected such as sm89" for name in passport.targets if not SM.fullmatch(name)]
    for ranges in passport.profiles:
        for name in FLAGS:
            one: Range = getattr(ranges, name)
            if not 1 <= one.min <= one.opt <= one.max <= LARGEST:
                found.append(f"{name} {one}, expected it to rise from 1 to at most {LARGEST}")
    if not 1 <= passport.slots <= LARGEST**2:
        found.append(f"slots {passport.slots}, expected 1 to {LARGEST**2}")
    for name in passport.reductions:
        if name != LOGITS and name not in passport.engines:
            found.append(f"reduction {shortened(name)} without its engine")
    for name, entry in passport.engines.items():
        found += problems_with_engine(name, entry)
    return found


def problems_with_engine(name: str, entry: EngineEntry) -> list[str]:
    found = []
    if problem_with_path(entry.file) or Path(entry.file).name != entry.file:
        found.append(f"the file of {name} is {shortened(entry.file)}, expected a file beside the passport")
    for tensor in (*entry.inputs, *entry.outputs):
        if tensor.dtype not in DTYPES:
            found.append(f"{shortened(tensor.name)} is of {shortened(tensor.dtype)}, expected {', '.join(DTYPES)}")
        sizes = [size for size in tensor.axes if isinstance(size, int)]
        if any(not 0 <= size <= LARGEST for size in [*sizes, *(size for shape in tensor.shapes for size in shape)]):
            found.append(f"{shortened(tensor.name)} has an axis beyond 0 to {LARGEST}")
        if unknown := [axis for axis in tensor.axes if isinstance(axis, str) and axis not in AXES]:
            found.append(f"{shortened(tensor.name)} has the axis {shortened(unknown[0])}, expected {', '.join(AXES)}")
    return found


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
