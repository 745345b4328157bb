"""The command line: one subcommand per stage. Parse, one call, print; heavy imports wait for their command."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seq2engine import __version__
from seq2engine.cli.exits import exit_code_of
from seq2engine.cli.usage import check_usage, check_usage_without_bundle
from seq2engine.commands.bench import COMPARE, add_bench_flags, compare_benches, run_arms
from seq2engine.commands.build import add_build_flags, add_refit_flags, run_build, run_refit
from seq2engine.commands.inspect import add_inspect_flags, run_inspect
from seq2engine.commands.package import add_package_flags, run_package
from seq2engine.commands.parity import add_parity_flags, references_from_args, run_parity
from seq2engine.commands.plan import add_plan_flags, run_plan
from seq2engine.commands.run import add_languages, add_run_flags, add_strict, run_run
from seq2engine.commands.score import add_score_flags, run_score
from seq2engine.commands.train import add_train_flags, run_train
from seq2engine.common.progress import Progress, ProgressPrinter, silent
from seq2engine.errors import BundleError, missing_package
from seq2engine.export.contract import DEFAULT_PRECISIONS
from seq2engine.flags.lists import MOST_PRECISE, Listed, Parser, add_precisions, is_precision

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; exits.py says which there are."""
    return exit_code_of(lambda: run_command_line(argv))


