"""Packed weights: one copy for all sessions over the same memory, made once, gone with the last session."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import onnxruntime as ort
import pytest
from support.kernel_sessions import model_of, options_of, run, same_bits, session_of

from seq2engine.export.kernel_forms import ops

pytestmark = pytest.mark.usefixtures("vectors")
LIBC = ctypes.CDLL(None)


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten counts, of which two are bytes that are in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]


counted = pytest.mark.skipif(
    not hasattr(LIBC, "mallinfo2"), reason="memory in use is what glibc 2.33 or later counts: mallinfo2"
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_use() -> int:
    """Bytes that are allocated and not freed. Resident memory is no measure of it: what a thread has freed may stay in
    its arena, more of it the larger the blocks that were freed before it."""
    gc.collect()
    LIBC.mallinfo2.restype = MallocInfo
    found = LIBC.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@counted
def test_sessions_over_the_same_memory_share_what_is_packed():
    found = {"x": normal(1, 2048), "weight": normal(2048, 4096)}
    node = ops.linear("linear", "y", x="x", weight="weight")
    model, size = model_of(node, found, {"weight"}), found["weight"].nbytes
    value = ort.OrtValue.ortvalue_from_numpy(found["weight"])

    def opened() -> ort.InferenceSession:
        options = options_of(1)
        options.add_initializer("weight", value)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    one, two = opened(), opened()
    before = in_use()
    first = run(one, found)["y"]
    packed = in_use()
    assert same_bits(run(two, found)["y"], first)
    assert packed - before >= 0.9 * size
    assert in_use() - packed <= 0.1 * size
    del one
    assert in_use() - before >= 0.9 * size  # the other has it still
    assert same_bits(run(two, found)["y"], first)
    held = in_use()
    del two
    assert held - in_use() >= 0.9 * size


def test_weights_at_a_place_where_others_were_are_packed_again():
    weight = normal(40, 50)
    value = ort.OrtValue.ortvalue_from_numpy(weight)
    for seed in range(3):
        weight[:] = normal(40, 50, seed=seed)
        found = {"x": normal(3, 40), "weight": weight}
        options = options_of(1)
        options.add_initializer("weight", value)
        model = model_of(ops.linear("linear", "y", x="x", weight="weight"), found)
        shared = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        alone = session_of(ops.linear("linear", "y", x="x", weight="weight"), found)
        assert same_bits(run(shared, found)["y"], run(alone, found)["y"])
        del shared, alone


@pytest.mark.parametrize("kind", ["float", "quantised", "screened", "words"])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_session_serves_several_threads_at_once(kind, threads):
    """From the first call on, in which each of them finds nothing packed."""
    if kind in ("screened", "words"):
        wanted = np.array([5 if kind == "screened" else -5])
        found = {"table": normal(3000, 64), "bias": normal(3000), "wanted": wanted}
        names = {name: name for name in (*found, "x")}
        outputs = ["logits", "exp_sum", "best_logits", "best_tokens"]
        node = ops.candidates("candidates", outputs, **names, by_rows=True, screened=True, words=True)
        inputs = [{**found, "x": normal(1, rows, 64, seed=rows)} for rows in (1, 5, 33, 2)]
    else:
        found = {"weight": normal(600, 700), "smoothing": np.abs(normal(600))}
        names = {name: name for name in (*found, "x")}
        node = ops.linear("linear", "y", **names, activation="gelu", quantised=kind == "quantised")
        inputs = [{**found, "x": normal(rows, 600, seed=rows)} for rows in (1, 17, 130, 6)]
    alone = [run(session_of(node, one), one) for one in inputs]
    session = session_of(node, inputs[0], threads)
    start, wrong = threading.Barrier(len(inputs)), []

    def work(one: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
        start.wait()
        for _ in range(10):
            wrong.extend(name for name, array in run(session, one).items() if not same_bits(array, expected[name]))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, alone, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@counted
def test_memory_of_a_thread_goes_with_it():
    found = {"x": normal(4000, 600), "weight": normal(600, 8), "smoothing": normal(600)}
    session = session_of(ops.linear("linear", "y", x="x", weight="weight", smoothing="smoothing"), found)
    scratch = found["x"].nbytes  # at least: x times smoothing

    def in_thread() -> None:
        worker = threading.Thread(target=run, args=(session, found))
        worker.start()
        worker.join()

    in_thread()
    before = in_use()
    for _ in range(8):
        in_thread()
    assert in_use() - before < 2 * scratch
