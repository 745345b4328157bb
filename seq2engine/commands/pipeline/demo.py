"""`seq2engine demo`: every stage on the shipped model, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from seq2engine.flags.shared import Commands, add_command, progress_for


def add_parser(commands: Commands) -> None:
    summary = "run the whole pipeline on small models, on this machine, without a GPU"
    sub = add_command(commands, "demo", run_demo, summary)
    sub.add_argument("--out", type=Path, default=Path("out/demo"), help="folder to write (default: %(default)s)")


def run_demo(args: argparse.Namespace) -> int:
    from seq2engine.commands.pipeline.demo_stages import demo

    print(demo(args.out, progress_for(args)))
    return 0
