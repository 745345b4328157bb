"""Fuzzing: mutated files and random command lines, each in a process of its own; outcomes are counted.

    make fuzz                           # 10 minutes, a new seed, which is printed
    make fuzz FUZZ="--minutes 60"       # longer
    make fuzz FUZZ="--cases 10000 --seed 3"
    make fuzz FUZZ="--seed 3 --only 17" # one case again, with its output shown
    make fuzz FUZZ=--unchanged          # every command over files that are not mutated: all must succeed

A case is decided by seed and number alone. It fails if it ends in a traceback, takes over 60 s, is killed by a signal,
takes memory that no file of it justifies, writes outside of its folder or runs something that a file holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import SystemRandom

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fuzzing.cases import Case, prepared_case, unchanged_cases
from support.fuzzing.loaded import load_commands, materials_in
from support.fuzzing.sandbox import GOOD, OUTCOMES, Outcome, Running, finished, start


def main() -> int:
    args = arguments()
    seed = SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        materials = materials_in(args.materials or Path(made) / "materials")
        root = Path(made) / "cases"
        if args.unchanged:
            cases, good = unchanged_cases(materials, root), ("ok",)
        else:
            numbers = iter(args.only) if args.only else numbers_until(args.first, args.cases, args.minutes)
            cases, good = (prepared_case(seed, n, materials, root / str(n), args.light) for n in numbers), GOOD
        counts, failed = run_cases(cases, good, root, args.jobs, bool(args.only))
    report(seed, counts, failed, args.out)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cases", type=int, help="this many cases instead of minutes")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", type=int, nargs="+", help="only these cases, with their output")
    parser.add_argument("--unchanged", action="store_true", help="every command over unmutated files: all must succeed")
    parser.add_argument("--light", action="store_true", help="without the commands that take seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at once")
    parser.add_argument("--materials", type=Path, help="folder to keep the unmutated files in, which saves a minute")
    parser.add_argument("--out", type=Path, help="JSON file of all failed cases")
    return parser.parse_args()


def numbers_until(first: int, cases: int | None, minutes: float) -> Iterator[int]:
    end, number = time.monotonic() + 60 * minutes, first
    while number < first + cases if cases is not None else time.monotonic() < end:
        yield number
        number += 1


def run_cases(
    cases: Iterator[Case], good: Sequence[str], root: Path, jobs: int, shown: bool = False
) -> tuple[Counter[str], list[tuple[Case, Outcome]]]:
    """Runs cases, some at once; returns how many had each outcome, and those that failed: that are not `good`."""
    run = load_commands()
    counts: Counter[str] = Counter()
    megabytes, cpu = 0, 0.0
    failed: list[tuple[Case, Outcome]] = []
    running: list[Running] = []
    left = True
    while left or running:
        while left and len(running) < jobs:
            if (case := next(cases, None)) is None:
                left = False
                break
            running.append(start(case.argv, root / str(case.number), case, run))
        for one in list(running):
            if (outcome := finished(one)) is None:
                continue
            running.remove(one)
            counts[outcome.kind] += 1
            megabytes, cpu = max(megabytes, outcome.megabytes), max(cpu, outcome.cpu)
            if outcome.kind not in good:
                failed.append((one.case, outcome))
                cause = f"{one.case.what}: {' '.join(one.case.argv)[:200]}"
                print(f"{one.case.number} {outcome.kind}: {outcome.detail} <- {cause}", flush=True)
            if shown:
                print(f"{one.case}\n{outcome}\n{(one.folder / 'stderr').read_text(errors='replace')}", flush=True)
            shutil.rmtree(one.folder, ignore_errors=True)
            if sum(counts.values()) % 500 == 0:
                print(f"{sum(counts.values())} cases: {dict(counts)}", flush=True)
        time.sleep(0.003)
    print(f"the largest case took {megabytes} MB, the longest {cpu:.1f} s of a core", flush=True)
    return counts, failed


def report(seed: int, counts: Counter[str], failed: list[tuple[Case, Outcome]], out: Path | None) -> None:
    print(f"seed {seed}: {sum(counts.values())} cases: " + ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES))
    groups = Counter(f"{outcome.kind}: {outcome.detail}" for _, outcome in failed)
    for name, count in groups.most_common():
        print(f"{count:5} {name}")
    if out is not None:
        values = [{**dataclasses.asdict(case), **dataclasses.asdict(outcome)} for case, outcome in failed]
        out.write_text(json.dumps({"seed": seed, "counts": counts, "failed": values}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