def run_command_line(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    args.command_line = shlex.join(("seq2engine", *map(str, sys.argv[1:] if argv is None else argv)))  # for reports
    command: Command = args.command
    try:
        check_usage(args)
        return command(args)
    except BundleError:
        check_usage_without_bundle(args)  # wrong usage is told before a bundle that is not there
        raise
    except ModuleNotFoundError as error:
        if missing := missing_package(error, args.command_name):
            raise missing from error
        raise


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; texts may stand before, between and behind the flags of `run`.

    argparse takes those behind a flag for unknown arguments: it fills all places at the first words that have one.
    """
    parser = make_parser()
    args, more = parser.parse_known_args(argv)
    behind = more.index("--") if "--" in more else len(more)
    flags = [word for word in more[:behind] if word.startswith("-")]
    if flags or (more and "text" not in args):
        args.usage_error(f"unrecognized arguments: {' '.join(flags or more)}{nearest(flags, args.usage())}")
    if more:
        args.text = [*args.text, *more[:behind], *more[behind + 1 :]]
    return args


def nearest(flags: Sequence[str], usage: str) -> str:
    """What a mistyped flag may have been, of those that a usage has."""
    known = re.findall(r"--[a-z][a-z0-9-]*", usage)
    meant = [match for flag in flags for match in difflib.get_close_matches(flag.partition("=")[0], known, 1)]
    return f" (did you mean {', '.join(dict.fromkeys(meant))}?)" if meant else ""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="seq2engine",
        description="Encoder-decoder Transformers to ONNX and TensorRT, proven to say the same thing, faster.",
    )
    parser.add_argument("--version", action="version", version=f"seq2engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Command, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.set_defaults(command=command, command_name=name, usage_error=sub.error, usage=sub.format_usage)
        sub.add_argument("--quiet", action="store_true", help="show no progress")
        return sub

    sub = add("demo", run_demo, "the whole pipeline on small seeded models, on this machine, without a GPU")
    sub.add_argument("--out", type=Path, default=Path("out/demo"), help="folder to write (default: %(default)s)")

    add_train_flags(add("train", run_train, "train a model on parallel text: TSV, or two aligned files"))

    sub = add("import", run_import, "make a checkpoint of one from Hugging Face, fairseq, OpenNMT-py or torch.nn")
    sub.add_argument("source", type=Path, help="folder or file to read")
    sub.add_argument("checkpoint", type=Path, help="folder to write")
    sub.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    add_json(sub)

    sub = add("export", run_export, "write a checkpoint's ONNX graphs as a bundle")
    sub.add_argument(
        "checkpoint",
        help="checkpoint folder, anything that `import` reads, shipped:g2p, or random:PRESET[:SEED] for random weights",
    )
    sub.add_argument("bundle", type=Path, nargs="?", help="folder to write; one of the same weights gets what it lacks")
    sub.add_argument(
        "--add",
        action=Listed,
        fits=is_precision,
        metavar="PRECISION",
        help="add these to a bundle, from its own weights: export --add int8 BUNDLE",
    )
    add_precisions(sub, None, ",".join(DEFAULT_PRECISIONS))
    sub.add_argument(
        "--calibrate",
        type=Path,
        metavar="CORPUS",
        help="source lines that are decoded to find what fp16 cannot hold and fp32 must (default: random sources)",
    )
    sub.add_argument("--cache", default="static", help="static (written in place) or growing (default: %(default)s)")
    sub.add_argument("--force", action="store_true", help="replace the graphs and weights of a bundle that is there")
    add_json(sub)

    add_build_flags(add("build", run_build, "build TensorRT engines of a bundle"))

    add_refit_flags(add("refit", run_refit, "give a bundle engines by swapping the weights of those of another one"))

    add_plan_flags(add("plan", run_plan, "choose profiles for a file of real requests, and say how to build them"))

    sub = add("package", run_package, "make a folder that a GPU machine can verify with TensorRT and numpy alone")
    add_bundle(sub)
    add_package_flags(sub)
    add_json(sub)

    add_inspect_flags(
        add("inspect", run_inspect, "show what a bundle holds: graphs, precision census, engines, launches")
    )

    sub = add("run", run_run, "decode lines: text where the bundle has a tokenizer, else token ids")
    add_bundle(sub)
    add_backend(sub)
    add_draft(sub)
    add_run_flags(sub)

    sub = add("score", run_score, "say how likely the model finds given outputs: lines of source<TAB>target")
    add_bundle(sub)
    add_backend(sub)
    add_score_flags(sub)

    sub = add("parity", run_parity, "compare a backend with PyTorch, or any two: graphs, tensors, steps, whole decodes")
    add_bundle(sub)
    add_backend(sub, several=True)
    add_references(sub, "decode these instead of random sources, and count both sides' error rates")
    add_parity_flags(sub)
    add_json(sub)

    sub = add(
        "attention", run_attention, "show where one decode looks: cross-attention of every layer and head, as HTML"
    )
    add_bundle(sub)
    sub.add_argument("text", help='a line of text, or of token ids such as "17 4 250" where the model takes no text')
    sub.add_argument("--ids", action="store_true", help="the line is token ids though the model takes text")
    add_languages(sub)
    sub.add_argument("--beam", type=int, help="beams (default: the model's own choice, else greedy)")
    sub.add_argument("--precision", help=f"fp32 or fp16 (default: {MOST_PRECISE})")
    sub.add_argument("--max-length", type=int, help="most output tokens (default: the model's maximum)")
    add_strict(sub)
    sub.add_argument("--out", type=Path, help="folder or file of the report (default: BUNDLE/reports)")
    sub.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    add_json(sub)

    sub = add("bench", run_bench, "time encoder, step and whole decodes, outputs compared first")
    add_bench_flags(sub)
    add_references(sub, "count every arm's error rates on these, so that quality stands beside speed")
    sub.add_argument("--count", type=int, help="references to decode (default: all)")
    add_provider(sub)
    add_draft(sub)
    add_json(sub)
    return parser


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
        "--deterministic", action="store_true", help="the same bits in any batch, for some padding (onnxruntime)"
    )
    add_provider(parser)


def add_draft(parser: argparse.ArgumentParser) -> None:
    what = "a cheaper precision that guesses ahead, for single sources with one beam: the same tokens, sooner"
    parser.add_argument("--draft", metavar="PRECISION", help=what)


def add_provider(parser: argparse.ArgumentParser) -> None:
    where = "where onnxruntime computes: cpu, cuda, tensorrt or nv_tensorrt_rtx (default: cpu)"
    parser.add_argument("--provider", help=where)


def add_references(parser: argparse.ArgumentParser, what: str) -> None:
    help_text = f"lines of source<TAB>right output, or shipped:g2p for that model's test split: {what}"
    parser.add_argument("--references", metavar="TSV", help=help_text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def progress_for(args: argparse.Namespace) -> Progress:
    return silent if args.quiet else ProgressPrinter()


def run_demo(args: argparse.Namespace) -> int:
    from seq2engine.commands.demo import demo

    print(demo(args.out, progress_for(args)))
    return 0


def run_import(args: argparse.Namespace) -> int:
    from seq2engine.model.importers.detect import import_checkpoint

    result = import_checkpoint(args.source, args.checkpoint, args.force, progress_for(args))
    if args.json:
        print(result.to_json())
        return 0
    print(f"{result.kind}, {result.parameters:,} parameters: {result.checkpoint}")
    print(f"takes {'text' if result.takes_text else 'token ids only: no tokenizer was found beside the weights'}")
    if result.generation:
        print("decodes, unless told otherwise, with " + ", ".join(f"{k} {v}" for k, v in result.generation.items()))
    for note in result.notes:
        print(f"note: {note}")
    print(f"next: seq2engine export {result.checkpoint} BUNDLE")
    return 0


def run_export(args: argparse.Namespace) -> int:
    from seq2engine.exporting import export_checkpoint
    from seq2engine.inspection.describe import bundle_text, bundle_values

    if args.add is not None:
        return run_add(args)
    if args.bundle is None:
        args.usage_error("the following arguments are required: bundle")
    progress = progress_for(args)
    args.precision = args.precision or list(DEFAULT_PRECISIONS)
    bundle = export_checkpoint(
        args.checkpoint,
        args.bundle,
        args.precision,
        args.cache,
        args.force,
        progress,
        args.calibrate,
        partial(print_note, args),
    )
    print(as_json(bundle_values(bundle)) if args.json else bundle_text(bundle))
    return 0


def run_add(args: argparse.Namespace) -> int:
    """`export --add`: the one place is the bundle."""
    from seq2engine.exporting import add_precisions as added_precisions
    from seq2engine.inspection.describe import bundle_text, bundle_values

    if args.bundle is not None or args.precision is not None or args.force:
        args.usage_error("--add takes a bundle and nothing else to export: export --add int8 BUNDLE")
    bundle = added_precisions(args.checkpoint, args.add, progress_for(args), args.calibrate)
    print(as_json(bundle_values(bundle)) if args.json else bundle_text(bundle))
    return 0


def print_note(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(f"note: {text}", file=sys.stderr)


def run_attention(args: argparse.Namespace) -> int:
    from seq2engine.common.about import about_rows
    from seq2engine.common.reports import report_files
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.model.tokenizers.base import unknown_text
    from seq2engine.runtime.attention.report import attention_html, attention_text
    from seq2engine.runtime.attention.view import attention_of

    bundle = open_bundle(args.bundle)
    files = report_files(bundle.root, "attention", out=args.out)
    view = attention_of(
        bundle,
        args.text,
        ids=args.ids,
        beam=args.beam,
        precision=args.precision,
        max_length=args.max_length,
        threads=args.threads,
        progress=progress_for(args),
        source_language=args.source_language,
        target_language=args.target_language,
        strict=args.strict,
    )
    if view.unknown:
        print(f"the text has {unknown_text(view.unknown)}", file=sys.stderr)
    about = about_rows(
        bundle.root.resolve().name, bundle.config.shape, bundle.manifest.checkpoint_sha256, args.command_line
    )
    files.write(attention_html(view, about), view.to_json())
    print(view.to_json().rstrip() if args.json else f"{attention_text(view)}\nreport: {files.page}")
    return 0 if view else 1


def run_bench(args: argparse.Namespace) -> int:
    return compare_benches(args) if args.bundle[0] == COMPARE else run_arms(args, references_from_args, progress_for)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)
