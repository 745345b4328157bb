"""Made-up benchmark results, so that every verdict on them can be worked out by hand."""

from __future__ import annotations

import dataclasses

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.machine import Environment
from seq2engine.benchmarks.result import PARTS, Arm, ArmResult, BenchResult, CaseResult, Measure
from seq2engine.benchmarks.timed_decode import CacheCounts
from seq2engine.benchmarks.timing import Samples, ratio_interval
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.quality.metrics import ErrorRates, Quality

SPLIT = {"encoder": 1, "step": 4, "search": 2, "compaction": 1, "copies": 0}  # eighths
CASE = Case("pair", batch=2, beam=4, source=8, target=16)


def samples(*milliseconds):
    return Samples(tuple(round(value * 1e6) for value in milliseconds))


def result(times, equal=None, load_before=0.1):
    """A result in which every part of an arm took the times given for that arm."""
    first = next(iter(times.values()))
    equal = dict.fromkeys(times, 2) | (equal or {})
    arms = {
        name: ArmResult(
            equal=equal[name],
            equal_timed=equal[name],
            parts={part: Measure(taken, 2 * 16, ratio_interval(first, taken)) for part in PARTS},
            cache=CacheCounts(steps=16, compactions=1, most_live=20, most_slots=24),
            split={piece: Samples(tuple(n * part // 8 for n in taken.nanoseconds)) for piece, part in SPLIT.items()},
        )
        for name, taken in times.items()
    }
    return BenchResult(
        bundle="out/run7",
        checkpoint_sha256="ab" * 32,
        model=dataclasses.asdict(PRESETS["tiny"]),
        cache_form="static",
        arms={name: Arm(*name.split(" "), bytes=2_500_000, load_ms=12.5) for name in times},
        failed={},
        cases=(CaseResult(CASE, arms),),
        ceiling=None,
        scenarios=(),
        quality={"torch fp32": (Quality("greedy", 7, ErrorRates(0.25, 0.5), ErrorRates(0.125, 0.375)),)},
        environment=Environment(
            "Some CPU", ("avx2",), 2, 1, load_before, 0.5, "Linux", "3.11.7", {"torch": "2.13.0", "numpy": "2.4.6"}
        ),
        rounds=8,
        warmup=2,
        seed=0,
        made_at="2026-01-02T03:04:05+00:00",
    )


STEADY = {"torch fp32": samples(*[8] * 8), "onnxruntime fp32": samples(*[4] * 8)}
NOISY = {"torch fp32": samples(8, 9, 7, 8, 9, 7, 8, 9), "onnxruntime fp32": samples(9, 7, 8, 7, 8, 9, 7, 8)}
