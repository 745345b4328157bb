"""What commands share: how one is added to the command line, and the flags that several of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.common.progress import Progress, ProgressPrinter, silent
from seq2engine.flags.lists import MOST_PRECISE, Parser, add_precisions

Command = Callable[[argparse.Namespace], int]
NO_FLAGS: Mapping[str, str] = {}

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]
else:
    Commands = argparse._SubParsersAction  # what `add_parser` of a command gets; generic for type checkers only


def add_command(
    commands: Commands, name: str, run: Command, summary: str, renamed: Mapping[str, str] = NO_FLAGS
) -> Parser:
    """A command's own parser. `renamed` are flags it had before, with what they are called now."""
    sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    sub.set_defaults(command=run, command_name=name, usage_error=sub.error, usage=sub.format_usage)
    sub.add_argument("--quiet", action="store_true", help="show no progress")
    sub.renamed = renamed
    return sub


def add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="bundle folder")


def add_backend(parser: argparse.ArgumentParser, several: bool = False) -> None:
    parser.add_argument(
        "--backend", default="onnxruntime", help="torch, onnxruntime or tensorrt (default: %(default)s)"
    )
    if several:
        add_precisions(parser, None, MOST_PRECISE)
    else:
        auto = "auto: the fastest of fp32, fp16 and w8a8 on this machine, by timing short decodes"
        parser.add_argument("--precision", help=f"one of the bundle's, or {auto} (default: {MOST_PRECISE})")
    parser.add_argument("--threads", type=int, help="CPU threads (default: the backend's own choice)")
    parser.add_argument("--engine", help="which engine, where a bundle holds several of a precision")
    parser.add_argument(
        "--deterministic", action="store_true", help="bitwise batch-invariant; adds padding (onnxruntime)"
    )
    add_provider(parser)


def add_draft(parser: argparse.ArgumentParser) -> None:
    what = "speculative decoding of single sources with one beam: a cheaper precision that drafts tokens; same output"
    parser.add_argument("--draft", metavar="PRECISION", help=what)


def add_provider(parser: argparse.ArgumentParser) -> None:
    where = "where onnxruntime computes: cpu, cuda, tensorrt or nv_tensorrt_rtx (default: cpu)"
    parser.add_argument("--provider", help=where)


def add_references(parser: argparse.ArgumentParser, what: str) -> None:
    help_text = f"lines of source<TAB>right output, or shipped:g2p for that model's test split: {what}"
    parser.add_argument("--references", metavar="TSV", help=help_text)


def references_from_args(args: argparse.Namespace) -> dict[str, list[str]] | None:
    from seq2engine.model.shipped import TEST_SPLIT, shipped_checkpoint
    from seq2engine.runtime.quality.metrics import references_from_file

    if args.references is None:
        return None
    scheme, _, name = args.references.partition(":")
    path = shipped_checkpoint(name) / TEST_SPLIT if scheme == "shipped" else Path(args.references)
    return references_from_file(path, args.count)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def progress_for(args: argparse.Namespace) -> Progress:
    return silent if args.quiet else ProgressPrinter()
