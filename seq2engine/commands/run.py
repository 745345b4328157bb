"""`seq2engine run`: its flags, where its lines come from, and how its results are printed."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.common.progress import Progress, ProgressPrinter, silent
from seq2engine.errors import RequestError
from seq2engine.flags.cluster import add_cluster_flags, check_cluster_flags, job_of, uses_gpu
from seq2engine.flags.languages import add_languages, add_strict
from seq2engine.flags.precision import print_default_precision
from seq2engine.flags.search import (
    add_output_flags,
    add_search_flags,
    lines_of_file,
    options_from_args,
    prefixes_from_args,
)
from seq2engine.flags.shared import (
    Commands,
    add_backend,
    add_bundle,
    add_command,
    add_draft,
    backend_settings,
    progress_for,
)

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle
    from seq2engine.runtime.cluster.ray_data import Decode
    from seq2engine.runtime.images.reader import Reading
    from seq2engine.runtime.search.options import SearchOptions
    from seq2engine.runtime.text.lines import Line
    from seq2engine.runtime.text.translate import Translated
    from seq2engine.runtime.translator import Translator

CHUNK = 1 << 16  # bytes read at once
LARGE = 1 << 14  # bytes of a file from which progress is shown


def add_parser(commands: Commands) -> None:
    summary = "decode lines: text where the bundle has a tokenizer, else token ids"
    sub = add_command(commands, "run", run_run, summary, {"--no-profile": "--remeasure"})
    add_bundle(sub)
    add_backend(sub)
    add_draft(sub, default="auto")
    add_run_flags(sub)
    add_cluster_flags(sub)


def add_run_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--remeasure",
        action="store_true",
        help="measure auto choices (precision, draft), hash files and make graphs again; neither read nor write what "
        "was kept before on this machine (~/.cache/seq2engine)",
    )
    sub.add_argument("text", nargs="*", default=[], metavar="TEXT", help="decode these instead of standard input")
    sub.add_argument("--input", type=Path, help="file of lines in UTF-8 (default: standard input)")
    sub.add_argument(
        "--ids", action="store_true", help="input and output lines are token ids, although the bundle takes text"
    )
    add_languages(sub)
    sub.add_argument("--batch", type=int, default=32, help="maximum lines decoded together (default: %(default)s)")
    sub.add_argument(
        "--truncate",
        action="store_true",
        help="cut lines that are too long, instead of reporting an error and printing an empty line",
    )
    add_strict(sub)
    add_search_flags(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_output_flags(sub, "source-output pairs of tokens after each output, such as 0-0 2-1, from cross-attention")


def run_run(args: argparse.Namespace) -> int:
    """Decodes line by line; an empty line, or one that cannot be decoded, is an empty line of the output."""
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.runtime.encoder_inputs import check_takes_text

    if args.text and args.input is not None:
        args.usage_error("give either TEXT or --input, not both")
    if args.target_language is not None and args.forced_bos is not None:
        args.usage_error("give either --to or --forced-bos, not both: a language is a first token")
    check_cluster_flags(args)
    bundle = open_bundle(args.bundle)
    check_takes_text(bundle.config, bundle.root)
    return run_here(args, bundle) if args.cluster is None else run_on_cluster(args, bundle)


def run_here(args: argparse.Namespace, bundle: Bundle) -> int:
    with lines_from_args(args) as lines, loaded(args, bundle) as model:
        print_precision(args, model)
        options = options_from_args(args, model)
        prefixes = prefixes_from_args(args, model, options.forced_bos)
        print_default_precision(args, bundle, model.session.precision, f"{args.backend} runs")
        failed, decoded = False, 0
        progress, size = progress_of_file(args.input, args.quiet)
        for translated in translated_lines(args, model, options, prefixes, lines):
            decoded = translated.line.number
            failed |= translated.error is not None
            if message := translated.error or note_on_line(translated):
                print(f"line {translated.line.number}: {message}", file=sys.stderr)
            shown = shown_of(args, model, options, translated)
            sys.stdout.buffer.write(f"{shown}\n".encode())  # UTF-8 whatever the terminal's settings, like the input
            sys.stdout.buffer.flush()
            progress("decode", translated.line.end / size)
    if prefixes is not None:
        check_prefixes(args, len(prefixes), decoded)
    return 1 if failed else 0


def loaded(args: argparse.Namespace, bundle: Bundle, threads: int | None = None) -> Translator:
    """The model, as the flags ask for it; `threads` is the default of --threads."""
    from seq2engine.export.artifact.profiles import Workload
    from seq2engine.runtime.defaults import defaults_of
    from seq2engine.runtime.translator import load

    return load(
        bundle,
        **{**backend_settings(args), "threads": args.threads or threads},
        attention=bool(args.alignments or args.coverage_penalty),
        draft=args.draft,
        remeasure=args.remeasure,
        workload=Workload(beam=widest(args, defaults_of(bundle).values), target=args.max_length),
        ids=args.ids,
    )


def translated_lines(
    args: argparse.Namespace,
    model: Translator,
    options: SearchOptions,
    prefixes: list[tuple[int, ...]] | None,
    lines: Iterable[Line],
) -> Iterator[Translated]:
    return model.translate_lines(
        lines,
        options,
        source_language=args.source_language,
        batch=args.batch,
        truncate=args.truncate,
        prefixes=prefixes,
        strict=args.strict,
    )


def shown_of(args: argparse.Namespace, model: Translator, options: SearchOptions, translated: Translated) -> str:
    """What is printed of a line."""
    if args.json:
        return json_of(translated, not model.takes_text)
    return plain_of(translated, options.nbest, args.scores)


def note_on_line(translated: Translated) -> str | None:
    from seq2engine.model.tokenizers.base import unknown_text

    return unknown_text(translated.unknown) if translated.unknown else None


def check_prefixes(args: argparse.Namespace, count: int, lines: int) -> None:
    if count > lines:
        raise RequestError(f"{args.prefixes} has {count} lines, but {lines} were decoded; give one for each")


def run_on_cluster(args: argparse.Namespace, bundle: Bundle) -> int:
    """Decodes a corpus with the workers of a cluster into a folder of shards; the same call resumes it."""
    from seq2engine.runtime.cluster.corpus import blocks_of
    from seq2engine.runtime.cluster.ray_data import ClusterOptions, decode_blocks, ray_package
    from seq2engine.runtime.cluster.shards import merge_shards, open_job, problems_in

    ray_package()  # refuses here where it is missing
    blocks = blocks_of(args.input.absolute(), args.shard, args.column)
    total = sum(block.count for block in blocks)
    if args.prefixes is not None:
        check_prefixes(args, len(lines_of_file(args.prefixes)), total)
    open_job(args.out, job_of(args, bundle))
    options = ClusterOptions(args.cluster, args.cores, gpus=uses_gpu(args))
    decoded = decode_blocks(partial(open_decode, for_workers(args)), blocks, args.out, options, progress_for(args))
    failed = 0
    for number, message, is_error in problems_in(args.out, blocks):
        failed += is_error
        print(f"line {number}: {message}", file=sys.stderr)
    where = (
        merge_shards(args.out, blocks, "output.jsonl" if args.json else "output.txt") if args.keep_order else args.out
    )
    before = f", {total - decoded} of them before" if decoded < total else ""
    print(f"{where}: {total} lines{before}, {failed} errors")
    return 1 if failed else 0


def for_workers(args: argparse.Namespace) -> argparse.Namespace:
    """The flags as a worker gets them: paths that are the same everywhere, and a bundle on the hub by its name."""
    values = {name: value for name, value in vars(args).items() if not callable(value)}
    values |= {name: value.absolute() for name, value in values.items() if isinstance(value, Path)}
    return argparse.Namespace(**{**values, "bundle": getattr(args, "hub_bundle", values["bundle"])})


def open_decode(args: argparse.Namespace, threads: int | None) -> Decode:
    """The decode function of a worker: the same as on one machine."""
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.runtime.cluster.shards import Record

    model = loaded(args, open_bundle(args.bundle), threads)
    options = options_from_args(args, model)
    prefixes = prefixes_from_args(args, model, options.forced_bos)

    def decode(lines: Iterable[Line]) -> Iterator[Record]:
        for done in translated_lines(args, model, options, prefixes, lines):
            yield Record(done.line.number, shown_of(args, model, options, done), done.error, note_on_line(done))

    return decode


def print_precision(args: argparse.Namespace, model: Translator) -> None:
    """Prints one line on the chosen precision, if there was a choice."""
    from seq2engine.runtime.auto_precision import note_on

    note = model.session.chosen or note_on(model.session.precision, args.backend, args.provider)
    if note and not args.quiet:
        print(f"note: {note}", file=sys.stderr)


def widest(args: argparse.Namespace, own: Mapping[str, Any]) -> int:
    """Beams per step (or samples, or beams of all alternatives), by which an engine is chosen."""
    beam, nbest = args.beam or own.get("beam", 1), args.nbest or own.get("nbest", 1)
    return int(beam * nbest if args.sample or args.alternatives else beam)


@contextmanager
def lines_from_args(args: argparse.Namespace) -> Iterator[Iterator[Line]]:
    """The lines to decode; a file that cannot be opened is an error here, before anything is loaded."""
    from seq2engine.runtime.text.lines import line_from_bytes

    if args.text:  # bytes of an argument that are no UTF-8 come as surrogates
        raw = (text.encode("utf-8", "surrogateescape") for text in args.text)
        yield (line_from_bytes(number, text) for number, text in enumerate(raw, start=1))
        return
    with lines_from_input(args.input, instead="TEXT or --input FILE") as lines:
        yield lines


@contextmanager
def lines_from_input(path: Path | None, instead: str) -> Iterator[Iterator[Line]]:
    """The lines of a file, or of standard input (None); `instead` is what to give where that is closed."""
    from seq2engine.runtime.text.lines import lines_from_chunks

    if path is None and sys.stdin is None:
        raise RequestError(f"standard input is closed; give {instead}")
    name = "standard input" if path is None else str(path)
    source = sys.stdin.fileno() if path is None else path
    try:
        # Unbuffered: a thread in a buffered read holds a lock, and Python cannot exit until it returns.
        file = FileIO(source, "rb", closefd=path is not None)
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    with file:
        yield lines_from_chunks(chunks_from(file, name))


def chunks_from(file: FileIO, name: str) -> Iterator[bytes]:
    """Bytes as they arrive, at most one chunk at a time, until the end."""
    try:
        while (chunk := file.read(CHUNK)) != b"":
            if chunk is None:  # the input is set not to block, and has nothing yet
                select.select([file], [], [])
            else:
                yield chunk
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error


def progress_of_file(path: Path | None, quiet: bool) -> tuple[Progress, int]:
    """The progress bar of a large file and its size; none where it would mix with the results."""
    size = 0 if path is None else os.path.getsize(path)
    shown = size >= LARGE and not quiet and not sys.stdout.isatty()
    return (ProgressPrinter() if shown else silent), max(size, 1)


def plain_of(translated: Translated | Reading, nbest: int, scores: bool) -> str:
    """Always `nbest` lines, so that line numbers of input and output can be matched.

    Behind the text, after tabs: the score and the tokens' log-probabilities if `scores`, then the alignments if there
    are any.
    """
    lines = []
    for output in translated.outputs:
        columns = [re.sub(r"[\r\n]+", " ", output.text)]
        if scores:
            columns += [f"{output.score:.6f}", " ".join(f"{value:.6f}" for value in output.log_probs)]
        if output.alignments:
            columns.append(" ".join(f"{place}-{token}" for token, place in enumerate(output.alignments)))
        lines.append("\t".join(columns))
    return "\n".join(lines + [""] * (nbest - len(lines)))


def json_of(translated: Translated, ids: bool) -> str:
    values: dict[str, Any] = {"line": translated.line.number}
    if translated.unknown:
        values["unknown"] = translated.unknown
    if translated.error is not None:
        return json.dumps({**values, "error": translated.error}, ensure_ascii=False)
    if ids:
        values |= {"tokens": translated.source}
    else:
        values |= {"text": translated.line.text}
    values["hypotheses"] = hypotheses_of(translated, ids)
    return json.dumps(values, ensure_ascii=False)


def hypotheses_of(translated: Translated | Reading, ids: bool) -> list[dict[str, Any]]:
    return [
        {
            **({} if ids else {"text": output.text}),
            "tokens": output.tokens,
            "score": output.score,
            "log_probs": output.log_probs,
            **({"alignments": output.alignments} if output.alignments else {}),
        }
        for output in translated.outputs
    ]
