"""What commands share: how one is added to the command line, and the flags that several of them have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.common.progress import Progress, ProgressPrinter, silent
from seq2engine.flags.lists import MOST_PRECISE, Parser, add_precisions

Command = Callable[[argparse.Namespace], int]
MOST_GIGABYTES = 1e6
NO_FLAGS: Mapping[str, str] = {}
BACKENDS = ("torch", "onnxruntime", "tensorrt")  # as in runtime/backends.py, which `--help` does not import
BUNDLE_HELP = "bundle folder, or hf:NAME[@REVISION] on the Hugging Face hub"

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]
else:
    Commands = argparse._SubParsersAction  # what `add_parser` of a command gets; generic for type checkers only


def add_command(
    commands: Commands, name: str, run: Command, summary: str, renamed: Mapping[str, str] = NO_FLAGS
) -> Parser:
    """A command's own parser. `renamed` are flags it had before, with what they are called now."""
    sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    sub.set_defaults(command=run, command_name=name, usage_error=sub.error, unrecognized=sub.unrecognized)
    sub.add_argument("--quiet", action="store_true", help="show no progress")
    sub.renamed = renamed
    return sub


def add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help=BUNDLE_HELP)


def fetch_bundles(args: argparse.Namespace) -> None:
    """Downloads a bundle given as hf:NAME and replaces the name by its folder, so that the download shows progress.

    A command that writes a new bundle is refused: it takes a folder.
    """
    given: Any = getattr(args, "bundle", None)
    listed: list[Any] = given if isinstance(given, list) else [given]
    if not any(str(name).startswith("hf:") for name in listed):
        return
    if args.command_name == "export" and args.add is None:
        args.usage_error(f"{given} is on the hub, expected a folder to write; then: seq2engine push FOLDER {given}")
    from seq2engine.export.artifact.from_hub import bundle_folder_from_hub

    progress = progress_for(args)
    note = partial(print_note, args)
    found = [bundle_folder_from_hub(one, progress, note) if str(one).startswith("hf:") else one for one in listed]
    args.bundle = found if isinstance(given, list) else found[0]
    if not isinstance(given, list):
        args.hub_bundle = f"{str(given).partition('@')[0]}@{found[0].name}"  # the exact commit, for other machines


def print_note(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(f"note: {text}", file=sys.stderr)


def add_backend(parser: argparse.ArgumentParser, several: bool = False, auto: bool = True) -> None:
    """Flags of a session. With `several` precisions, or without `auto`, none is chosen by timing."""
    parser.add_argument(
        "--backend", default="onnxruntime", help="torch, onnxruntime or tensorrt (default: %(default)s)"
    )
    if several:
        add_precisions(parser, None, MOST_PRECISE)
    else:
        fastest = ", or auto: the fastest of fp32, fp16 and w8a8 on this machine, by timing short decodes"
        parser.add_argument(
            "--precision", help=f"one of the bundle's{fastest if auto else ''} (default: {MOST_PRECISE})"
        )
    add_threads(parser)
    parser.add_argument("--engine", help="which engine, if the bundle has several of a precision")
    parser.add_argument(
        "--deterministic", action="store_true", help="bitwise batch-invariant; adds padding (onnxruntime)"
    )
    add_provider(parser)


def backend_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of `add_backend` as arguments of `load`."""
    names = ("backend", "precision", "threads", "engine", "deterministic", "provider")
    return {name: getattr(args, name) for name in names}


def add_draft(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    what = (
        "draft for speculative decoding (single sources, one beam): quantised (fp32's own weights in 8 and 4 bits) or "
        "a cheaper precision of the bundle; outputs do not change"
    )
    if default is not None:
        what += "; auto: quantised for fp32 while it is faster; none: off"
    what += f" (default: {default or 'none'})"
    parser.add_argument("--draft", metavar="DRAFT", default=default, type=draft_from_text, help=what)


def add_threads(
    parser: argparse.ArgumentParser, auto: str = "chosen by the backend from the cores and the model's size"
) -> None:
    parser.add_argument(
        "--threads", type=threads_from_text, metavar="N", help=f"CPU threads, or auto: {auto} (default)"
    )


def threads_from_text(text: str) -> int | None:
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number or auto")
    return None if text == "auto" else int(text)


def draft_from_text(text: str) -> str | None:
    return None if text == "none" else text.replace("quantized", "quantised")


def add_provider(parser: argparse.ArgumentParser) -> None:
    where = "where onnxruntime computes: cpu, cuda, tensorrt or nv_tensorrt_rtx (default: cpu)"
    parser.add_argument("--provider", help=where)


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory", type=gigabytes_from_text, metavar="GB", help="free memory of each GPU (default: enough)"
    )


def gigabytes_from_text(text: str) -> int:
    """In bytes."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < MOST_GIGABYTES:
        raise argparse.ArgumentTypeError(f"{text!r}, expected gigabytes, such as 24")
    return int(size * 1e9)


def add_references(parser: argparse.ArgumentParser, what: str) -> None:
    help_text = f"lines of source<TAB>reference, or shipped:g2p for that model's test split: {what}"
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
