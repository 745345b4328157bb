"""The command line: parses, checks usage and calls one command. Heavy imports wait for their command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from seq2engine import __version__
from seq2engine.cli.exits import exit_code_of
from seq2engine.cli.summaries import SUMMARIES
from seq2engine.cli.usage import check_usage, check_usage_without_bundle
from seq2engine.errors import BundleError, missing_package
from seq2engine.flags.lists import Parser
from seq2engine.flags.shared import fetch_bundles

if TYPE_CHECKING:
    from seq2engine.flags.shared import Command

# Module of seq2engine.commands -> the commands that its `add_parser` adds; in the order of --help.
COMMANDS = {
    "pipeline.demo": ("demo",),
    "train": ("train",),
    "importing": ("import",),
    "export": ("export",),
    "build": ("build", "refit"),
    "plan": ("plan",),
    "package": ("package", "push"),
    "inspect": ("inspect",),
    "run": ("run",),
    "transcribe": ("transcribe",),
    "read": ("read",),
    "score": ("score",),
    "serving.serve": ("serve",),
    "serving.triton": ("triton",),
    "parity": ("parity",),
    "attention": ("attention",),
    "bench": ("bench",),
    "completion": ("completion",),
}
NEEDS_ALL_COMMANDS = "completion"  # needs the parsers of all commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; exits.py lists them."""
    return exit_code_of(lambda: run_command_line(argv))


def run_command_line(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    args.command_line = shlex.join(("seq2engine", *map(str, sys.argv[1:] if argv is None else argv)))  # for reports
    command: Command = args.command
    try:
        check_usage(args)
        fetch_bundles(args)
        return command(args)
    except BundleError:
        check_usage_without_bundle(args)  # wrong usage is reported before a missing bundle
        raise
    except ModuleNotFoundError as error:
        if missing := missing_package(error, args.command_name):
            raise missing from error
        raise


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments; texts and files of `run`, `transcribe` and `read` may come before, between and after flags.

    argparse reports those after a flag as unknown: it fills all positional arguments at the first words it finds.
    """
    words = sys.argv[1:] if argv is None else list(map(str, argv))
    parser = make_parser(modules_for(words))
    args, more = parser.parse_known_args(words)
    behind = more.index("--") if "--" in more else len(more)
    flags = [word for word in more[:behind] if word.startswith("-")]
    if flags or (more and not isinstance(getattr(args, "text", None), list)):
        args.usage_error(args.unrecognized(flags or more))
    if more:
        args.text = [*args.text, *more[:behind], *more[behind + 1 :]]
    return args


def modules_for(words: Sequence[str]) -> tuple[str, ...]:
    """The modules of the commands that are among the words, so that no other is imported."""
    named = tuple(module for module, commands in COMMANDS.items() if not set(commands).isdisjoint(words))
    return tuple(COMMANDS) if NEEDS_ALL_COMMANDS in named else named


def make_parser(modules: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """The parser with the commands of some modules; without modules, only names and summaries of all commands."""
    parser = Parser(
        prog="seq2engine",
        description="Encoder-decoder Transformers to ONNX and TensorRT: the same outputs, faster, with proof.",
    )
    parser.add_argument("--version", action="version", version=f"seq2engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in modules or COMMANDS:
        names = COMMANDS[module]
        if modules or not SUMMARIES.keys() >= {*names}:
            import_module(f"seq2engine.commands.{module}").add_parser(commands)
            continue
        for name in names:  # --help, --version or a command that does not exist: no command is imported
            commands.add_parser(name, help=SUMMARIES[name])
    return parser
