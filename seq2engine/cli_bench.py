"""`seq2engine bench`: arms against each other, and `bench compare`: one result against an older one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from seq2engine.cli_lists import MOST_PRECISE, Listed, add_precisions, one_of
from seq2engine.errors import RequestError
from seq2engine.progress import Progress

BACKENDS = ("torch", "onnxruntime", "tensorrt")
COMPARE = "compare"  # in place of a bundle; a bundle of that name is ./compare
AXES = {"batch": "batch", "beam": "beam", "source": "source", "output": "target"}  # flag -> size of a case


def add_bench_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "bundle", nargs="+", metavar="BUNDLE", help="bundle folder; or: compare BEFORE.json AFTER.json, two results"
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
    from seq2engine.benchmarks.cases import cases_at_lengths, cases_for, cases_from_grid, cases_from_text
    from seq2engine.benchmarks.report import bench_html, bench_table
    from seq2engine.benchmarks.runner import bench_bundle
    from seq2engine.export.bundle import open_bundle, write_text

    if len(args.bundle) > 1:
        raise RequestError(f"{len(args.bundle)} bundles, expected one; or two results: bench compare A.json B.json")
    bundle = open_bundle(args.bundle[0])
    grid = {size: getattr(args, flag) for flag, size in AXES.items() if getattr(args, flag)}
    if args.case and (grid or args.sweep):
        raise RequestError("cases and a sweep, expected either; leave out --case, or the sizes of the sweep")
    if args.case:
        cases = cases_from_text(args.case)
    else:
        cases = cases_from_grid(bundle.config, grid) if grid or args.sweep else cases_for(bundle.config)
    result = bench_bundle(
        bundle,
        backends=args.backend,
        precisions=args.precision,
        cases=cases_at_lengths(cases, args.lengths) if args.lengths else cases,
        rounds=args.rounds,
        threads=args.threads,
        progress=progress(args),
        references=references(args),
        provider=args.provider,
        draft=args.draft,
        peers=args.peers,
        quick=args.quick,
        export_times=args.export_times,
        scenarios=args.scenario,
        bound_ms=args.bound,
    )
    report = bundle.root / "reports" / "bench.html"
    write_text(report, bench_html(result))
    write_text(report.with_suffix(".json"), result.to_json())
    print(result.to_json().rstrip() if args.json else f"{bench_table(result)}\nreport: {report}")
    return 0


def compare_benches(args: argparse.Namespace) -> int:
    """0 where nothing is slower for sure, else 1."""
    from seq2engine.benchmarks.comparison import compare_results, comparison_table, result_from_file

    if len(args.bundle) != 3:
        raise RequestError("compare takes two results, as in: seq2engine bench compare BEFORE.json AFTER.json")
    before, after = (result_from_file(Path(name)) for name in args.bundle[1:])
    found = compare_results(before, after, args.slower, args.relative, args.anyway)
    print(found.to_json().rstrip() if args.json else comparison_table(found))
    return 0 if found else 1
