"""How many threads and workers a decode has on this machine."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from seq2engine.model.config import ModelConfig

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" is two cores, "max 100000" no limit
WEIGHT_BYTES = 4  # of the fp32 weights that a thread reads; with smaller ones further threads pay for less
CACHED = 16 << 20  # bytes of weights that stay in a processor's caches from step to step
SHARED = 15  # nodes of a layer that threads share: products, and those beside them that are large enough
FUSED = 8  # the same with fused operators: six products, two attentions (and threads that stay together, if all are)
TRIAL, REMEMBERED = 2, 4  # batches of a trial, and of each way that count, at least
EVIDENCE = 0.02  # seconds that they take together, at least: single short batches may take twice as long as others
SURE = 1.1  # the other way must be this many times as fast to be taken
FEW_ROWS = 8  # with fewer, one thread is hardly faster beside a neighbour
AGAIN, RARELY = 1.0, 10  # seconds, and times as long as the last trial, until the other way is tried once more
INTERRUPTED = 150  # times per second that threads lose their core, from which on the cores are shared
MANY_ROWS = 32  # where products bound, not reading the weights
MOST_ROWS = 1024  # of a batch for which one thread of a small model is considered
OUTWEIGHS = 2  # times as long as reading its weights a worker multiplies them: all threads are faster below that
# Rows of a worker, for each worker, that are enough in int8 whatever the memory: attention, rounding and passes over
# logits then take longer than reading. Two workers paid from 6 rows each on with 22 and with 60 GB/s (docs/LOG.md).
ENOUGH_ROWS = 4
# With fused operators threads hardly wait for each other: enough are those that a thread multiplies longer than it
# reads all weights (OWN_ROWS in kernels/linear.c). With fewer, workers lose more at the end, when one of them is alone.
FUSED_ROWS = 32
WORKER_WORK = 64_000_000  # multiplications per step from which on Python's lock does not slow workers down

Opened = TypeVar("Opened")
First = TypeVar("First")
Second = TypeVar("Second")


def both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two calls at the same time, for work that is mostly done outside of Python."""
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(second)
        return first(), later.result()


def usable_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):  # no such limits here
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


def row_work(config: ModelConfig) -> int:
    """Multiplications of a decoder step for one row: its weights, without attention, which grows with the output."""
    attention, feed_forward = 6 * config.d_model**2, 2 * config.d_model * config.d_ff
    return config.decoder_layers * (attention + feed_forward) + config.d_model * config.target_vocab


@dataclass(frozen=True)
class MachineSpeed:
    """What one thread and all threads of a machine do with the products of a step; pairs are (one, all)."""

    threads: int
    memory: tuple[float, float]  # bytes per second of weights that come from memory, for one row
    cached: tuple[float, float]  # and of weights that stay in the caches
    products: tuple[float, float]  # multiplications per second, for many rows
    chained: tuple[float, float]  # seconds of a small product among others: of one thread, and shared by all
    fused: tuple[float, float]  # the same in a program of fused operators, if there are any here

    def region(self, fused: bool = False) -> float:
        """Seconds that a product costs beside its work where all threads share it."""
        alone, shared = self.fused if fused else self.chained
        return max(0.0, shared - alone / self.threads)

    def bandwidth(self, threads: int, size: int) -> float:
        one, most = self.memory if size > CACHED else self.cached
        return min(threads * one, max(one, most))

    def multiplications(self, threads: int) -> float:
        one, most = self.products
        return one + (most - one) * (threads - 1) / max(1, self.threads - 1)

    def sharing(self, threads: int, fused: bool = False) -> float:
        """Threads start and meet as a tree: twice as many are one level more."""
        return self.region(fused) * math.log2(threads) / math.log2(max(2, self.threads))


def derived_speed(threads: int) -> MachineSpeed:
    """Where nothing can be measured: one thread as on an AMD Zen 4 (docs/LOG.md), memory for eight of them."""
    memory, cached, products, small = 30e9, 64e9, 54e9, 16e-6
    return MachineSpeed(
        threads,
        (memory, memory * min(threads, 8) * 0.8),
        (cached, cached * threads * 0.8),
        (products, products * threads),
        (small, small / threads + 2.2e-6 * max(1.0, math.log2(threads))),
        (small, small / threads + 0.2e-6 * max(1.0, math.log2(threads))),
    )


