"""`seq2engine export`: a checkpoint's ONNX graphs as a bundle, or more precisions for one that is there."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.export.contract import DEFAULT_PRECISIONS
from seq2engine.flags.lists import ListAction, add_precisions, is_precision
from seq2engine.flags.shared import Commands, add_command, add_json, print_note, progress_for

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle


def add_parser(commands: Commands) -> None:
    summary = "write a checkpoint's ONNX graphs as a bundle"
    sub = add_command(commands, "export", run_export, summary, renamed={"--cache": "--cache-form"})
    sub.add_argument(
        "checkpoint",
        help="checkpoint folder, anything that `import` reads, a model of the Hugging Face hub by hf:NAME[@REVISION], "
        "shipped:g2p, or random:PRESET[:SEED] for random weights",
    )
    sub.add_argument(
        "bundle", type=Path, nargs="?", help="folder to write; added to if it is a bundle of the same weights"
    )
    sub.add_argument(
        "--add",
        action=ListAction,
        fits=is_precision,
        metavar="PRECISION",
        help="add these to a bundle, from its own weights: export --add int8 BUNDLE",
    )
    add_precisions(sub, None, ",".join(DEFAULT_PRECISIONS))
    sub.add_argument(
        "--calibrate",
        type=Path,
        metavar="CORPUS",
        help="calibration: source lines, decoded to find the nodes that fp16 cannot hold and that stay in fp32 "
        "(default: random sources)",
    )
    sub.add_argument(
        "--cache-form",
        default="static",
        metavar="FORM",
        help="KV cache: static (written in place) or growing (default: %(default)s)",
    )
    sub.add_argument("--force", action="store_true", help="replace the graphs and weights of an existing bundle")
    add_json(sub)


def run_export(args: argparse.Namespace) -> int:
    if args.add is not None:
        return run_add(args)
    from seq2engine.exporting import export_checkpoint

    if args.bundle is None:
        args.usage_error("the following arguments are required: bundle")
    bundle = export_checkpoint(
        args.checkpoint,
        args.bundle,
        args.precision or list(DEFAULT_PRECISIONS),
        args.cache_form,
        args.force,
        progress_for(args),
        args.calibrate,
        partial(print_note, args),
    )
    print_bundle(args, bundle)
    return 0


def run_add(args: argparse.Namespace) -> int:
    """`export --add`: the positional argument is the bundle."""
    from seq2engine.exporting import add_precisions as added_precisions

    print_bundle(args, added_precisions(args.checkpoint, args.add, progress_for(args), args.calibrate))
    return 0


def print_bundle(args: argparse.Namespace, bundle: Bundle) -> None:
    from seq2engine.inspection.describe import bundle_text, bundle_values

    print(json.dumps(bundle_values(bundle), indent=2) if args.json else bundle_text(bundle))
