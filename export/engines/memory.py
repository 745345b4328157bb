"""How much memory there is, and how much some work took at its peak. Known on Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS, RESET, MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # bytes, or "max" for no limit
RESET_PEAK = "5"


class Peak:
    """Bytes that the work took beyond what the process held before; 0 where it is unknown."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    peak = Peak()
    before = kilobytes(STATUS, "VmRSS")
    try:
        RESET.write_text(RESET_PEAK)
    except OSError:  # not Linux, or not allowed: the peak is that of the whole process so far, which is not the answer
        yield peak
        return
    yield peak
    if before is not None and (most := kilobytes(STATUS, "VmHWM")) is not None:
        peak.bytes = max(most - before, 0) * 1024


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, in a container at most its limit; None where it is unknown."""
    found = kilobytes(MACHINE, "MemAvailable")
    if found is None:
        return None
    limit = CONTAINER.read_text().strip() if CONTAINER.is_file() else ""
    return min(found * 1024, int(limit)) if limit.isdecimal() else found * 1024


def kilobytes(path: Path, field: str) -> int | None:
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    return None
