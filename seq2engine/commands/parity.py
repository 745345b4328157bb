"""`seq2engine parity`: a verdict and a report for each precision, and a gate for CI."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.errors import UsageError
from seq2engine.flags.languages import add_languages
from seq2engine.flags.lists import ListAction, OptionalValueAction, one_of
from seq2engine.flags.precision import precisions_from_args
from seq2engine.flags.shared import (
    Commands,
    add_backend,
    add_bundle,
    add_command,
    add_json,
    add_references,
    progress_for,
    references_from_args,
)

if TYPE_CHECKING:
    from seq2engine.common.reports import ReportFiles
    from seq2engine.export.artifact.bundle import Bundle
    from seq2engine.runtime.parity.options import ParityOptions

RANDOM_SOURCES = 64  # without references


def add_parser(commands: Commands) -> None:
    summary = "compare a backend with PyTorch, or any two: graphs, tensors, steps, whole decodes"
    sub = add_command(commands, "parity", run_parity, summary)
    add_bundle(sub)
    add_backend(sub, several=True)
    add_references(sub, "decode these instead of random sources, and count both sides' error rates")
    add_decodes(sub)
    add_comparison(sub)
    add_json(sub)


def add_decodes(sub: argparse.ArgumentParser) -> None:
    """What both sides decode, and how."""
    sub.add_argument(
        "--count", type=int, help=f"sources to decode (default: {RANDOM_SOURCES} random ones, or all references)"
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the random sources (default: %(default)s)")
    sub.add_argument("--beam", type=int, help="beams of the beam decodes (default: the model's own if above 1, else 4)")
    sub.add_argument("--max-length", type=int, help="maximum output tokens (default: the model's maximum, at most 64)")
    add_languages(sub)
    sub.add_argument("--batch", type=int, default=32, help="sources decoded together (default: %(default)s)")


def add_comparison(sub: argparse.ArgumentParser) -> None:
    """What is compared, by which measure, and where the report goes."""
    sub.add_argument(
        "--against",
        metavar="OTHER",
        help="baseline of the decodes instead of PyTorch in fp32: BACKEND[:PRECISION] of this bundle, the FOLDER of "
        "another bundle, or FOLDER@BACKEND[:PRECISION]",
    )
    sub.add_argument(
        "--metrics",
        action=ListAction,
        fits=one_of("errors", "bleu", "chrf"),
        default=["errors"],
        help="scores, with --references: errors (WER, lines wrong), bleu, chrf (default: errors)",
    )
    sub.add_argument(
        "--out",
        type=Path,
        metavar="PLACE",
        help="folder for the reports, or with one precision a file *.html (default: reports/ of the bundle)",
    )
    sub.add_argument(
        "--graph",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="compare this ONNX graph of another exporter (encoder, decoder, with past, merged, whole model) "
        "with the bundle's reference instead; may be repeated",
    )
    sub.add_argument("--gate", type=Path, metavar="FILE", help="thresholds in TOML or JSON; exit code 1 if one breaks")
    sub.add_argument(
        "--locate",
        action=OptionalValueAction,
        fits=re.compile(".+:.+").fullmatch,
        metavar="PLACE:TENSOR",
        help="only locate the first wrong tensor inside the ONNX graphs, with --backend tensorrt then inside engines "
        "that are built with more outputs; with a value, compare that tensor only",
    )
    sub.add_argument(
        "--row",
        type=int,
        action="append",
        default=[],
        help="number of a source to locate the fault with; may be repeated",
    )


def run_parity(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.runtime.parity.gate import broken_of, gate_from_file
    from seq2engine.runtime.parity.report.page import parity_html, parity_table
    from seq2engine.runtime.parity.run import parities_of

    bundle = open_bundle(args.bundle)
    if args.graph:
        return run_foreign(args, bundle)
    if args.locate is not None:
        return run_locate(args, bundle)
    if args.metrics != ["errors"] and args.references is None:
        raise UsageError("metrics need references; add --references TSV")
    gate = None if args.gate is None else gate_from_file(args.gate)
    options = options_from_args(args)
    precisions = precisions_from_args(args, bundle)
    files = files_from_args(args, bundle, precisions, options)  # before the work: --out may be wrong
    results = parities_of(bundle, precisions, args.backend, options, progress_for(args))
    failed, broken = False, []
    for result, report in zip(results, files, strict=True):
        if not args.json:
            print(parity_table(result), flush=True)  # first: it is not lost if the report cannot be written
        report.write(parity_html(result), result.to_json())
        if not args.json:
            print(f"report: {report.page}" + ("\n" if result is not results[-1] else ""))
        if gate is None:
            failed = failed or not result
        else:
            broken += [f"gate: {result.candidate}: {line}" for line in broken_of(gate, result)]
    if args.json:
        texts = [result.to_json().rstrip() for result in results]
        print(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
    elif gate is not None:
        print("\n".join(broken) or f"gate: {args.gate} holds")
    return 1 if failed or broken else 0


def run_foreign(args: argparse.Namespace, bundle: Bundle) -> int:
    """Graphs of another exporter against this bundle's reference: a verdict and a report for each."""
    from seq2engine.common.reports import report_files
    from seq2engine.runtime.parity.foreign.compare import STEPS, foreign_parity
    from seq2engine.runtime.parity.report.page import parity_html, parity_table
    from seq2engine.runtime.text.sources import sources_of

    if args.gate is not None or args.against is not None:
        raise UsageError("--graph compares with this bundle's reference; leave out --gate and --against")
    texts, language = references_from_args(args), args.source_language
    count = RANDOM_SOURCES if args.count is None else args.count
    sources = sources_of(bundle, texts, count, args.seed, language=language)
    results = foreign_parity(bundle, args.graph, sources, args.max_length or STEPS, args.threads, progress_for(args))
    for path, result in zip(args.graph, results, strict=True):
        report = report_files(bundle.root, "parity", f"graph {path.stem}", args.out)
        if not args.json:
            print(parity_table(result), flush=True)
        report.write(parity_html(result), result.to_json())
        if not args.json:
            print(f"report: {report.page}")
    if args.json:
        print(f"[{', '.join(result.to_json().rstrip() for result in results)}]")
    return 0 if all(results) else 1


