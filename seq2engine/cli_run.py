"""`seq2engine run`: its flags, where its lines come from, and how its results are printed."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.errors import RequestError
from seq2engine.progress import Progress, ProgressPrinter, silent

if TYPE_CHECKING:
    from seq2engine.export.bundle import Bundle
    from seq2engine.runtime.lines import Line
    from seq2engine.runtime.search import SearchOptions
    from seq2engine.runtime.session import Session
    from seq2engine.runtime.translate import Coder, Translated

CHUNK = 1 << 16  # bytes read at once
LARGE = 1 << 14  # bytes of a file from which progress is shown
OWN = "(default: the model's own, else {})"  # of search flags: what a bundle's generation.json says comes first


def add_run_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("text", nargs="*", metavar="TEXT", help="decode these instead of standard input")
    sub.add_argument("--input", type=Path, help="file of lines in UTF-8 (default: standard input)")
    sub.add_argument("--ids", action="store_true", help="lines of token ids, in and out, where the bundle takes text")
    add_languages(sub)
    sub.add_argument("--batch", type=int, default=32, help="most lines decoded together (default: %(default)s)")
    sub.add_argument(
        "--truncate",
        action="store_true",
        help="cut lines that are too long; without, each is an error and an empty line",
    )
    sub.add_argument("--beam", type=int, help=f"beams; 1 is greedy {OWN.format(1)}")
    sub.add_argument(
        "--semantics",
        metavar="NAME",
        help=f"whose beam search: huggingface, fairseq, ctranslate2, marian {OWN.format('huggingface')}",
    )
    sub.add_argument("--length-penalty", type=float, help=f"power of the length {OWN.format(1.0)}")
    sub.add_argument(
        "--early-stopping", choices=("true", "false", "never"), help=f"as in Hugging Face {OWN.format('false')}"
    )
    sub.add_argument("--nbest", type=int, help=f"hypotheses of a line, one line each {OWN.format(1)}")
    sub.add_argument("--max-length", type=int, help=f"most output tokens {OWN.format('all it can')}")
    sub.add_argument("--min-length", type=int, help=f"fewest output tokens {OWN.format(0)}")
    sub.add_argument(
        "--no-repeat-ngram",
        type=int,
        metavar="N",
        help=f"say no N tokens in a row twice {OWN.format('0, which allows it')}",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object per line")
    sub.set_defaults(usage_error=sub.error)


def add_languages(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--from", dest="source_language", metavar="LANG", help="the text's language, as the model names it"
    )
    sub.add_argument("--to", dest="target_language", metavar="LANG", help="language to translate to")


def run_run(args: argparse.Namespace) -> int:
    """Decodes line by line; an empty line, or one that cannot be decoded, is an empty line of the output."""
    from seq2engine.export.bundle import open_bundle
    from seq2engine.runtime.session import open_session
    from seq2engine.runtime.translate import IdsTokenizer, translate_lines

    if args.text and args.input is not None:
        args.usage_error("give either TEXT or --input, not both")
    bundle = open_bundle(args.bundle)
    ids = args.ids or not bundle.takes_text
    tokenizer: Coder = IdsTokenizer() if ids else bundle.tokenizer()
    with (
        lines_from_args(args) as lines,
        open_session(bundle, args.backend, args.precision, args.threads, args.engine) as session,
    ):
        options = options_from_args(args, bundle, session, tokenizer)
        failed = False
        progress, size = progress_of_file(args)
        for translated in translate_lines(
            session, tokenizer, lines, options, args.batch, args.truncate, args.source_language
        ):
            if translated.error is not None:
                failed = True
                print(f"line {translated.line.number}: {translated.error}", file=sys.stderr)
            shown = json_of(translated, ids) if args.json else plain_of(translated, options.nbest)
            sys.stdout.buffer.write(f"{shown}\n".encode())  # UTF-8 whatever the terminal's settings, like the input
            sys.stdout.buffer.flush()
            progress("decode", translated.line.end / size)
    return 1 if failed else 0


def options_from_args(args: argparse.Namespace, bundle: Bundle, session: Session, tokenizer: Coder) -> SearchOptions:
    from seq2engine.export.bundle import GENERATION
    from seq2engine.runtime.search import options_from_values

    return options_from_values(
        bundle.generation(),
        session.limits.target,
        str(bundle.root / GENERATION),
        beam=args.beam,
        semantics=args.semantics,
        length_penalty=args.length_penalty,
        early_stopping={"true": True, "false": False}.get(args.early_stopping, args.early_stopping),
        nbest=args.nbest,
        max_length=args.max_length,
        min_length=args.min_length,
        no_repeat_ngram=args.no_repeat_ngram,
        forced_bos=None if args.target_language is None else tokenizer.language_id(args.target_language),
    )


@contextmanager
def lines_from_args(args: argparse.Namespace) -> Iterator[Iterator[Line]]:
    """The lines to decode; a file that cannot be opened is refused here, before anything is loaded."""
    from seq2engine.runtime.lines import line_from_bytes, lines_from_chunks

    if args.text:  # bytes of an argument that are no UTF-8 come as surrogates
        raw = (text.encode("utf-8", "surrogateescape") for text in args.text)
        yield (line_from_bytes(number, text) for number, text in enumerate(raw, start=1))
        return
    if args.input is None and sys.stdin is None:
        raise RequestError("standard input is closed; give TEXT or --input FILE")
    name = "standard input" if args.input is None else str(args.input)
    source = sys.stdin.fileno() if args.input is None else args.input
    try:
        # Without a buffer: a thread that waits in one holds its lock, and Python cannot end before it lets go.
        file = FileIO(source, "rb", closefd=args.input is not None)
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    with file:
        yield lines_from_chunks(chunks_from(file, name))


def chunks_from(file: FileIO, name: str) -> Iterator[bytes]:
    """What has arrived, at most a chunk of it, until the end."""
    try:
        while (chunk := file.read(CHUNK)) != b"":
            if chunk is None:  # somebody has set the input not to block, and nothing is there yet
                select.select([file], [], [])
            else:
                yield chunk
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error


def progress_of_file(args: argparse.Namespace) -> tuple[Progress, int]:
    """Who shows how far a large file is read, and its bytes. Nobody, where the bar would stand among the results."""
    size = os.path.getsize(args.input) if args.input is not None and not args.text else 0
    shown = size >= LARGE and not args.quiet and not sys.stdout.isatty()
    return (ProgressPrinter() if shown else silent), max(size, 1)


def plain_of(translated: Translated, nbest: int) -> str:
    """`nbest` lines, whatever was found and is in it, so that a reader can tell whose they are by counting."""
    texts = [re.sub(r"[\r\n]+", " ", output.text) for output in translated.outputs]
    return "\n".join(texts + [""] * (nbest - len(texts)))


def json_of(translated: Translated, ids: bool) -> str:
    values: dict[str, Any] = {"line": translated.line.number}
    if translated.error is not None:
        return json.dumps({**values, "error": translated.error}, ensure_ascii=False)
    if ids:
        values |= {"tokens": translated.source}
    else:
        values |= {"text": translated.line.text}
    values["hypotheses"] = [
        {**({} if ids else {"text": output.text}), "tokens": output.tokens, "score": output.score}
        for output in translated.outputs
    ]
    return json.dumps(values, ensure_ascii=False)
