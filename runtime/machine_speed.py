"""How fast the threads of this machine are, measured once with ONNX Runtime and kept in the user's cache folder.

Graphs of plain products are timed with one thread and with all: one row by a large weight and by a small one
(bandwidth), many rows (products), and a chain of small products (what sharing costs), as ONNX Runtime shares nodes and
as a program of the kernel library shares its own. It takes some tenths of a second,
so it is done when the first batch comes whose decode depends on it. While something else runs on the machine, nothing
is kept, and the numbers are derived.
"""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import onnxruntime as ort

from seq2engine.common.measured import Measured, Value, user_cache
from seq2engine.model.config import ModelConfig

from .kernels.library import library
from .threads import (
    MachineSpeed,
    derived_speed,
    is_small,
    rows_for_threads,
    rows_per_worker,
    threads_for,
    usable_cores,
)

WIDTH, ROWS, CHAIN = 512, 256, 32  # of weights; rows where products bound; products in a chain
LARGE, SMALL = 64 << 20, 4 << 20  # bytes of weights: more than caches hold, and less
RUNS, LARGE_RUNS = 12, 4  # of a product in a pass, and of the one by the large weight, which takes longest
PASSES = 4  # at most, of which the fastest count
SETTLED = 1.1  # times as fast as the passes before: if nothing is by more, no further pass is needed
# Precisions whose workers have the candidate shortcut: in fp32 it takes a second copy of the output table.
WORKER_SHORTCUTS = ("w8a8",)
WHOLE_ROWS = 128  # rows from which on workers pay that make all logits where one session would not (docs/LOG.md)
RATES = ("memory", "cached", "products")  # of MachineSpeed: one thread's and that of all
PAIRS = (*RATES, "chained", "fused")
SCALES = 0.6  # of what all threads could do: less means that other processes have the cores
READS = 1.0  # times as much as one thread, all read at least: one may do all that a memory can


def sensible_threads(config: ModelConfig) -> int:
    """How many threads to decode this model with on this machine, if nobody says."""
    cores = usable_cores()
    return cores if cores <= 2 else threads_for(config, machine_speed(cores))  # of two, both: nothing to choose


def rows_of_threads(config: ModelConfig, threads: int, precision: str, kernels: bool = False) -> int:
    """Rows from which on so many threads decode this model faster than one on this machine."""
    if not is_small(config):
        return 1
    return rows_for_threads(config, threads, machine_speed(usable_cores()), weight_size(precision), kernels)


def rows_of_worker(config: ModelConfig, threads: int, precision: str, kernels: bool = False) -> int:
    """Rows of each of so many workers from which on they decode this model faster than all threads together."""
    rows = rows_per_worker(config, threads, machine_speed(usable_cores()), weight_size(precision), kernels)
    return rows if precision in WORKER_SHORTCUTS else max(WHOLE_ROWS, rows)


def weight_size(precision: str) -> int:
    """Bytes of a weight as it is multiplied."""
    return 1 if precision == "w8a8" else 4


@cache
def machine_speed(threads: int) -> MachineSpeed:
    """The speed of one and of that many threads: kept, measured and kept, or derived where it cannot be kept."""
    kept = Measured(user_cache() / "measured", {"what": "threads", "threads": threads, "passes": PASSES})
    found = speed_from_value(threads, kept.value())
    if found is None:
        found = measured_speed(threads)
        if found is not None:
            kept.keep({name: getattr(found, name) for name in PAIRS})
    return found or derived_speed(threads)


def speed_from_value(threads: int, value: Value | None) -> MachineSpeed | None:
    if value is None:
        return None
    pairs: dict[str, tuple[float, float]] = {}
    try:
        for name in PAIRS:
            alone, every = value[name]
            pairs[name] = float(alone), float(every)
    except (KeyError, TypeError, ValueError):  # damaged, or of another version: measured again
        return None
    return MachineSpeed(threads, **pairs) if min(min(pair) for pair in pairs.values()) > 0 else None


def measured_speed(threads: int) -> MachineSpeed | None:
    """The best of several passes, as another process may disturb one of them. None: the machine is busy."""
    best: MachineSpeed | None = None
    for _ in range(PASSES):
        found = speed_of_pass(threads)
        if found is None:
            continue
        before, best = best, found if best is None else best_of(best, found)
        if before is not None and settled(before, best):
            break
    return best