def options_from_args(args: argparse.Namespace) -> ParityOptions:
    from seq2engine.runtime.parity.levels.baseline import against_from_text
    from seq2engine.runtime.parity.options import ParityOptions

    return ParityOptions(
        count=RANDOM_SOURCES if args.count is None else args.count,
        seed=args.seed,
        beam=args.beam,
        max_length=args.max_length,
        batch=args.batch,
        threads=args.threads,
        engine=args.engine,
        references=references_from_args(args),
        deterministic=args.deterministic,
        provider=args.provider,
        command=command_of(args),
        against=None if args.against is None else against_from_text(args.against),
        metrics=args.metrics,
        command_line=args.command_line,
        source_language=args.source_language,
        target_language=args.target_language,
    )


def files_from_args(
    args: argparse.Namespace, bundle: Bundle, precisions: Sequence[str], options: ParityOptions
) -> list[ReportFiles]:
    """The report files of each precision."""
    from seq2engine.common.reports import SUFFIXES, report_files
    from seq2engine.runtime.parity.report.page import report_name

    if args.out is not None and args.out.suffix in SUFFIXES and len(precisions) > 1:
        raise UsageError(
            f"--out {args.out} is one file, but {len(precisions)} precisions have a report each; name a folder"
        )
    against = None if options.against is None else options.against.name
    names = [report_name(args.backend, args.provider, precision, against) for precision in precisions]
    return [report_files(bundle.root, "parity", name, args.out) for name in names]


def run_locate(args: argparse.Namespace, bundle: Bundle) -> int:
    """Locates a fault in the graphs, as after a failed parity run, but without that run."""
    from seq2engine.export.artifact.profiles import Workload
    from seq2engine.runtime.defaults import defaults_of
    from seq2engine.runtime.parity.compare import longest_of
    from seq2engine.runtime.parity.locate.debug_engine import debug_engines
    from seq2engine.runtime.parity.locate.locate import LocateOptions, locate, locate_sources
    from seq2engine.runtime.parity.options import beam_of
    from seq2engine.runtime.text.sources import sources_of

    precision, *others = precisions_from_args(args, bundle)
    if args.out is not None:
        raise UsageError("--locate writes no report; leave out --out, or redirect the output")
    if others:
        raise UsageError(f"one precision to locate a fault in, not {1 + len(others)}; run --locate once for each")
    count = RANDOM_SOURCES if args.count is None else args.count
    texts, language = references_from_args(args), args.source_language
    rows = locate_sources(bundle.config, sources_of(bundle, texts, count, args.seed, language=language), args.row)
    longest = longest_of(bundle.config.max_target, args.max_length)
    command = f"{command_of(args)} --precision={precision}"
    beam = beam_of(args.beam, defaults_of(bundle))
    options = LocateOptions(
        precision, rows, beam, longest, threads=args.threads, only=args.locate or None, command=command
    )
    workload = Workload(beam=beam, target=args.max_length)
    with debug_engines(bundle, args.backend, precision, args.engine, workload) as engines:
        found = locate(bundle, options, engines=engines)
    if args.json:
        print(json.dumps(None if found is None else dataclasses.asdict(found), indent=1))
    else:
        print("nothing is wrong" if found is None else f"{found.text}\nagain with: {found.command}")
    return 0 if found is None else 1


def command_of(args: argparse.Namespace) -> str:
    """The parity command that was given, without its precisions and --locate."""
    words = ["seq2engine", "parity", str(args.bundle)]
    given = {name: getattr(args, name) for name in ("backend", "references", "count", "seed", "beam", "max_length")}
    given |= {"from": args.source_language, "to": args.target_language, "threads": args.threads, "engine": args.engine}
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return " ".join(shlex.quote(word) for word in (*words, *(f"--row={row}" for row in args.row)))
