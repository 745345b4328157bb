"""The machine that a measurement was taken on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seq2engine.runtime.kernels.library import instructions
from seq2engine.runtime.threads import usable_cores

LIBRARIES = {  # what is shown -> the distributions it may come from
    "seq2engine": ("seq2engine",),
    "torch": ("torch",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "onnx": ("onnx",),
    "numpy": ("numpy",),
}
SOURCES = Path(__file__).resolve().parent.parent  # where .git is, if these sources are a working copy
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimd", "sve")

COUNTERS = Path("/proc/stat")
WATCHED = 0.3  # seconds; counters have ticks of 10 ms

SPIN = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == int(sys.argv[2]):  # ends with the process that started it
    for _ in range(1000000):
        pass
"""


@dataclass(frozen=True)
class Environment:
    """`load_before` and `load_after` are `load_of_others`, None where the system does not say."""

    cpu: str
    features: tuple[str, ...]  # instruction sets that decide which kernels run
    cores: int
    threads: int
    load_before: float | None
    load_after: float | None
    platform: str
    python: str
    libraries: dict[str, str]
    governor: str | None = None  # how the clock rate is chosen; None where the system has no such file
    neighbours: int = 0  # busy processes that were started beside the arms, each on a core of its own
    commit: str | None = None  # of this package's sources, with "-dirty" appended if they were changed; None if unknown

    @property
    def busy(self) -> bool:
        """Was something else running when the benchmark began?"""
        return self.load_before is not None and self.load_before > self.cores / 2


def environment(threads: int, load_before: float | None, neighbours: int = 0) -> Environment:
    """This machine, as it is at the end of a run that began under `load_before`."""
    cpu, features = processor()
    return Environment(
        cpu=cpu,
        features=features,
        cores=usable_cores(),
        threads=threads,
        load_before=load_before,
        load_after=load_of_others(),
        platform=platform.platform(),
        python=platform.python_version(),
        libraries={
            **{name: library_version(names) for name, names in LIBRARIES.items()},
            "fused operators": instructions(),
        },
        governor=governor(),
        neighbours=neighbours,
        commit=commit(),
    )


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Busy processes, each on a core of its own, while the block runs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    with ExitStack() as stack:
        for number in range(count):
            core = cores[number % len(cores)]
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN, str(core), str(os.getpid())]))
            stack.callback(process.kill)
        yield


def governor(setting: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) -> str | None:
    return setting.read_text().strip() if setting.is_file() else None


def commit(sources: Path = SOURCES) -> str | None:
    """The git commit of these sources; None if they are not a working copy, or without git."""
    if not (sources / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(sources), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def load_of_others(counters: Path = COUNTERS, seconds: float = WATCHED) -> float | None:
    """How many of this process's cores are in use while it waits for a moment.

    An average over the last minute would count the benchmark that ended just before this one.
    """
    before = core_times(counters)
    if not before:
        return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    time.sleep(seconds)
    after = core_times(counters)
    shares = [used_share(before[core], after[core]) for core in before if core in after]
    return round(sum(shares), 2)


def core_times(counters: Path) -> dict[int, tuple[int, int]]:
    """Of each core of this process: its ticks in all, and those that it was idle; empty where nothing counts them."""
    if not counters.is_file() or not hasattr(os, "sched_getaffinity"):
        return {}
    found = {}
    for line in counters.read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in os.sched_getaffinity(0):
            numbers = [int(count) for count in ticks[:8]]  # user, nice, system, idle, iowait, irq, softirq, steal
            found[int(name[3:])] = sum(numbers), sum(numbers[3:5])
    return found


def used_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    passed, idle = (later - earlier for earlier, later in zip(before, after, strict=True))
    return 1 - idle / passed if passed else 0.0


def library_version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def processor(listing: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """The processor's name and those of its features that matter here."""
    if not listing.is_file():
        return platform.processor() or platform.machine(), ()
    fields: dict[str, str] = {}
    for line in listing.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())  # all processors are alike
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name") or platform.machine(), tuple(name for name in FEATURES if name in flags)
