"""The command line: one subcommand per stage. Parse, one call, print; heavy imports wait for their command."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seq2engine import __version__
from seq2engine.cli_bench import COMPARE, add_bench_flags, compare_benches, run_arms
from seq2engine.cli_build import add_build_flags, add_refit_flags, run_build, run_refit
from seq2engine.cli_package import add_package_flags, run_package
from seq2engine.cli_parity import add_parity_flags, references_from_args, run_parity
from seq2engine.cli_plan import add_plan_flags, run_plan
from seq2engine.cli_run import add_languages, add_run_flags, run_run
from seq2engine.cli_score import add_score_flags, run_score
from seq2engine.cli_train import add_train_flags, run_train
from seq2engine.errors import ConfigError, Seq2EngineError, UsageError
from seq2engine.progress import Progress, ProgressPrinter, silent

if TYPE_CHECKING:
    from seq2engine.model.config import ModelConfig

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line, as every other error is; the thirty lines of usage are what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see: {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0 is success, 1 an error or a failed verdict, 2 wrong usage, 130 an interrupt."""
    args = parsed(argv)
    command: Command = args.command
    try:
        return command(args)
    except Seq2EngineError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return interrupted()
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # in a compiled module
            return interrupted()
        raise
    except MemoryError as error:
        why = " ".join(str(error).split()) or "out of memory"
        print(f"error: {why}; ask for less at once, such as a smaller --batch, --beam or --max-length", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def interrupted() -> int:
    print("interrupted; nothing half-written was left", file=sys.stderr)
    return 130


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
        sub.set_defaults(command=command, usage_error=sub.error, usage=sub.format_usage)
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
    sub.add_argument("bundle", type=Path, help="folder to write")
    sub.add_argument(
        "--precision",
        nargs="+",
        default=["fp32"],
        help="one or more of fp32 fp16 bf16 int8 int4 fp8 w8a8 (default: fp32)",
    )
    sub.add_argument(
        "--calibrate",
        type=Path,
        metavar="CORPUS",
        help="source lines that are decoded to find what fp16 cannot hold and fp32 must (default: random sources)",
    )
    sub.add_argument("--cache", default="static", help="static (written in place) or growing (default: %(default)s)")
    sub.add_argument("--force", action="store_true", help="replace a bundle that is there")
    add_json(sub)

    add_build_flags(add("build", run_build, "build TensorRT engines of a bundle"))

    add_refit_flags(add("refit", run_refit, "give a bundle engines by swapping the weights of those of another one"))

    add_plan_flags(add("plan", run_plan, "choose profiles for a file of real requests, and say how to build them"))

    sub = add("package", run_package, "make a folder that a GPU machine can verify with TensorRT and numpy alone")
    add_bundle(sub)
    add_package_flags(sub)
    add_json(sub)

    sub = add("inspect", run_inspect, "show what a bundle holds: graphs, precision census, engines, launches")
    add_bundle(sub)
    sub.add_argument(
        "--beside",
        type=Path,
        metavar="ONNX",
        help="also build this decoder step of another exporter, for the first engine's target and ranges, and count",
    )
    add_json(sub)

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
    sub.add_argument("--precision", default="fp32", help="fp32 or fp16 (default: %(default)s)")
    sub.add_argument("--max-length", type=int, help="most output tokens (default: the model's maximum)")
    sub.add_argument("--out", type=Path, help="file to write (default: BUNDLE/reports/attention.html)")
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
        parser.add_argument("--precision", nargs="+", default=["fp32"], help="one or more (default: fp32)")
    else:
        parser.add_argument("--precision", default="fp32", help="(default: %(default)s)")
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
    from seq2engine.demo import demo

    print(demo(args.out, progress_for(args)))
    return 0


def run_import(args: argparse.Namespace) -> int:
    from seq2engine.model.importers.detecting import import_checkpoint

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
    from seq2engine.describe import bundle_text, bundle_values
    from seq2engine.export.to_onnx import onnx_from_model
    from seq2engine.model.importers.opening import opened_checkpoint

    progress = progress_for(args)
    with opened_checkpoint(args.checkpoint, progress) as (model, companions):
        scan = scan_from_args(args, model.config, companions, progress)
        bundle = onnx_from_model(model, args.bundle, args.precision, args.cache, args.force, progress, companions, scan)
    print(as_json(bundle_values(bundle)) if args.json else bundle_text(bundle))
    return 0


def scan_from_args(args: argparse.Namespace, config: ModelConfig, companions: Path | None, progress: Progress) -> Any:
    """The decodes by which islands are chosen: of the corpus, in the checkpoint's own tokens, or of random sources."""
    from seq2engine.export.contract import PRECISIONS, check_choices
    from seq2engine.model.tokenizers.base import FOLDER
    from seq2engine.model.tokenizers.reading import read_tokenizer
    from seq2engine.runtime.range_scan import scan_of, sources_from_corpus
    from seq2engine.runtime.translate import Coder, IdsTokenizer

    for precision in args.precision:
        check_choices(precision, args.cache)
    if "float16" not in {PRECISIONS[precision] for precision in args.precision}:
        if args.calibrate is not None:
            raise ConfigError(
                f"--calibrate finds what fp16 cannot hold, but {' '.join(args.precision)} computes nothing in fp16; "
                "leave it out, or add fp16 to --precision"
            )
        return None
    if args.calibrate is None:
        return scan_of(None, "random sources", config, args.cache, progress)
    takes_text = companions is not None and (companions / FOLDER).is_dir()
    coder: Coder = read_tokenizer(companions) if companions is not None and takes_text else IdsTokenizer()
    sources = sources_from_corpus(args.calibrate, coder)
    return scan_of(sources, args.calibrate.name, config, args.cache, progress)


def run_inspect(args: argparse.Namespace) -> int:
    from seq2engine.describe import bundle_text, bundle_values
    from seq2engine.export.bundle import open_bundle

    bundle = open_bundle(args.bundle)
    foreign = None
    if args.beside is not None:
        from seq2engine.describe import engines_of
        from seq2engine.export.beside import step_beside

        foreign = step_beside(args.beside, engines_of(bundle), bundle.root)
    print(as_json(bundle_values(bundle, foreign)) if args.json else bundle_text(bundle, foreign))
    return 0


def run_attention(args: argparse.Namespace) -> int:
    from seq2engine.export.bundle import open_bundle, write_text
    from seq2engine.runtime.attention import attention_of
    from seq2engine.runtime.attention_report import attention_html, attention_text

    bundle = open_bundle(args.bundle)
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
    )
    report = args.out or bundle.root / "reports" / "attention.html"
    write_text(report, attention_html(view))
    print(view.to_json().rstrip() if args.json else f"{attention_text(view)}\nreport: {report}")
    return 0 if view else 1


def run_bench(args: argparse.Namespace) -> int:
    return compare_benches(args) if args.bundle[0] == COMPARE else run_arms(args, references_from_args, progress_for)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)