def step_seconds(
    config: ModelConfig,
    rows: int,
    threads: int,
    speed: MachineSpeed,
    size: int = WEIGHT_BYTES,
    fused: bool = False,
) -> float:
    """Seconds of a decoder step's products: weights are read or multiplied, whichever takes longer, and threads meet.

    `size` is that of a weight in bytes: int8 is multiplied twice as fast as fp32. Threads meet in some nodes of every
    layer, fewer and sooner in those of `fused` operators.
    """
    weights, regions = row_work(config), (FUSED if fused else SHARED) * config.decoder_layers + 1
    reading = size * weights / speed.bandwidth(threads, size * weights)
    multiplying = rows * weights / speed.multiplications(threads) / (2 if size == 1 else 1)
    return max(reading, multiplying) + regions * speed.sharing(threads, fused)


def threads_for(config: ModelConfig, speed: MachineSpeed) -> int:
    """How many threads to decode with, of 2, 4 and so on, and all: a step of one row and one of MANY_ROWS together take
    least. One only where there is one."""
    counts = {*(2**power for power in range(1, speed.threads.bit_length())), speed.threads}
    both = {count: sum(step_seconds(config, rows, count, speed) for rows in (1, MANY_ROWS)) for count in sorted(counts)}
    return min(both, key=both.__getitem__)


def is_small(config: ModelConfig) -> bool:
    """Whether few rows may have a session of one thread: that of a large model would take its memory again."""
    return WEIGHT_BYTES * row_work(config) <= CACHED


def rows_for_threads(config: ModelConfig, threads: int, speed: MachineSpeed, size: int, fused: bool = False) -> int:
    """Rows from which on so many threads make a small model's step faster than one: products of fewer end before
    threads have met."""
    for rows in range(1, MOST_ROWS):
        together, alone = (step_seconds(config, rows, count, speed, size, fused) for count in (threads, 1))
        if together < alone:
            return rows
    return MOST_ROWS


