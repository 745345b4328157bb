"""All checks that need a GPU, in one go: build, parity, time of a token, benchmark, tests; one report to send back.

    python -m seq2engine.commands.pipeline.gpu_check OUT      as `make gpu-check` does

Each stage has a verdict, and one that fails does not stop the others. Results are kept until the report is
written: after a kill, the same command continues, and repeats what has failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.machine import environment, load_of_others, usable_cores
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.report.page import bench_table
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.benchmarks.timers.step_times import WaitClock, step_table, step_times
from seq2engine.common.about import about_rows
from seq2engine.common.json_files import read_object, read_text, typed_from_json
from seq2engine.common.page import about_html, badge_html, block_html, heading_html, note_html, page_html, table_html
from seq2engine.common.tensorrt_module import FLAVOURS, load_tensorrt
from seq2engine.errors import Seq2EngineError, SessionError
from seq2engine.export.artifact.bundle import Bundle, open_bundle, write_text
from seq2engine.export.artifact.gpu_support import unsupported
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.contract import PRECISIONS
from seq2engine.export.engines.build_options import BuildOptions
from seq2engine.export.engines.to_engine import default_ranges, engines_from_onnx
from seq2engine.exporting import onnx_from_model
from seq2engine.inspection.describe import engine_text
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.shipped import shipped_checkpoint
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.report.page import parity_table
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.trt.device import CudaDevice, Device
from seq2engine.runtime.trt.selection import choose_engine, runs_on
from seq2engine.runtime.trt.session import TrtSession

TIMED = ("fp32", "fp16", "int8")  # if the GPU runs them; ONNX Runtime runs these on the CPU beside it
BEAM = 4
REHEARSAL = "A rehearsal without a GPU: engines were computed by a stand-in on the CPU. No number here is of a GPU."
TESTS = Path(__file__).resolve().parents[3] / "tests"

Build = Callable[[Bundle, Sequence[str], ShapeRanges, str, str], Passport]


@dataclass(frozen=True)
class Stage:
    """What one stage found: a verdict, text for people, and values for programs."""

    name: str
    passed: bool
    text: str
    values: Any = None


class PassedStages:
    """Results of stages that have passed, one file each in OUT/stages. They are removed after the report, and for
    another machine or version (`facts`)."""

    def __init__(self, folder: Path, facts: Any):
        self.folder = folder
        before = folder / "facts.json"
        if not before.is_file() or read_text(before) != json.dumps(facts):
            self.forget()
            write_text(before, json.dumps(facts))

    def stage(self, name: str, work: Callable[[], Stage]) -> Stage:
        """The stage as it was done before, or done now."""
        path = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
        if path.is_file():
            print(f"{name}: passed before", flush=True)
            return typed_from_json(Stage, read_object(path))
        stage = attempt(name, work)
        if stage.passed:
            write_text(path, json.dumps(dataclasses.asdict(stage), default=str))
        return stage

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def built(bundle: Bundle, targets: Sequence[str], ranges: ShapeRanges, precision: str, flavour: str) -> Passport:
    return engines_from_onnx(bundle, targets, ranges, precision, BuildOptions(flavour=flavour, force=True))


def gpu_check(
    out: Path,
    device: Device | None = None,
    flavours: Sequence[str] | None = None,
    build: Build = built,
    tests: Path | None = TESTS,
    rounds: int = 20,
    count: int = 64,
    precisions: Sequence[str] = tuple(PRECISIONS),
    rehearsal: bool = False,
) -> list[Stage]:
    """Runs all stages for every flavour of TensorRT that is installed and writes OUT/gpu-check.{html,json}.

    Precisions that this GPU cannot run are left out. A `rehearsal` has no GPU behind its device,
    and its report states that.
    """
    device = device or CudaDevice()
    flavours = installed() if flavours is None else flavours
    stages = [machine_stage(device, flavours)]
    facts = {name: stages[0].values[name] for name in ("gpu", "capability", *flavours)}
    done = PassedStages(out / "stages", {**facts, "rehearsal": rehearsal, "precisions": list(precisions)})
    for flavour in flavours:
        able = precisions_on(device.capability, flavour, precisions)
        stages += flavour_stages(out / flavour, device, flavour, build, rounds, count, able, done)
    if tests is not None:
        stages.append(done.stage("tests that need a GPU", partial(tests_stage, tests, out)))
    write_text(out / "gpu-check.html", report_html(stages, rehearsal))
    write_text(out / "gpu-check.json", report_json(stages, rehearsal))
    done.forget()
    return stages


def precisions_on(capability: str, flavour: str, wanted: Sequence[str]) -> list[str]:
    """Those of the precisions that a GPU runs: what is known of TensorRT-RTX, but `tensorrt` has fp32 everywhere."""
    always = ("fp32",) if flavour == "tensorrt" else ()
    return [precision for precision in wanted if precision in always or unsupported(capability, precision) is None]


def flavour_stages(
    folder: Path,
    device: Device,
    flavour: str,
    build: Build,
    rounds: int,
    count: int,
    precisions: Sequence[str],
    done: PassedStages,
) -> Iterator[Stage]:
    """The shipped model, built, compared and timed with one TensorRT."""
    exported = done.stage(f"{flavour}: export", partial(export_stage, folder, precisions))
    yield exported
    if not exported.passed:
        return
    bundle = open_bundle(folder)
    targets = [device.capability] if flavour == "tensorrt_rtx" else []
    for precision in precisions:
        stages = {
            "build": partial(build_stage, build, bundle, targets, precision, flavour),
            "parity": partial(parity_stage, bundle, precision, count),
            "time of a token": partial(steps_stage, bundle, precision, device, rounds),
        }
        for name, stage in stages.items():
            yield done.stage(f"{flavour} {precision}: {name}", stage)
    timed = [precision for precision in precisions if precision in TIMED]
    yield done.stage(f"{flavour}: benchmark", partial(bench_stage, bundle, rounds, timed))


def export_stage(folder: Path, precisions: Sequence[str]) -> Stage:
    shipped = shipped_checkpoint("g2p")
    bundle = onnx_from_model(load_checkpoint(shipped), folder, precisions, force=True, companions=shipped)
    return Stage("export", True, f"{', '.join(bundle.precisions)} of shipped:g2p")


def installed() -> list[str]:
    found, reasons = [], []
    for flavour in FLAVOURS:
        try:
            load_tensorrt(flavour)
            found.append(flavour)
        except SessionError as error:
            reasons.append(str(error))
    if not found:
        raise SessionError("; ".join(reasons))
    return found


def attempt(name: str, stage: Callable[[], Stage]) -> Stage:
    """The result of a stage, or its error."""
    print(f"{name} ...", flush=True)
    try:
        return dataclasses.replace(stage(), name=name)
    except Exception as error:  # any error belongs in the report that is sent back
        return Stage(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")


def machine_stage(device: Device, flavours: Sequence[str]) -> Stage:
    values = {
        "gpu": device.name,
        "capability": device.capability,
        **{flavour: str(load_tensorrt(flavour).__version__) for flavour in flavours},
        **dataclasses.asdict(environment(usable_cores(), load_of_others())),
    }
    return Stage("machine", True, "\n".join(f"{name}: {value}" for name, value in values.items()), values)


def build_stage(build: Build, bundle: Bundle, targets: Sequence[str], precision: str, flavour: str) -> Stage:
    ranges = dataclasses.replace(default_ranges(bundle.config), beam=Range(1, BEAM, BEAM))
    passport = build(bundle, targets, ranges, precision, flavour)
    return Stage("build", True, engine_text(passport, bundle.config), json.loads(passport.to_json()))


def parity_stage(bundle: Bundle, precision: str, count: int) -> Stage:
    result = parity_of(bundle, "tensorrt", precision, options=ParityOptions(beam=BEAM, count=count))
    return Stage("parity", bool(result), parity_table(result), json.loads(result.to_json()))


def steps_stage(bundle: Bundle, precision: str, device: Device, rounds: int) -> Stage:
    """Time per token, with the time of its launches alone, the bytes over the bus, and the host's share."""
    folder, passport = choose_engine(bundle, precision, runs_here=partial(runs_on, device=device))
    clock = WaitClock(device)
    cases = (Case("one", 1, 1, 9, 9), Case("32", 32, 1, 9, 9), Case("32x4", 32, BEAM, 9, 9))
    with TrtSession(load_tensorrt(passport.flavour), clock, folder, passport, bundle.config) as session:
        times = step_times(session, clock, passport, cases, rounds)
    return Stage("steps", True, step_table(times), [{**dataclasses.asdict(one), "bound": one.bound} for one in times])


