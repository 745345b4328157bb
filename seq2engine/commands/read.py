"""`seq2engine read`: pictures of text in; text or JSON out."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from seq2engine.commands.run import check_prefixes, hypotheses_of, loaded, plain_of, print_precision
from seq2engine.common.progress import silent
from seq2engine.common.terminal import fresh_line
from seq2engine.flags.precision import print_default_precision
from seq2engine.flags.search import add_output_flags, add_search_flags, options_from_args, prefixes_from_args
from seq2engine.flags.shared import Commands, add_backend, add_bundle, add_command, add_draft, progress_for

if TYPE_CHECKING:
    from seq2engine.runtime.images.reader import Reading

FORMATS = ("txt", "json")


def add_parser(commands: Commands) -> None:
    summary = "read text in pictures: image files to lines of text, or JSON"
    sub = add_command(commands, "read", run_read, summary)
    add_bundle(sub)
    sub.add_argument(
        "text",
        nargs="*",
        metavar="IMAGE",
        help="png, jpeg, tiff, bmp, webp, gif or ppm files, one line of text in each",
    )
    add_backend(sub)
    add_draft(sub, default="auto")
    sub.add_argument("--format", choices=FORMATS, help="txt or json (default: txt, a line for every file)")
    sub.add_argument("--json", action="store_true", help="the same as --format json: one object for every file")
    sub.add_argument("--batch", type=int, default=8, help="maximum files decoded together (default: %(default)s)")
    add_search_flags(sub)
    add_output_flags(
        sub, "position-output pairs after each output, from cross-attention: where in the image a token is"
    )
    sub.set_defaults(ids=False, remeasure=False, target_language=None)


def run_read(args: argparse.Namespace) -> int:
    """Prints the text of every file in their order; a file that cannot be read is reported and is an empty line."""
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.model.images import read_images

    if not args.text:
        args.usage_error("give at least one image file")
    if args.json and args.format not in (None, "json"):
        args.usage_error(f"give either --json or --format {args.format}, not both")
    args.json = args.json or args.format == "json"
    bundle = open_bundle(args.bundle)
    read_images(bundle.root, bundle.config)  # refused before a session is opened
    with loaded(args, bundle) as model:
        print_precision(args, model)
        options = options_from_args(args, model)
        prefixes = prefixes_from_args(args, model, options.forced_bos)
        if prefixes is not None:
            check_prefixes(args, len(prefixes), len(args.text))
        print_default_precision(args, bundle, model.session.precision, f"{args.backend} runs")
        failed = False
        progress = progress_for(args) if len(args.text) > args.batch else silent
        for reading in model.read_iter(args.text, options, batch=args.batch, prefixes=prefixes, progress=progress):
            if reading.error is not None:
                failed = True
                print(f"{fresh_line(sys.stderr)}{named(reading)}", file=sys.stderr)
            sys.stderr.write(fresh_line(sys.stderr) if sys.stdout.isatty() else "")
            shown = (
                json_of(reading, not model.takes_text) if args.json else plain_of(reading, options.nbest, args.scores)
            )
            sys.stdout.buffer.write(f"{shown}\n".encode())
            sys.stdout.buffer.flush()
    return 1 if failed else 0


def named(reading: Reading) -> str:
    """The error, with the file's name once."""
    assert reading.error is not None
    return reading.error if reading.name in reading.error else f"{reading.name}: {reading.error}"


def json_of(reading: Reading, ids: bool) -> str:
    if reading.error is not None:
        return json.dumps({"file": reading.name, "error": reading.error}, ensure_ascii=False)
    values = {"file": reading.name, "hypotheses": hypotheses_of(reading, ids)}
    return json.dumps(values, ensure_ascii=False)
