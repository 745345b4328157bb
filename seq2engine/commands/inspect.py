"""`seq2engine inspect`: what a bundle holds, in words, as JSON or as a page; and whether its files are intact."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.flags.shared import Commands, add_bundle, add_command

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle
    from seq2engine.export.engines.foreign_step import ForeignStep


def add_parser(commands: Commands) -> None:
    summary = "show what a bundle holds: graphs, precision census, engines, launches"
    add_inspect_flags(add_command(commands, "inspect", run_inspect, summary))


def add_inspect_flags(sub: argparse.ArgumentParser) -> None:
    add_bundle(sub)
    sub.add_argument(
        "--foreign-step",
        type=Path,
        metavar="ONNX",
        help="also build another exporter's decoder step for the first engine's GPU and ranges; count its kernels",
    )
    sub.add_argument(
        "--check",
        action="store_true",
        help="check the hash of every file of the manifest and the passports; exit code 1 if one is missing or changed",
    )
    sub.add_argument("--html", action="store_true", help="also write an HTML report and its JSON into BUNDLE/reports")
    sub.add_argument("--out", type=Path, help="folder or file of the HTML report")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")


def run_inspect(args: argparse.Namespace) -> int:
    from seq2engine.common.reports import report_files
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.files import file_problems
    from seq2engine.inspection.describe import bundle_text, bundle_values, check_text, check_values

    bundle = open_bundle(args.bundle)
    files = report_files(bundle.root, "inspect", out=args.out) if args.html or args.out is not None else None
    problems = file_problems(bundle, hashed=args.check)
    foreign = None if args.foreign_step is None else foreign_step(bundle, args.foreign_step)
    if files is not None:
        from seq2engine.inspection.page import inspect_html

        values = {**bundle_values(bundle, foreign), **({"check": check_values(bundle, problems)} if args.check else {})}
        page = inspect_html(bundle, problems, args.check, args.command_line, foreign)
        files.write(page, json.dumps(values, indent=2) + "\n")
    if args.check:
        print(json.dumps(check_values(bundle, problems), indent=2) if args.json else check_text(bundle, problems))
    else:
        print(json.dumps(bundle_values(bundle, foreign), indent=2) if args.json else bundle_text(bundle, foreign))
    if files is not None and not args.json:
        print(f"report: {files.page}")
    return 1 if args.check and problems else 0


def foreign_step(bundle: Bundle, onnx: Path) -> ForeignStep:
    from seq2engine.export.artifact.engines import listed_passports
    from seq2engine.export.engines.foreign_step import foreign_step_of

    return foreign_step_of(onnx, listed_passports(bundle), bundle.root)
