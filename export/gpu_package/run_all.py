"""Builds what is not built yet, verifies, decodes, times, and writes report.json and report.html to send back.

    python run_all.py

Exit code 0: everything passed. 1: something failed or could not be run; the report names it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from package_files import (
    FLAVOURS,
    HERE,
    PackageError,
    built_flavours,
    load_for,
    load_tensorrt,
    read_engines,
    read_package,
)

# First: it reports in one line what is not installed.
# isort: split
from cuda_memory import Cuda, CudaError
from engine_building import build_engines
from machine import gpu_facts, machine_facts, machine_line
from model_engines import ModelEngines
from report import page
from timing import timed, timing_text
from tokenizer import read_tokenizer
from trt_engine import EngineFailed
from verify import Verification, decode_samples

ROUNDS = 20


def main(argv: Sequence[str] | None = None, cudart: Any = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Builds, verifies, decodes, times and reports.")
    parser.add_argument("--flavour", choices=FLAVOURS, help="(default: of the engines here, else the one installed)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed runs a batch size (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the report (default: this one)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}, expected at least 1")
    run = RunAll(args.flavour, args.rounds, cudart)
    run.everything()
    found = run.found()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (args.out / "report.html").write_text(page(found), encoding="utf-8")
    except OSError as error:
        print(f"error: the report cannot be written ({error}); name another folder with: --out", file=sys.stderr)
        return 1
    print(f"{'PASS' if found['passed'] else 'FAIL'}: {found['summary']}")
    print(f"send back: {args.out / 'report.html'} and {args.out / 'report.json'}")
    return 0 if found["passed"] else 1


class StageFailed(Exception):
    """A stage without which the next ones cannot be run has failed; it was reported already."""


class RunAll:
    """One stage after the other; a failed one is a line of the report, and the rest runs if it can."""

    def __init__(self, flavour: str | None, rounds: int, cudart: Any):
        self.flavour, self.rounds, self.cudart = flavour, rounds, cudart
        self.stages: list[dict[str, Any]] = []
        self.machine: dict[str, str] = {}
        self.engines: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []
        self.timing: list[dict[str, Any]] = []

    def everything(self) -> None:
        try:
            package = self.stage("files", read_package, lambda found: (True, f"{len(found['files'])} are whole"))
            folder, built = self.stage("engines", lambda: self.built(package), engines_text)
            self.engines = built
            trt = self.stage("TensorRT", lambda: load_for(built), lambda found: (True, f"{found.__version__}"))
            with self.stage("GPU", lambda: Cuda(self.cudart), lambda found: (True, found.capability)) as cuda:
                self.machine = machine_facts(package, trt, cuda, built)
                print(machine_line(self.machine), flush=True)
                with self.stage("open", lambda: ModelEngines(package, cuda, trt, folder, built), opened) as model:
                    self.over(model, cuda)
        except StageFailed:
            return

    def over(self, model: ModelEngines, cuda: Cuda) -> None:
        self.checks = self.also("parity", lambda: Verification(model).run(), counted)
        if model.package["decode"]["refused"]:
            why = f"left out: the model asks for {model.package['decode']['refused']}, which decode.py does not do"
            self.stages.append({"name": "decodes", "passed": True, "detail": why, "seconds": 0.0})
        else:
            tokenizer = lambda: read_tokenizer(model.package)  # noqa: E731
            self.decodes = self.also("decodes", lambda: decode_samples(model, tokenizer()), counted)
        self.timing = self.also("timing", lambda: timed(model, self.rounds), times_text)
        after = gpu_facts(cuda.bus_id)
        self.machine |= {f"{name} after timing": value for name, value in after.items() if "clock" in name}

    def built(self, package: Any) -> tuple[Path, Any]:
        there = built_flavours()
        if not there or (self.flavour is not None and self.flavour not in there):
            build_engines(package, load_tensorrt(self.flavour), (), force=False)
        return read_engines(package, self.flavour)

    def stage(self, name: str, work: Callable[[], Any], describe: Callable[[Any], tuple[bool, str]]) -> Any:
        """What the work returns; its outcome is printed and kept for the report."""
        started = time.monotonic()
        found = None
        try:
            found = work()
            passed, detail = describe(found)
        except (PackageError, EngineFailed, CudaError, OSError) as error:
            passed, detail = False, str(error)
        seconds = round(time.monotonic() - started, 2)
        self.stages.append({"name": name, "passed": passed, "detail": detail, "seconds": seconds})
        print(f"{'PASS' if passed else 'FAIL'}  {name:<10}  {detail}", flush=True)
        if found is None:
            raise StageFailed
        return found

    def also(self, name: str, work: Callable[[], Any], describe: Callable[[Any], tuple[bool, str]]) -> Any:
        """An optional stage; returns None if it could not be run."""
        try:
            return self.stage(name, work, describe)
        except StageFailed:
            return []

    def found(self) -> dict[str, Any]:
        failed = [stage["name"] for stage in self.stages if not stage["passed"]]
        whole = len(self.stages) == STAGES
        outcome = f"failed: {', '.join(failed)}" if failed else "none failed"
        summary = f"{len(self.stages)} of {STAGES} stages run, {outcome}"
        return {
            "title": "Engines on a GPU: parity, decodes, timing",
            "passed": whole and not failed,
            "summary": summary,
            "stages": self.stages,
            "machine": self.machine,
            "engines": self.engines,
            "checks": self.checks,
            "decodes": self.decodes,
            "timing": self.timing,
        }


STAGES = 8  # files, engines, TensorRT, GPU, open, parity, decodes, timing


def engines_text(found: tuple[Path, Any]) -> tuple[bool, str]:
    built = found[1]
    size = sum(entry["bytes"] for entry in built["engines"].values()) / 1e6
    return True, f"{built['flavour']} {built['version']}, {size:.1f} MB, built {built['built']}"


def opened(model: ModelEngines) -> tuple[bool, str]:
    return True, " and ".join(model.engines)


def counted(rows: Sequence[Any]) -> tuple[bool, str]:
    passed = sum(row["passed"] for row in rows)
    wrong = [f"; {row.get('check') or row['source'][:40]}: {row['detail']}" for row in rows if not row["passed"]]
    return passed == len(rows), f"{passed} of {len(rows)} passed{''.join(wrong[:3])}"


def times_text(rows: Sequence[Any]) -> tuple[bool, str]:
    lines = (f"{row['batch']} at a time: {timing_text(row['decode'])} ms" for row in rows)
    return True, f"{rows[0]['steps']} steps; " + "; ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