def bench_stage(bundle: Bundle, rounds: int, precisions: Sequence[str]) -> Stage:
    cases = (Case("1x1x9x9", 1, 1, 9, 9), Case("8x4x9x9", 8, BEAM, 9, 9), Case("32x4x9x9", 32, BEAM, 9, 9))
    result = bench_bundle(bundle, BenchOptions(("onnxruntime", "tensorrt"), precisions, cases, rounds, quick=True))
    return Stage("benchmark", True, bench_table(result), json.loads(result.to_json()))


def tests_stage(tests: Path, out: Path) -> Stage:
    """The tests marked `gpu`; those that were skipped are listed with their reasons."""
    report = out / "gpu-tests.xml"
    command = [sys.executable, "-m", "pytest", str(tests), "-m", "gpu", "-q", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)
    cases = list(xml.parse(report).iter("testcase")) if report.is_file() else []
    found = [(f"{case.get('classname')}.{case.get('name')}", *outcome(case)) for case in cases]
    text = "\n".join(f"{verdict}: {name}{': ' + reason if reason else ''}" for name, verdict, reason in found)
    report.unlink(missing_ok=True)
    passed = done.returncode == 0 and any(verdict == "passed" for _, verdict, _ in found)
    return Stage("tests", passed, text or done.stdout + done.stderr, [list(row) for row in found])


