"""The machine's upper bound (roofline), measured in the same run, and how close an arm comes to it.

A decoder step must read every weight once, whatever the batch, and multiply it with every row; it takes at least as
long as the slower of the two:

    bytes   weights of the decoder's layers and of the output projection as they are stored, and the caches: cross K/V
            and half of the self K/V, once per source, for beams may share all but their last slots
    flops   two for every weight and row, and attention's products

Read bandwidth depends on the cache level: a small model is read from the processor's cache in every step. So bandwidth
is measured for working sets from `BUFFERS[0]` up, and a step is compared with the rate of its own working set. Peak
compute is measured for fp32 matmuls; types of a quarter of the width count as four times as fast. With a single beam
the output projection counts as int8, because the best token can be found that way
(export/ort_forms/screened_argmax.py). An encoder is counted in the same way. The bound end to end is the encoder's plus
`target` times the step's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2engine.export.contract import PRECISIONS

from .cases import Case

BUFFERS = tuple(2**power for power in range(18, 29))  # bytes: 256 KB to 256 MB, more than any cache holds
STEP = 2  # from one buffer to the next
# Bytes read per measurement; smaller buffers are read repeatedly. Starting the threads takes some 0.1 ms: with a
# quarter of it, memory of 80 GB/s was taken for one of 37.
READ = 2**26
SIZES = (512, 1024)  # sizes of square matmuls; the best one counts
TRIES = 5
WIDTHS = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "w8a8": 1.0,
}  # bytes of a stored weight
SCREENED = 1.0  # bytes of a weight of the output projection that a search for one best token reads


@dataclass(frozen=True)
class Ceiling:
    """The best measured rates of this machine, with the threads of an arm.

    `cached` are the rates of reading buffers of a size in bytes, read repeatedly; smallest first.
    """

    read_bytes_per_second: float  # from memory
    flops_per_second: float
    cached: tuple[tuple[int, float], ...] = ()

    def read_rate(self, size: float) -> float:
        """The read bandwidth for a working set of that size: the best from the next smaller measured size on."""
        fitting = [rate for buffer, rate in self.cached if buffer > size / STEP]
        return max([*fitting, self.read_bytes_per_second])


@dataclass(frozen=True)
class Work:
    """The minimal bytes and flops of a computation; matmuls of narrower types count as fewer flops."""

    bytes: float
    flops: float

    def least_ms(self, ceiling: Ceiling) -> float:
        return 1000 * max(self.bytes / ceiling.read_rate(self.bytes), self.flops / ceiling.flops_per_second)


def ceiling_of(threads: int, buffers: Sequence[int] = BUFFERS, sizes: Sequence[int] = SIZES) -> Ceiling:
    """Reads buffers with all threads, and multiplies square matrices in fp32; the best of a few tries."""
    with ThreadPoolExecutor(threads) as pool:
        rates = [reading_rate(pool, threads, size) for size in buffers]
    flops = max(2 * size**3 / best_seconds(square_product(size, threads)) for size in sizes)
    return Ceiling(rates[-1], flops, tuple(zip(buffers, rates, strict=True)))


def reading_rate(pool: ThreadPoolExecutor, threads: int, size: int) -> float:
    """Bytes per second, all threads together, where each reads its part of a buffer of that size over and over."""
    chunks = np.ones((max(1, size // READ), min(size, READ) // 4), dtype=np.float32)
    times = READ // chunks[0].nbytes

    def read(part: np.ndarray) -> None:
        for _ in range(times):
            np.max(part)

    def seconds(chunk: np.ndarray) -> float:
        return best_seconds(lambda: list(pool.map(read, np.array_split(chunk, threads))), tries=1)

    # For a large buffer the best part counts: short reads are more likely to be uninterrupted.
    return READ / min(seconds(chunk) for _ in range(TRIES) for chunk in chunks)


def square_product(size: int, threads: int) -> Callable[[], object]:
    """A matmul of two fp32 matrices in ONNX Runtime, which every install has, unlike torch."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    left, right, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [left, right], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name in "ab":
        binding.bind_cpu_input(name, np.ones((size, size), dtype=np.float32))
    binding.bind_ortvalue_output("c", ort.OrtValue.ortvalue_from_numpy(np.empty((size, size), dtype=np.float32)))
    return lambda: session.run_with_iobinding(binding)


def best_seconds(call: Callable[[], object], tries: int = TRIES) -> float:
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def least_ms(case: Case, model: dict[str, Any], precision: str, part: str, ceiling: Ceiling) -> float:
    """The shortest time that a part of a case can take; `model` are the fields of its config."""
    encoder, step = (work(case, model, precision).least_ms(ceiling) for work in (encoder_work, step_work))
    return {"encoder": encoder, "step": step, "end_to_end": encoder + case.target * step}[part]


def narrower(width: float) -> float:
    """Peak matmul speed for a type of that width, relative to fp32: a register holds more narrow numbers."""
    return 4 / max(width, 1.0)


def cache_width(precision: str) -> float:
    return 4.0 if PRECISIONS[precision] == "float32" else 2.0


def encoder_work(case: Case, model: dict[str, Any], precision: str) -> Work:
    """Layers, and the cross K/V of every decoder layer."""
    d, f, width = model["d_model"], model["d_ff"], WIDTHS[precision]
    weights = model["encoder_layers"] * (4 * d * d + 2 * d * f) + model["decoder_layers"] * 2 * d * d
    tokens = case.batch * case.source
    attention = model["encoder_layers"] * 4 * d * case.source * tokens / narrower(cache_width(precision))
    return Work(width * weights, 2 * weights * tokens / narrower(width) + attention)


def step_work(case: Case, model: dict[str, Any], precision: str) -> Work:
    d, f, layers, width = model["d_model"], model["d_ff"], model["decoder_layers"], WIDTHS[precision]
    weights, projection = layers * (6 * d * d + 2 * d * f), d * model["target_vocab"]
    projected = min(width, SCREENED) if case.beam == 1 else width
    rows, filled = case.batch * case.beam, case.target / 2
    caches = cache_width(precision) * 2 * d * layers * case.batch * (case.source + filled)
    attention = layers * 4 * d * rows * (case.source + filled) / narrower(cache_width(precision))
    products = 2 * rows * (weights / narrower(width) + projection / narrower(projected))
    return Work(width * weights + projected * projection + caches, products + attention)