def best_of(one: MachineSpeed, other: MachineSpeed) -> MachineSpeed:
    """The highest rates and the shortest times of both, each on its own: what sharing costs is a difference of two
    times, and would be too small if it were taken from the pass that disturbed one thread most."""

    def best(name: str) -> tuple[float, float]:
        (alone, every), (other_alone, other_every) = getattr(one, name), getattr(other, name)
        pick = max if name in RATES else min
        return pick(alone, other_alone), pick(every, other_every)

    return MachineSpeed(one.threads, **{name: best(name) for name in PAIRS})


def settled(before: MachineSpeed, best: MachineSpeed) -> bool:
    """Whether the latest pass has found nothing that was much faster."""
    pairs = [zip(getattr(before, name), getattr(best, name), strict=True) for name in RATES]
    return all(now <= SETTLED * then for pair in pairs for then, now in pair)


def speed_of_pass(threads: int) -> MachineSpeed | None:
    """None: all threads are hardly faster than one, or slower where both read memory."""
    alone, together = product_session(1, 1), product_session(threads, 1)
    square, row = weights(WIDTH), np.full((1, WIDTH), 0.01, np.float32)
    rows = np.full((ROWS, WIDTH), 0.01, np.float32)
    products = [rows.size * WIDTH / least_seconds(session, rows, square) for session in (alone, together)]
    if products[1] < SCALES * threads * products[0]:
        return None
    chained = [least_seconds(product_session(count, CHAIN), row, square) / CHAIN for count in (1, threads)]
    fused = chained
    if library() is not None:
        fused = [least_seconds(program_session(count, CHAIN, square), row) / CHAIN for count in (1, threads)]
    found = []
    for size, runs in ((LARGE, LARGE_RUNS), (SMALL, RUNS)):
        wide = weights(size // 4 // WIDTH)
        found.append([wide.nbytes / least_seconds(session, row, wide, runs) for session in (alone, together)])
    (memory, all_memory), (cached, all_cached) = found
    if all_memory < READS * memory:
        return None
    pairs = (memory, all_memory), (cached, all_cached), *((one, every) for one, every in (products, chained, fused))
    return MachineSpeed(threads, *pairs)


def weights(columns: int) -> np.ndarray:
    return np.full((WIDTH, columns), 1 / WIDTH, np.float32)


def product_session(threads: int, count: int) -> ort.InferenceSession:
    """y = x w, then y w and so on: `count` products."""
    import onnx  # imported late: once it is measured, no graph is made
    from onnx import TensorProto, helper

    nodes = [helper.make_node("MatMul", [f"y{number}", "w"], [f"y{number + 1}"]) for number in range(count)]
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, axes)
        for name, axes in (("y0", ["R", "D"]), ("w", ["D", "F"]), (f"y{count}", ["R", "F"]))
    ]
    graph = helper.make_graph(nodes, "products", tensors[:2], tensors[2:])
    model = helper.make_model(graph, opset_imports=[onnx.OperatorSetIdProto(version=18)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def program_session(threads: int, count: int, weight: np.ndarray) -> ort.InferenceSession:
    """The same with this constant weight, as one program of the kernel library."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from seq2engine.export.kernel_forms import ops
    from seq2engine.export.kernel_forms.program import as_program

    nodes = [ops.linear(f"{number}", f"y{number + 1}", x=f"y{number}", weight="w") for number in range(count)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["R", "D"]) for name in ("y0", f"y{count}")]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    imports = [onnx.OperatorSetIdProto(version=18), onnx.OperatorSetIdProto(domain=ops.DOMAIN, version=ops.VERSION)]
    model = as_program(helper.make_model(graph, opset_imports=imports, ir_version=8))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def least_seconds(
    session: ort.InferenceSession, rows: np.ndarray, weight: np.ndarray | None = None, runs: int = RUNS
) -> float:
    given, times = {"y0": rows} if weight is None else {"y0": rows, "w": weight}, []
    for _ in range(runs):
        started = time.perf_counter()
        session.run(None, given)
        times.append(time.perf_counter() - started)
    return min(times)
