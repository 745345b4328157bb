"""`seq2engine bench`: arms against each other, and `bench compare`: one result against an older one."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from seq2engine.common.progress import Progress
from seq2engine.common.reports import report_files
from seq2engine.errors import Seq2EngineError, UsageError
from seq2engine.flags.lists import MOST_PRECISE, Listed, add_precisions, one_of

if TYPE_CHECKING:
    from seq2engine.benchmarks.cases import Case
    from seq2engine.benchmarks.result import BenchResult
    from seq2engine.model.config import ModelConfig

BACKENDS = ("torch", "onnxruntime", "tensorrt")
COMPARE = "compare"  # in place of a bundle; a bundle of that name is ./compare
AXES = {"batch": "batch", "beam": "beam", "source": "source", "output": "target"}  # flag -> size of a case


def add_bench_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "bundle",
        nargs="+",
        metavar="BUNDLE",
        help="bundle folder; or: compare BEFORE AFTER, two results: JSON files, or bundles for their latest",
    )
    sub.add_argument(
        "--backend",
        action=Listed,
        fits=one_of(*BACKENDS),
        default=["torch", "onnxruntime"],
        help="arms (default: torch,onnxruntime)",
    )
    add_precisions(sub, None, f"{MOST_PRECISE} all backends")
    sub.add_argument(
        "--peers",
        action=Listed,
        fits=is_peer,
        default=[],
        metavar="NAME",
        help="other libraries with the same weights as arms, from .peers (make peers): all, or names such as "
        "'ctranslate2 int8'; of all, one that fails is listed as failed",
    )
    sub.add_argument(
        "--case",
        action=Listed,
        fits=is_case,
        metavar="BxKxSxT",
        help="cases: batch x beam x source x output, such as 8x4x32x32",
    )
    add_numbers(sub, "--lengths", "T", "every case at each of these output lengths: cost curves")
    sub.add_argument(
        "--sweep", action="store_true", help="the grid of batch 1 8 32, beam 1 4, source 32 128 and output 32 128"
    )
    for flag in AXES:
        add_numbers(sub, f"--{flag}", "N", f"a sweep with these values of {flag}")
    sub.add_argument(
        "--scenario",
        action=Listed,
        fits=one_of("single", "offline", "server"),
        default=[],
        metavar="NAME",
        help="also single (stream), offline and server, as in MLPerf",
    )
    sub.add_argument(
        "--bound", type=float, metavar="MS", help="p99 of a server (default: 4 times the first arm's median)"
    )
    sub.add_argument("--rounds", type=int, default=10, help="timed rounds of every arm (default: %(default)s)")
    sub.add_argument("--threads", type=int, help="CPU threads of every arm (default: all cores)")
    sub.add_argument("--quick", action="store_true", help="without the machine's ceiling and the arms' memory")
    sub.add_argument(
        "--export-times", action="store_true", help="export every precision again and note how long it took"
    )
    sub.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="folder for the report, or its file (.html or .json) (default: BUNDLE/reports/bench-ARMS-DATE-TIME)",
    )
    sub.add_argument(
        "--slower", type=float, default=1.05, help="compare fails beyond this many times as long (default: %(default)s)"
    )
    sub.add_argument("--relative", action="store_true", help="compare every arm's time over the first arm's of its run")
    sub.add_argument("--anyway", action="store_true", help="compare results of other models or machines all the same")


def add_numbers(sub: argparse.ArgumentParser, flag: str, metavar: str, what: str) -> None:
    sub.add_argument(flag, action=Listed, fits=str.isdecimal, item=int, metavar=metavar, help=what)


def is_case(word: str) -> bool:
    return re.fullmatch(r"\d+(x\d+){3}", word) is not None


def is_peer(word: str) -> bool:
    """All, or a name, whose second word may be a precision."""
    return word.partition(" ")[0] in ("all", "ctranslate2", "transformers", "optimum", "openvino")


def run_arms(
    args: argparse.Namespace,
    references: Callable[[argparse.Namespace], dict[str, list[str]] | None],
    progress: Callable[[argparse.Namespace], Progress],
) -> int:
    """Times what is asked for; the report is there after the first case, and has every finished one at any time."""
    from seq2engine.benchmarks.checks import Asked, check_bench
    from seq2engine.benchmarks.machine import usable_cores
    from seq2engine.benchmarks.report.page import bench_html, bench_table
    from seq2engine.benchmarks.runner import bench_bundle
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.default_precision import shared_precision

    if len(args.bundle) > 1:
        raise UsageError(f"{len(args.bundle)} bundles, expected one; or two results: bench compare BEFORE AFTER")
    bundle = open_bundle(args.bundle[0])
    cases, wrong = cases_from_args(args, bundle.config)
    if args.count is not None and args.references is None:
        wrong.append("--count without --references, of which it is the number")
    precisions = args.precision or [shared_precision(bundle, args.backend)]
    threads = usable_cores() if args.threads is None else args.threads
    asked = Asked(
        args.backend,
        precisions,
        cases,
        args.rounds,
        threads,
        args.scenario,
        args.bound,
        args.peers,
        provider=args.provider,
        draft=args.draft,
    )
    check_bench(bundle, asked, wrong)
    files = report_files(bundle.root, "bench", " ".join((*args.backend, *precisions)), args.out)
    kept: list[BenchResult] = []

    def keep(result: BenchResult) -> None:
        files.write(bench_html(result), result.to_json())
        kept.append(result)

    try:
        result = bench_bundle(
            bundle,
            backends=args.backend,
            precisions=precisions,
            cases=cases,
            rounds=args.rounds,
            threads=threads,
            progress=progress(args),
            references=references(args),
            provider=args.provider,
            draft=args.draft,
            peers=args.peers,
            quick=args.quick,
            export_times=args.export_times,
            scenarios=args.scenario,
            bound_ms=args.bound,
            keep=keep,
        )
    except (KeyboardInterrupt, Seq2EngineError):
        if kept:
            print(f"{kept[-1].interrupted}, which are in: {files.page}", file=sys.stderr)
        raise
    files.write(bench_html(result), result.to_json())
    print(result.to_json().rstrip() if args.json else f"{bench_table(result)}\nreport: {files.page}")
    return 0


def cases_from_args(args: argparse.Namespace, config: ModelConfig) -> tuple[tuple[Case, ...], list[str]]:
    """The cases that the flags name, and what is wrong with those flags."""
    from seq2engine.benchmarks.cases import (
        case_text_problems,
        cases_at_lengths,
        cases_for,
        cases_from_grid,
        cases_from_text,
    )

    grid = {size: getattr(args, flag) for flag, size in AXES.items() if getattr(args, flag)}
    wrong = case_text_problems(args.case or [])
    if args.case and (grid or args.sweep):
        wrong.append("cases and a sweep, expected either; leave out --case, or the sizes of the sweep")
    if wrong:
        return (), wrong
    if args.case:
        cases = cases_from_text(args.case)
    else:
        cases = cases_from_grid(config, grid) if grid or args.sweep else cases_for(config)
    return cases_at_lengths(cases, args.lengths) if args.lengths else cases, []


def compare_benches(args: argparse.Namespace) -> int:
    """0 where nothing is slower for sure, else 1."""
    from seq2engine.benchmarks.comparison import compare_results, comparison_table
    from seq2engine.benchmarks.result_files import result_from_path

    if len(args.bundle) != 3:
        raise UsageError("compare takes two results, as in: seq2engine bench compare BEFORE.json AFTER.json")
    before, after = (result_from_path(Path(name)) for name in args.bundle[1:])
    found = compare_results(before, after, args.slower, args.relative, args.anyway)
    print(found.to_json().rstrip() if args.json else comparison_table(found))
    return 0 if found else 1