def rows_per_worker(config: ModelConfig, threads: int, speed: MachineSpeed, size: int, fused: bool = False) -> int:
    """Rows of each worker from which on parallel decodes are faster than all threads together.

    Every worker reads all weights, from a memory that they share: multiplying them must take OUTWEIGHS times as long.
    In int8 what else a row costs is more than that from ENOUGH_ROWS on, with `fused` operators from FUSED_ROWS on.
    All share Python's lock as well, which the loop around a small model's step holds most of the time.
    """
    weights = row_work(config)
    reading = threads * size * weights / speed.bandwidth(threads, size * weights)
    multiplying = weights / speed.multiplications(1) / (2 if size == 1 else 1)
    rows = math.ceil(OUTWEIGHS * reading / multiplying)
    if size == 1:
        rows = max(rows, FUSED_ROWS) if fused else min(rows, ENOUGH_ROWS * threads)
    return max(rows, -(-WORKER_WORK // weights))


class WaySeconds:
    """Seconds for each token of the latest batches that were decoded in one way."""

    def __init__(self) -> None:
        self.batches: deque[tuple[float, float]] = deque()  # seconds, and seconds for each token
        self.total = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def add(self, seconds: float, tokens: int) -> None:
        self.batches.append((seconds, seconds / tokens))
        self.total += seconds
        while len(self) > REMEMBERED and self.total - self.batches[0][0] >= EVIDENCE:
            self.total -= self.batches.popleft()[0]

    def enough(self) -> bool:
        return len(self) >= TRIAL and self.total >= EVIDENCE

    def of_token(self) -> float:
        return median(own for _, own in self.batches)


class OneThread:
    """Whether batches of some size are decoded faster by one thread than by all, by the seconds that they took.

    They are where another process has one of two cores: all threads of a step meet at every product, and each time wait
    for the one whose core is shared. That is tried when threads lost their core often, and from time to time again. The
    way that seems faster must be so before and after it is tried: batches before may have been the first ones after a
    rest.
    """

    def __init__(self, chosen: bool = False) -> None:
        self.chosen, self.trying, self.confirming = chosen, False, False
        self.begun = False  # the first batch does not count: it allocates memory, and may pack weights
        self.since, self.wait = 0.0, 0.0  # seconds of decoding since the last trial, and how many until the next one
        self.watched, self.switches = 0.0, 0  # seconds in which interruptions were counted, and how many there were
        self.ways = {False: WaySeconds(), True: WaySeconds()}

    def next(self) -> bool:
        """Whether the next batch is decoded by one thread."""
        return self.chosen != self.trying

    def note(self, alone: bool, seconds: float, tokens: int, switches: int) -> None:
        """A batch with that many tokens, read and written, in which threads were interrupted `switches` times."""
        if not self.begun:
            self.begun = True
            return
        self.ways[alone].add(seconds, tokens)
        self.since += seconds
        if self.trying or self.confirming:
            self.judge()
            return
        self.watched, self.switches = self.watched + seconds, self.switches + switches
        if self.watched < EVIDENCE:
            return
        if self.since >= self.wait and (self.chosen or self.switches > INTERRUPTED * self.watched):
            self.trying, self.ways[not self.chosen] = True, WaySeconds()
        self.watched, self.switches = 0.0, 0

    def judge(self) -> None:
        """Ends a trial that has lasted long enough, or goes on with the chosen way, to compare it once more."""
        now, other = self.ways[self.chosen], self.ways[not self.chosen]
        if not (other if self.trying else now).enough():
            return
        faster = len(now) > 0 and other.of_token() * SURE < now.of_token()
        if faster and self.trying:
            self.trying, self.confirming, self.ways[self.chosen] = False, True, WaySeconds()
            return
        self.trying, self.confirming, self.since, self.wait = False, False, 0.0, max(AGAIN, RARELY * other.total)
        if faster:
            self.chosen = not self.chosen


def involuntary_switches() -> int:
    """How often threads of this process have lost their core to others; 0 where the system does not count it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Workers(Generic[Opened]):
    """Parallel decodes of one batch: `count` of them run the same single-threaded session, which is opened when a batch
    first has `least_rows` rows. One is enough for all: every decode has its own state. That number is found when a
    batch has a source for each of them: it may have to be measured, and single sentences never need it.

    One worker decodes a batch alone if it has fewer rows than `thread_rows`, or, with `follows`, where that is measured
    to be faster than all threads together.
    """

    def __init__(
        self,
        count: int,
        find_least_rows: Callable[[], int],
        open_session: Callable[[], Opened],
        thread_rows: int = 1,
        follows: bool = False,
    ):
        self.count, self.find_least_rows, self.open_session = count, find_least_rows, open_session
        self.thread_rows, self.follows = thread_rows, follows
        self.opened: list[Opened] = []
        self.choices: dict[int, OneThread] = {}  # by the power of two of a batch's rows
        self.latest = False  # what the latest of them chose

    @cached_property
    def least_rows(self) -> int:
        return self.find_least_rows()

    def for_batch(self, sources: int, rows: int) -> tuple[Opened, ...]:
        """A session for each worker; one, if it is to decode the batch alone; none where the batch is better decoded by
        all threads."""
        divided = sources >= self.count and rows >= self.least_rows
        followed = self.follows and rows >= FEW_ROWS and self.choice(rows).next()
        if not divided and rows >= self.thread_rows and not followed:
            return ()
        if not self.opened:
            self.opened.append(self.open_session())
        return (self.opened[0],) * (self.count if divided else 1)

    def choice(self, rows: int) -> OneThread:
        return self.choices.setdefault(rows.bit_length(), OneThread(self.latest))

    def note(self, rows: int, alone: bool, seconds: float, tokens: int, switches: int) -> None:
        """What a batch took that was not divided."""
        if self.follows and rows >= max(FEW_ROWS, self.thread_rows):
            choice = self.choice(rows)
            choice.note(alone, seconds, tokens, switches)
            self.latest = choice.chosen


class EncoderLock:
    """A lock for workers that share an encoder: none continues before all waiting ones have used it.

    A worker that continued would decode on a core that the encoder's threads use for the next.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.waiting = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        with self.changed:
            self.waiting += 1
        try:
            with self.lock:
                yield
        finally:
            with self.changed:
                self.waiting -= 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting == 0)
