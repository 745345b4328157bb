"""Which engine of a bundle to open, and all checks that are possible before it is deserialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.engines import engine_names, is_current, open_passport
from seq2engine.export.artifact.passport import PASSPORT, Passport, build_command, command_of_passport
from seq2engine.export.artifact.profiles import Range, Workload
from seq2engine.export.contract import GRAPHS

if TYPE_CHECKING:  # choosing an engine does not import torch
    from .device import Device

EXAMPLE_TARGET = "sm89"
PORTABLE_FROM = 80  # a TensorRT-RTX engine built for no target in particular runs from this compute capability on


@dataclass(frozen=True)
class Opening:
    """An engine that can be opened here, and what with."""

    trt: Any
    device: Device
    folder: Path
    passport: Passport


def choose_engine(
    bundle: Bundle,
    precision: str,
    engine: str | None = None,
    workload: Workload | None = None,
    runs_here: Callable[[Passport], bool] = lambda passport: True,
) -> tuple[Path, Passport]:
    """The folder and passport of the named engine, or of the one in this precision that suits a workload best.

    An engine that is stale, does not run here or does not take the workload is chosen only if all are; opening it
    then names the problem.
    """
    bundle.require(precision)
    names = engine_names(bundle)
    if engine is not None:
        if engine not in names:
            known = f"only {', '.join(names)}" if names else "none"
            raise SessionError(
                f"{bundle.root} has no engine {engine!r}, {known}; "
                f"build one with: {build_command(bundle.root, precision, [EXAMPLE_TARGET])}"
            )
        folder, passport = open_passport(bundle, engine)
        if passport.precision != precision:
            raise SessionError(
                f"engine {engine} of {bundle.root} is {passport.precision}, not {precision}; "
                f"ask for it with: --precision {passport.precision}"
            )
        return folder, passport
    fitting = [opened for opened in (open_passport(bundle, name) for name in names) if opened[1].precision == precision]
    if not fitting:
        raise SessionError(
            f"no {precision} engine in {bundle.root}; "
            f"build one with: {build_command(bundle.root, precision, [EXAMPLE_TARGET])}"
        )
    wanted = workload or Workload()
    for demand in (lambda passport: is_current(bundle, passport), runs_here):
        fitting = [one for one in fitting if demand(one[1])] or fitting
    taking = [one for one in fitting if takes(one[1], wanted)]
    if not taking:
        taking, wanted = fitting, Workload()
    return min(taking, key=lambda one: (*wanted.spare(one[1].ranges), one[0].name))


def takes(passport: Passport, workload: Workload) -> bool:
    """Whether an engine takes a workload. Fewer beams than it has are padded, but not in a growing cache, which would
    keep the padding."""
    padded = passport.cache_form == "static" or workload.beam is None or workload.beam >= passport.ranges.beam.min
    return padded and workload.fits(passport.ranges)


def check_files(bundle: Bundle, folder: Path, passport: Passport) -> None:
    """Refuses engine files that are not those of the passport, and a passport that is not of this bundle's graphs."""
    for name, entry in passport.engines.items():
        path = folder / entry.file
        if path.resolve().parent != folder.resolve():
            raise SessionError(
                f"{folder / PASSPORT} names {entry.file}, expected a file beside it; {fix(folder, passport)}"
            )
        if not path.is_file():
            raise SessionError(f"{path} is missing, though its passport lists it; {fix(folder, passport)}")
        if (size := path.stat().st_size) != entry.bytes:
            raise SessionError(
                f"{path} has {size} bytes, its passport has {entry.bytes}; copy it again, or {fix(folder, passport)}"
            )
        if sha256_of(path) != entry.sha256:
            raise SessionError(
                f"{path} is not the file its passport describes (its hash differs); "
                f"copy it again, or {fix(folder, passport)}"
            )
        if name in GRAPHS and entry.onnx_fingerprint != bundle.graph(passport.precision, name).fingerprint:
            raise SessionError(
                f"{path} is stale: it was built from another {name} graph than the bundle now holds; "
                f"{fix(folder, passport)}"
            )


def check_machine(folder: Path, passport: Passport, trt: Any, device: Device) -> None:
    """Refuses an engine that this TensorRT or this GPU cannot run: engines do not carry over between versions."""
    if trt.__version__ != passport.version:
        raise SessionError(
            f"engine {folder.name} was built with {passport.flavour} {passport.version}, "
            f"installed is {trt.__version__}; {fix(folder, passport)}"
        )
    if not runs_on(passport, device):
        targets = passport.device or ", ".join(passport.targets) or f"sm{PORTABLE_FROM} and later"
        command = rebuild_command(folder, passport, [] if passport.device else [device.capability])
        command += " --force" if passport.device else ""  # it would have the name of the one that is there
        raise SessionError(
            f"engine {folder.name} was built for {targets}, this GPU is {device.capability} ({device.name}); "
            f"build one for it with: {command}"
        )


def runs_on(passport: Passport, device: Device) -> bool:
    if passport.targets:
        return device.capability in passport.targets
    if passport.flavour == "tensorrt":  # built for the GPU of its machine, if its name is known
        return passport.device in ("", device.name)
    return int(device.capability.removeprefix("sm")) >= PORTABLE_FROM


def fix(folder: Path, passport: Passport, **changed: Range | int) -> str:
    """The command that rebuilds this engine, with the given ranges or slots instead of its own."""
    return f"rebuild with: {rebuild_command(folder, passport, passport.targets, **changed)} --force"


def larger_build(folder: Path, passport: Passport, wanted: Mapping[str, int]) -> str:
    """The same ranges, extended to this many beams or target tokens. A fixed number of beams stays fixed."""
    changed: dict[str, Range | int] = {}
    for name, size in wanted.items():
        now: Range = getattr(passport.ranges, name)
        fixed = name == "beam" and now.fixed and passport.cache_form == "static"
        changed[name] = Range(size, size, size) if fixed else Range(now.min, now.opt, max(now.max, size))
    return fix(folder, passport, **changed)


def rebuild_command(folder: Path, passport: Passport, targets: Sequence[str], **changed: Range | int) -> str:
    return command_of_passport(folder.parents[1], passport, targets, **changed)
