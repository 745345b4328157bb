"""`seq2engine build` and `refit`: engines of a bundle, from its graphs, or from an engine of other weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.errors import BuildError
from seq2engine.flags.lists import MOST_PRECISE, ListAction, is_gpu, is_range
from seq2engine.flags.precision import print_default_precision
from seq2engine.flags.shared import Commands, add_bundle, add_command, progress_for

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle
    from seq2engine.export.artifact.passport import Passport
    from seq2engine.export.artifact.profiles import ShapeRanges

RANGES = {  # option -> field of ShapeRanges, and what it counts
    "batch": ("batch", "sources"),
    "beam": ("beam", "beams"),
    "source_length": ("source", "source tokens"),
    "max_length": ("target", "output tokens"),
}


OLD_RANGES = {"--source": "--source-length", "--length": "--max-length"}


def add_parser(commands: Commands) -> None:
    renamed = {**OLD_RANGES, "--target": "--gpu", "--cache": "--engine-cache", "--no-cache": "--no-engine-cache"}
    add_build_flags(add_command(commands, "build", run_build, "build TensorRT engines of a bundle", renamed))
    summary = "make the engines of a bundle from those of another by swapping the weights"
    add_refit_flags(add_command(commands, "refit", run_refit, summary))


def add_build_flags(sub: argparse.ArgumentParser) -> None:
    add_bundle(sub)
    sub.add_argument("--precision", help=f"which graphs to build (default: {MOST_PRECISE} by every GPU)")
    add_gpus(sub, "GPUs by compute capability, such as sm89,sm120")
    for name, (_, what) in RANGES.items():
        sub.add_argument(
            f"--{name.replace('_', '-')}",
            action=ListAction,
            fits=is_range,
            metavar="RANGE",
            help=f"{what}: one number, or min:opt:max; several for several profiles",
        )
    sub.add_argument("--slots", type=int, help="slots of a static cache (default: enough for every request)")
    sub.add_argument("--flavour", help="tensorrt or tensorrt_rtx (default: the one installed)")
    sub.add_argument("--workspace", metavar="SIZE", help="maximum scratch memory of a kernel, such as 512M")
    sub.add_argument("--weight-streaming", action="store_true", help="weight streaming: weights stay on the host")
    sub.add_argument("--refit", action="store_true", help="let weights be swapped by `refit` (tensorrt only)")
    sub.add_argument("--name", help="folder name of the engine (default: from its precision, beams and key)")
    sub.add_argument("--force", action="store_true", help="replace the engine of that --name")
    sub.add_argument("--rebuild", action="store_true", help="build even if the same engine was built before")
    sub.add_argument(
        "--engine-cache",
        type=Path,
        metavar="DIR",
        help="folder of the engine cache (default: ~/.cache/seq2engine/engines)",
    )
    sub.add_argument("--no-engine-cache", action="store_true", help="do not use the engine cache")
    sub.add_argument("--jobs", type=int, default=1, metavar="N", help="graphs built in parallel (default: %(default)s)")
    sub.add_argument("--json", action="store_true", help="print the passport as JSON; a list for several engines")


def add_gpus(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--gpu", action=ListAction, fits=is_gpu, default=[], metavar="SM", help=what)


def run_build(args: argparse.Namespace) -> int:
    """Builds one engine pair, or one per group of targets that cannot share an engine."""
    from seq2engine.common.tensorrt_module import load_tensorrt
    from seq2engine.export.artifact.build_flags import BuildFlags, bytes_from_text
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.engines.build_options import BuildOptions
    from seq2engine.export.engines.targets import check_targets, target_groups
    from seq2engine.export.engines.to_engine import engines_from_onnx, name_of
    from seq2engine.inspection.describe import engine_text

    bundle = open_bundle(args.bundle)
    workspace = None if args.workspace is None else bytes_from_text(args.workspace)
    flags = BuildFlags(args.weight_streaming, args.refit, workspace)
    trt = load_tensorrt(args.flavour)
    precision = build_precision(args, bundle, trt)
    first, *narrower = profiles_from_args(args, bundle, precision)
    check_targets(trt, args.gpu, precision, bundle.root)  # all, before the first build
    print_default_precision(args, bundle, precision, "every GPU runs")
    passports: list[Passport] = []
    groups = target_groups(args.gpu)
    names = [name_of_group(args.name, targets, len(groups)) for targets in groups]
    for targets, name in zip(groups, names, strict=True):
        options = BuildOptions(
            flavour=args.flavour,
            slots=args.slots,
            narrower=tuple(narrower),
            flags=flags,
            name=name,
            force=args.force,
            cache=None if args.no_engine_cache else args.engine_cache or default_cache(),
            rebuild=args.rebuild,
            workers=args.jobs,
        )
        passports.append(engines_from_onnx(bundle, targets, first, precision, options, progress_for(args)))
    if args.json:
        values = [json.loads(passport.to_json()) for passport in passports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
    else:
        folders = [name or name_of(passport) for name, passport in zip(names, passports, strict=True)]
        texts = [engine_text(passport, bundle.config) for passport in passports]
        print("\n\n".join(f"engines/{folder}\n{text}" for folder, text in zip(folders, texts, strict=True)))
    return 0


def name_of_group(name: str | None, targets: Sequence[str], groups: int) -> str | None:
    """The given name; with the targets appended where they need engines of their own."""
    return name if name is None or groups == 1 else "-".join((name, *targets))


def build_precision(args: argparse.Namespace, bundle: Bundle, trt: Any) -> str:
    """What is built: the precision that was named, else the most precise that every target runs."""
    from seq2engine.export.artifact.default_precision import precision_to_build

    if args.precision is not None:
        bundle.require(args.precision)
        return str(args.precision)
    return precision_to_build(bundle, args.gpu, hasattr(trt, "ComputeCapability"))


def add_refit_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("bundle", type=Path, help="bundle with the new weights")
    sub.add_argument("source", type=Path, help="bundle of the same architecture that has an engine built with --refit")
    sub.add_argument("--engine", help="which engine, if there are several")
    sub.add_argument("--force", action="store_true", help="replace existing engines")
    sub.add_argument("--json", action="store_true", help="print the passport as JSON")


def run_refit(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.engines.refit import refit_engines
    from seq2engine.inspection.describe import engine_text

    bundle = open_bundle(args.bundle)
    passport = refit_engines(bundle, args.source, args.engine, args.force, progress_for(args))
    print(passport.to_json().rstrip() if args.json else engine_text(passport, bundle.config))
    return 0


def profiles_from_args(args: argparse.Namespace, bundle: Bundle, precision: str) -> list[ShapeRanges]:
    """The profiles from the flags: a flag with one range applies to all profiles, one with several has one for each."""
    from seq2engine.export.artifact.profiles import range_from_text
    from seq2engine.export.engines.to_engine import default_ranges

    given = {flag: texts for flag in RANGES if (texts := getattr(args, flag)) is not None}
    count = max((len(texts) for texts in given.values()), default=1)
    if wrong := {flag: len(texts) for flag, texts in given.items() if len(texts) not in (1, count)}:
        listed = ", ".join(f"{number} of --{flag.replace('_', '-')}" for flag, number in wrong.items())
        raise BuildError(f"{count} profiles need one range or {count} of every option, not {listed}")
    return [
        dataclasses.replace(
            default_ranges(bundle.config, precision, bundle.cache_form),
            **{
                RANGES[flag][0]: range_from_text(texts[number % len(texts)], flag.replace("_", "-"))
                for flag, texts in given.items()
            },
        )
        for number in range(count)
    ]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seq2engine" / "engines"
