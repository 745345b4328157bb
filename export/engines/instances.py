"""How many processes serve a model, and with how many rows: from its sizes, and from memory and cores. Pure functions.

A process batches across requests, so that one keeps a GPU busy, and all the cores that its threads are good for. A
second one would read the weights again for half of the rows. Only a model so small that it uses few threads is served
by several processes on a machine of many cores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from seq2engine.errors import RequestError

from ..artifact.bundle import Bundle
from ..artifact.profiles import Range, ShapeRanges
from .plan import state_bytes

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Beside its state a process holds, about (docs/LOG.md): on the CPU its weights twice, as kernels want some of them in
# another order, and the interpreter with its libraries; on a GPU its weights once, and CUDA's own.
CPU_COPIES, CPU_PROCESS = 2, 250_000_000
GPU_COPIES, GPU_PROCESS = 1, 500_000_000


@dataclass(frozen=True)
class Machine:
    """What there is to serve with: bytes that are free, on a GPU those of each; None where that is not known."""

    cores: int
    memory: int | None
    gpu: bool = False


@dataclass(frozen=True)
class InstancePlan:
    """`instances` are processes, on a GPU of each GPU; `bytes` is what one of them takes, about."""

    instances: int
    rows: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class InstanceSizes:
    """Bytes of the weights, and of all that one row keeps at its longest."""

    weights: int
    row: int

    def fixed(self, gpu: bool) -> int:
        return (GPU_COPIES * self.weights + GPU_PROCESS) if gpu else (CPU_COPIES * self.weights + CPU_PROCESS)


def weight_bytes(bundle: Bundle, precision: str) -> int:
    """Of both graphs."""
    return sum(sum(entry.census["weight_bytes"].values()) for entry in bundle.manifest.graphs[precision].values())


def item_bytes(bundle: Bundle, precision: str) -> int:
    """Of a number in the KV cache."""
    return ITEM_BYTES.get(bundle.specs(precision)["decoder_step"].output("new_self_k.0").dtype, 2)


def sizes_from_bundle(bundle: Bundle, precision: str, ranges: ShapeRanges) -> InstanceSizes:
    """For requests of up to these sizes."""
    one = dataclasses.replace(ranges, batch=Range(1, 1, 1))
    row = state_bytes(bundle.config, one, bundle.cache_form, item_bytes(bundle, precision))
    return InstanceSizes(weight_bytes(bundle, precision), row)


def plan_instances(
    sizes: InstanceSizes,
    machine: Machine,
    threads: int,
    most_rows: int,
    rows: int | None = None,
    instances: int | None = None,
) -> InstancePlan:
    """`threads` are those of a process, `most_rows` the most that it may decode together. `rows` and `instances` that
    a user gives are taken unchanged (None: planned)."""
    fixed = sizes.fixed(machine.gpu)
    filling = 1 if machine.gpu else max(1, machine.cores // threads)
    wanted = filling if instances is None else instances
    if rows is None:
        rows = rows_that_fit(sizes, machine, most_rows, wanted if instances is not None else 1)
    size = fixed + rows * sizes.row
    holds = None if machine.memory is None else machine.memory // size
    chosen = wanted if instances is not None or holds is None else max(1, min(wanted, holds))
    why = reason_of(machine, threads, chosen, filling, given=instances is not None)
    room = "memory is not known" if holds is None else f"of {gigabytes(machine.memory)} that are free, for {holds}"
    memory = f"{rows} rows and the weights take about {gigabytes(size)} ({room})"
    return InstancePlan(chosen, rows, size, f"{why}; {memory}")


def rows_that_fit(sizes: InstanceSizes, machine: Machine, most: int, instances: int) -> int:
    """As many as may be, unless memory holds fewer in each of so many processes; none at all is an error."""
    if machine.memory is None:
        return most
    fixed = sizes.fixed(machine.gpu)
    found = (machine.memory // instances - fixed) // max(sizes.row, 1)
    if found < 1:
        raise RequestError(
            f"{instances} instance{'s' if instances > 1 else ''} of one row take about "
            f"{gigabytes(instances * (fixed + sizes.row))}, and {gigabytes(machine.memory)} are free; take a smaller "
            "precision, or give --instances and --batch to write it all the same"
        )
    return int(min(most, found))


def reason_of(machine: Machine, threads: int, chosen: int, filling: int, given: bool) -> str:
    each = " of each GPU" if machine.gpu else ""
    what = f"{chosen} process{'es' if chosen > 1 else ''}{each}"
    if given:
        return f"{what}, as asked for"
    if machine.gpu:
        return f"{what}: it batches across requests, and others would divide the rows among them"
    used = f"{what} of {threads} thread{'s' if threads > 1 else ''} on {machine.cores} cores"
    if chosen < filling:
        return f"{used}: memory holds no more"
    if chosen == 1:
        return f"{used}: it batches across requests, and fills them"
    return f"{used}: one would leave cores idle"


def gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