def outcome(case: xml.Element) -> tuple[str, str]:
    for kind, verdict in (("failure", "FAILED"), ("error", "FAILED"), ("skipped", "skipped")):
        if (node := case.find(kind)) is not None:
            return verdict, " ".join((node.get("message") or "").split())[:300]
    return "passed", ""


def report_html(stages: Sequence[Stage], rehearsal: bool = False) -> str:
    """One self-contained page."""
    rows = [(stage.name, badge_html(*verdict_of(stage))) for stage in stages]
    about = about_rows("shipped:g2p", command="make gpu-check")
    blocks: list[str] = [about_html(about), note_html(summary(stages)), table_html(("stage", "verdict"), rows)]
    if rehearsal:
        blocks.insert(0, note_html(REHEARSAL))
    for stage in stages:
        blocks += [heading_html(stage.name), block_html("printed", stage.text)]
    return page_html("GPU check" + (" (rehearsal)" if rehearsal else ""), str(stages[0].values["gpu"]), blocks)


def report_json(stages: Sequence[Stage], rehearsal: bool = False) -> str:
    values = {
        "rehearsal": rehearsal,
        "passed": all(stage.passed for stage in stages),
        "stages": [dataclasses.asdict(s) for s in stages],
    }
    return json.dumps(values, indent=1, default=str) + "\n"


def verdict_of(stage: Stage) -> tuple[str, str]:
    return ("passed", "good") if stage.passed else ("FAILED", "bad")


def summary(stages: Sequence[Stage]) -> str:
    failed = [stage.name for stage in stages if not stage.passed]
    return f"{len(stages)} stages, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", allow_abbrev=False, description="Builds, compares and times on this GPU."
    )
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    try:
        stages = gpu_check(args.out)
    except Seq2EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for stage in stages:
        print(f"{verdict_of(stage)[0]}  {stage.name}" + ("" if stage.passed else f": {stage.text.splitlines()[0]}"))
    print(f"send back: {args.out / 'gpu-check.html'} and {args.out / 'gpu-check.json'}")
    return 0 if all(stage.passed for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
