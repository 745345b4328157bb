"""`seq2engine bench`: arms against each other, and `bench compare`: one result against an older one."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.common.terminal import fresh_line
from seq2engine.errors import Seq2EngineError
from seq2engine.flags.languages import add_languages
from seq2engine.flags.lists import MOST_PRECISE, ListAction, add_precisions, one_of
from seq2engine.flags.shared import (
    BACKENDS,
    Commands,
    add_command,
    add_draft,
    add_json,
    add_provider,
    add_references,
    add_threads,
    print_note,
    progress_for,
    references_from_args,
)

if TYPE_CHECKING:
    from seq2engine.benchmarks.cases import Case
    from seq2engine.benchmarks.options import BenchOptions
    from seq2engine.benchmarks.result import BenchResult
    from seq2engine.model.config import ModelConfig

COMPARE = "compare"  # in place of a bundle; a bundle of that name is ./compare
AXES = ("batch", "beam", "source-length", "max-length")  # flags of a sweep


def add_parser(commands: Commands) -> None:
    renamed = {"--lengths": "--max-length", "--output": "--max-length", "--source": "--source-length"}
    summary = "time encoder, step and whole decodes, outputs compared first"
    sub = add_command(commands, "bench", run_bench, summary, renamed)
    add_arm_flags(sub)
    add_case_flags(sub)
    add_run_flags(sub)
    add_compare_flags(sub)
    add_references(sub, "also measure every arm's error rates on these")
    sub.add_argument("--count", type=int, help="references to decode (default: all)")
    add_languages(sub)
    add_provider(sub)
    add_draft(sub)
    add_json(sub)


def run_bench(args: argparse.Namespace) -> int:
    return compare_benches(args) if args.bundle[0] == COMPARE else run_arms(args)


def add_arm_flags(sub: argparse.ArgumentParser) -> None:
    """What is timed: backends, precisions and other libraries."""
    sub.add_argument(
        "bundle",
        nargs="+",
        metavar="BUNDLE",
        help="bundle folder; or: compare BEFORE AFTER, two results: JSON files, or bundles for their latest",
    )
    sub.add_argument(
        "--backend",
        action=ListAction,
        fits=one_of(*BACKENDS),
        help="arms: torch, onnxruntime, tensorrt (default: torch,onnxruntime; without PyTorch onnxruntime)",
    )
    add_precisions(sub, None, f"{MOST_PRECISE} by all backends")
    sub.add_argument(
        "--peers",
        action=ListAction,
        fits=is_peer,
        default=[],
        metavar="NAME",
        help="other libraries with the same weights as arms, from .peers (make peers): all, or names such as "
        "'ctranslate2 int8'; of all, one that fails is listed as failed",
    )


def add_case_flags(sub: argparse.ArgumentParser) -> None:
    """The workloads: fixed sizes, a sweep, scenarios, real sentences."""
    sub.add_argument(
        "--case",
        action=ListAction,
        fits=is_case,
        metavar="BxKxSxT",
        help="cases: batch x beam x source x output, such as 8x4x32x32",
    )
    add_numbers(sub, "--max-length", "T", "output lengths: every case at each of these, or those of a sweep")
    sub.add_argument(
        "--sweep",
        action="store_true",
        help="the grid of batch 1 8 32, beam 1 4, source length 32 128 and output length 32 128",
    )
    for flag in AXES[:-1]:
        add_numbers(sub, f"--{flag}", "N", f"a sweep with these values of {flag.replace('-', ' ')}")
    sub.add_argument(
        "--scenario",
        action=ListAction,
        fits=one_of("single", "offline", "server"),
        default=[],
        metavar="NAME",
        help="also single (stream), offline and server, as in MLPerf",
    )
    sub.add_argument(
        "--bound",
        type=float,
        metavar="MS",
        help="p99 bound of the server scenario in ms (default: 4x the first arm's median)",
    )
    sub.add_argument(
        "--natural",
        action=ListAction,
        fits=is_workload,
        default=[],
        metavar="BxK",
        help="time the sources of --references, each decoded to its end token, in batches of B with K beams, such as "
        "1x1,32x4; and compare every arm's outputs. Other cases are then timed only if asked for",
    )


def add_run_flags(sub: argparse.ArgumentParser) -> None:
    """How it is timed, and where the report goes."""
    sub.add_argument(
        "--neighbour",
        type=int,
        default=0,
        metavar="N",
        help="busy processes to start first, each on a core of its own (default: %(default)s)",
    )
    sub.add_argument("--rounds", type=int, default=10, help="timed rounds of every arm (default: %(default)s)")
    add_threads(sub, "as many as suit the model here, and all cores for other arms")
    sub.add_argument("--quick", action="store_true", help="skip the machine's ceiling and the arms' peak memory")
    sub.add_argument(
        "--export-times", action="store_true", help="export every precision again and note how long it took"
    )
    sub.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="folder for the report, or its file (.html or .json) (default: BUNDLE/reports/bench-ARMS-DATE-TIME)",
    )


def add_compare_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--slower", type=float, default=1.05, help="compare: fails beyond this ratio (default: %(default)s)"
    )
    sub.add_argument("--relative", action="store_true", help="compare: times relative to the first arm of the same run")
    sub.add_argument("--anyway", action="store_true", help="compare: allow results of different models or machines")


def add_numbers(sub: argparse.ArgumentParser, flag: str, metavar: str, what: str) -> None:
    sub.add_argument(flag, action=ListAction, fits=str.isdecimal, item=int, metavar=metavar, help=what)


def is_case(word: str) -> bool:
    return re.fullmatch(r"\d+(x\d+){3}", word) is not None


def is_workload(word: str) -> bool:
    return re.fullmatch(r"\d+x\d+", word) is not None


def is_peer(word: str) -> bool:
    """All, or a name, whose second word may be a precision."""
    return word.partition(" ")[0] in ("all", "ctranslate2", "transformers", "optimum", "openvino")


def run_arms(args: argparse.Namespace) -> int:
    """Times what the flags ask for; the report is written after the first case and updated after each."""
    from seq2engine.benchmarks.checks import check_bench
    from seq2engine.benchmarks.options import plan_from_options
    from seq2engine.common.reports import report_files
    from seq2engine.export.artifact.bundle import open_bundle

    bundle = open_bundle(args.bundle[0])
    options = options_from_args(args, cases_from_args(args, bundle.config))
    plan = plan_from_options(bundle, options)
    check_bench(plan)
    if args.backend is None and "torch" not in options.backends:
        print_note(args, "PyTorch is not installed, so only onnxruntime is timed; pip install 'seq2engine[torch]'")
    from seq2engine.benchmarks.report.page import bench_html, bench_table
    from seq2engine.benchmarks.runner import bench_bundle

    files = report_files(bundle.root, "bench", " ".join((*options.backends, *plan.precisions)), args.out)
    kept: list[BenchResult] = []

    def keep(result: BenchResult) -> None:
        kept.append(result)
        files.write(bench_html(result), result.to_json())

    options = dataclasses.replace(options, references=references_from_args(args))
    try:
        result = bench_bundle(bundle, options, progress_for(args), keep)
    except (KeyboardInterrupt, Seq2EngineError):
        if kept and files.data.exists():
            print(f"{fresh_line(sys.stderr)}{kept[-1].interrupted}, which are in: {files.page}", file=sys.stderr)
        elif kept:  # they could not be written
            print(bench_table(kept[-1]), flush=True)
        raise
    print(result.to_json().rstrip() if args.json else bench_table(result), flush=True)
    files.write(bench_html(result), result.to_json())
    if not args.json:
        print(f"report: {files.page}")
    return 0


def bench_usage(args: argparse.Namespace) -> list[str]:
    """What is wrong with the flags, whatever the bundle holds."""
    if args.bundle[0] == COMPARE:
        right = "compare takes two results, as in: seq2engine bench compare BEFORE.json AFTER.json"
        return [right] if len(args.bundle) != 3 else []
    from seq2engine.benchmarks.cases import case_text_problems, cases_from_text
    from seq2engine.benchmarks.checks import usage_problems
    from seq2engine.benchmarks.natural.result import workload_problems

    wrong = case_text_problems(args.case or []) + workload_problems(args.natural)
    if args.natural and args.references is None:
        wrong.append("--natural without --references, whose sources it decodes")
    if len(args.bundle) > 1:
        wrong.append(f"{len(args.bundle)} bundles, expected one; or two results: bench compare BEFORE AFTER")
    if args.case and (sweep_of(args) or args.sweep):
        wrong.append("cases and a sweep, expected either; leave out --case, or the sizes of the sweep")
    if args.count is not None and args.references is None:
        wrong.append("--count without --references, of which it is the number")
    for flag in AXES:
        sizes = getattr(args, flag.replace("-", "_")) or []
        wrong += [f"--{flag} {size}, expected at least 1" for size in sizes if size < 1]
    cases = None if wrong or not args.case else cases_from_text(args.case)
    return wrong + usage_problems(options_from_args(args, cases))


def options_from_args(args: argparse.Namespace, cases: tuple[Case, ...] | None) -> BenchOptions:
    """The options without the references, which are read last."""
    from seq2engine.benchmarks.natural.result import workload_problems, workloads_from_text
    from seq2engine.benchmarks.options import BenchOptions, default_backends

    return BenchOptions(
        backends=args.backend or default_backends(),
        precisions=args.precision,
        cases=cases,
        rounds=args.rounds,
        threads=args.threads,
        provider=args.provider,
        draft=args.draft,
        source_language=args.source_language,
        target_language=args.target_language,
        peers=args.peers,
        natural=() if workload_problems(args.natural) else workloads_from_text(args.natural),
        neighbours=args.neighbour,
        scenarios=args.scenario,
        bound_ms=args.bound,
        quick=args.quick,
        export_times=args.export_times,
    )


def sweep_of(args: argparse.Namespace) -> dict[str, list[int]]:
    """The sizes of a sweep; output lengths alone are not a sweep: they apply to every case."""
    sizes = {"batch": args.batch, "beam": args.beam, "source": args.source_length}
    return {axis: values for axis, values in sizes.items() if values}


def cases_from_args(args: argparse.Namespace, config: ModelConfig) -> tuple[Case, ...]:
    """The cases that the flags name."""
    from seq2engine.benchmarks.cases import cases_at_lengths, cases_for, cases_from_grid, cases_from_text

    sweep = sweep_of(args)
    if sweep or args.sweep:
        return cases_from_grid(config, {**sweep, "target": args.max_length or []})
    if args.natural and not args.case:
        return ()
    cases = cases_from_text(args.case) if args.case else cases_for(config)
    return cases_at_lengths(cases, args.max_length) if args.max_length else cases


def compare_benches(args: argparse.Namespace) -> int:
    """Exit code 0 unless something is significantly slower."""
    from seq2engine.benchmarks.comparison import compare_results, comparison_table
    from seq2engine.benchmarks.result_files import result_from_path

    before, after = (result_from_path(Path(name)) for name in args.bundle[1:])
    found = compare_results(before, after, args.slower, args.relative, args.anyway)
    print(found.to_json().rstrip() if args.json else comparison_table(found))
    return 0 if found else 1
