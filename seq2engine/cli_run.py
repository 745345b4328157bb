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
    sub.add_argument("--length-penalty", type=float, help=f"as in Hugging Face {OWN.format(1.0)}")
    sub.add_argument("--early-stopping", choices=("true", "false", "never"), help=OWN.format("false"))
    sub.add_argument("--nbest", type=int, help=f"hypotheses of a line, one line each {OWN.format(1)}")
    sub.add_argument("--max-length", type=int, help=f"most output tokens {OWN.format('all it can')}")
    sub.add_argument("--min-length", type=int, help=f"fewest output tokens {OWN.format(0)}")
    add_rules(sub)
    add_sampling(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object per line")
    sub.set_defaults(usage_error=sub.error)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """What may be said. Tokens are given as ids, as `run --json` shows them; only a prefix is text like the lines."""
    rules = parser.add_argument_group("what may be said (IDS: token ids such as 17 or '17 4 250')")
    rules.add_argument("--prefix", metavar="TEXT", help="every output begins with this (ids, where the lines are ids)")
    rules.add_argument(
        "--banned",
        type=token_ids,
        action="append",
        metavar="IDS",
        help="never say this token, or these in a row; may be given again, adds to the model's own",
    )
    rules.add_argument("--first-banned", type=token_ids, metavar="IDS", help="tokens that may not come first")
    rules.add_argument("--allowed", type=token_ids, metavar="IDS", help="say only these tokens and the end token")
    rules.add_argument("--forced-bos", type=int, metavar="ID", help=f"first token {OWN.format('any')}")
    rules.add_argument("--forced-eos", type=int, metavar="ID", help=f"last token at the maximum {OWN.format('any')}")
    rules.add_argument(
        "--start", type=int, metavar="ID", help="what the decoder is fed first (default: its own)"
    )
    never = OWN.format("0, which allows it")
    rules.add_argument("--no-repeat-ngram", type=int, metavar="N", help=f"say no N tokens in a row twice {never}")
    rules.add_argument("--source-no-repeat-ngram", type=int, metavar="N", help=f"nor N in a row of the source {never}")
    rules.add_argument("--repetition-penalty", type=float, help=f"on tokens that were said before {OWN.format(1.0)}")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sample", action="store_true", default=None, help="draw tokens; --nbest counts samples")
    sampling.add_argument("--temperature", type=float, help="below 1 bolder for the likely, above for the rest")
    sampling.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens (default: all)")
    sampling.add_argument("--top-p", type=float, metavar="P", help="draw from as few tokens as make up P (default: 1)")
    sampling.add_argument("--seed", type=int, help="the same seed says the same again (default: another every time)")


def token_ids(text: str) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}, expected token ids such as 17 or '17 4 250'")
    return tuple(map(int, words))


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
    if args.target_language is not None and args.forced_bos is not None:
        args.usage_error("give either --to or --forced-bos, not both: a language is a first token")
    bundle = open_bundle(args.bundle)
    ids = args.ids or not bundle.takes_text
    tokenizer: Coder = IdsTokenizer() if ids else bundle.tokenizer()
    with (
        lines_from_args(args) as lines,
        open_session(bundle, args.backend, args.precision, args.threads, args.engine) as session,
    ):
        options = options_from_args(args, bundle, session, tokenizer)
        failed = False
        progress, size = progress_of_file(args.input, args.quiet)
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

    own = bundle.generation()
    forced_bos = args.forced_bos if args.target_language is None else tokenizer.language_id(args.target_language)
    return options_from_values(
        own,
        session.limits.target,
        str(bundle.root / GENERATION),
        beam=args.beam,
        length_penalty=args.length_penalty,
        early_stopping={"true": True, "false": False}.get(args.early_stopping, args.early_stopping),
        nbest=args.nbest,
        max_length=args.max_length,
        min_length=args.min_length,
        start=args.start,
        forced_bos=forced_bos,
        forced_eos=args.forced_eos,
        prefix=prefix_from_args(args, tokenizer, session, own.get("forced_bos") if forced_bos is None else forced_bos),
        banned=None if args.banned is None else (*map(tuple, own.get("banned", ())), *args.banned),
        first_banned=args.first_banned,
        allowed=args.allowed,
        no_repeat_ngram=args.no_repeat_ngram,
        source_no_repeat_ngram=args.source_no_repeat_ngram,
        repetition_penalty=args.repetition_penalty,
        sample=args.sample,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )


def prefix_from_args(
    args: argparse.Namespace, tokenizer: Coder, session: Session, forced_bos: int | None
) -> tuple[int, ...] | None:
    """Ids are taken at their word; text stands behind the token that begins every output, and the output goes on."""
    from seq2engine.runtime.translate import IdsTokenizer

    if args.prefix is None:
        return None
    ids = tokenizer.encode_target(args.prefix)
    if isinstance(tokenizer, IdsTokenizer):
        return tuple(ids)
    while ids and ids[-1] == session.config.end_id:
        ids.pop()
    return (*(() if forced_bos is None else (forced_bos,)), *ids)


@contextmanager
def lines_from_args(args: argparse.Namespace) -> Iterator[Iterator[Line]]:
    """The lines to decode; a file that cannot be opened is refused here, before anything is loaded."""
    from seq2engine.runtime.lines import line_from_bytes

    if args.text:  # bytes of an argument that are no UTF-8 come as surrogates
        raw = (text.encode("utf-8", "surrogateescape") for text in args.text)
        yield (line_from_bytes(number, text) for number, text in enumerate(raw, start=1))
        return
    with lines_from_input(args.input, instead="TEXT or --input FILE") as lines:
        yield lines


@contextmanager
def lines_from_input(path: Path | None, instead: str) -> Iterator[Iterator[Line]]:
    """The lines of a file, or of standard input (None); `instead` is what to give where that is closed."""
    from seq2engine.runtime.lines import lines_from_chunks

    if path is None and sys.stdin is None:
        raise RequestError(f"standard input is closed; give {instead}")
    name = "standard input" if path is None else str(path)
    source = sys.stdin.fileno() if path is None else path
    try:
        # Without a buffer: a thread that waits in one holds its lock, and Python cannot end before it lets go.
        file = FileIO(source, "rb", closefd=path is not None)
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


def progress_of_file(path: Path | None, quiet: bool) -> tuple[Progress, int]:
    """Who shows how far a large file is read, and its bytes. Nobody, where the bar would stand among the results."""
    size = 0 if path is None else os.path.getsize(path)
    shown = size >= LARGE and not quiet and not sys.stdout.isatty()
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
