"""Where the time of a decoder step goes on the CPU: kinds of nodes and their shares, beside what the machine allows.

    python -m seq2engine.benchmarks.timers.node_times BUNDLE [PRECISION] [BATCHxBEAMxSOURCExOUTPUT]

ONNX Runtime's profiler times every node. Nodes have the names of the modules they come from, so a kind is read from
the name and the operator. The profiler itself takes time, so steps are timed once more without it, as decodes run them
(many in one call, where a session does that), and compared with the ceiling of `bench` (ceiling.py), measured in the
same process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from seq2engine.common.tables import text_table
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.session import Session, StepForm
from seq2engine.runtime.threads import usable_cores

from ..cases import Case, cases_from_text, sources_for
from ..ceiling import ceiling_of, step_work
from ..real.scripts import exit_code_of
from ..timed_decode import case_options, fixed_length, timed_decode

PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "MatMulIntegerToFloat", "MatMulNBits")
FUSED = {  # operators of the kernel library
    "Linear": "products: layers, with biases, norms, rounding",
    "LinearInt8": "products: layers, with biases, norms, rounding",
    "Candidates": "output projection, best tokens and sums",
    "CandidatesInt8": "output projection, best tokens and sums",
}
ROUNDING = ("Abs", "Clip", "DequantizeLinear", "Div", "QuantizeLinear", "ReduceMax", "Reciprocal", "Round")
PROJECTION = ("output/", "all/", "logits")  # how names of its nodes begin
STEPS, DECODES, WARM_UP = 24, 9, 3
KERNEL = "_kernel_time"  # how the profiler ends the name of a node's time


def kind_of(op: str, name: str) -> str:
    """What a node of this operator and name belongs to."""
    if op in FUSED:
        return FUSED[op]
    if name.startswith(("candidates/", "screening/")):
        return "best tokens and sums over the vocabulary"
    if "_attn/" in name:
        return "attention: scores, masks, softmax, cache"
    if op in PRODUCTS:
        return "product: output projection" if name.startswith(PROJECTION) else "products: layers"
    if op in ROUNDING or (op == "Mul" and name.endswith("MatMul/Mul")):
        return "activations to int8, and their scales"
    if "Normalization" in op:
        return "norms"
    return "biases, residuals, embedding and others"


@dataclass(frozen=True)
class StepShares:
    """Milliseconds of one step: by the clock, of each kind of nodes, and the least that the machine allows."""

    case: str
    precision: str
    step_ms: float  # without the profiler, of whole decodes
    profiled_ms: float  # with it, as the kinds are
    kinds: dict[str, float]
    nodes: dict[str, int]
    bytes_ms: float  # to read what must be read, at the measured bandwidth
    products_ms: float  # to multiply, at the measured speed of large fp32 products; int8 counts as four times that

    @property
    def between_ms(self) -> float:
        """Outside all nodes: the loop of ONNX Runtime, its threads that start and wait, and the profiler itself."""
        return max(0.0, self.profiled_ms - sum(self.kinds.values()))

    def table(self) -> str:
        rows = [
            (kind, f"{ms:.2f}", f"{100 * ms / self.profiled_ms:.0f} %", str(self.nodes[kind]))
            for kind, ms in sorted(self.kinds.items(), key=lambda item: -item[1])
        ]
        between = self.between_ms
        rows.append(("between nodes", f"{between:.2f}", f"{100 * between / self.profiled_ms:.0f} %", ""))
        least = max(self.bytes_ms, self.products_ms)
        return "\n".join(
            (
                f"{self.case} {self.precision}: a step takes {self.step_ms:.2f} ms; reading takes at least "
                f"{self.bytes_ms:.2f} ms, products {self.products_ms:.2f} ms: {100 * least / self.step_ms:.0f} % of "
                f"the machine's limit; {self.profiled_ms:.2f} ms with the profiler, of which",
                text_table(("kind of nodes", "ms", "share", "nodes"), rows),
            )
        )


def shares_of_step(bundle: Bundle, precision: str, case: Case) -> StepShares:
    """Profiles steps in the middle of a decode, of greedy search without scores or of beam search."""
    model = model_from_bundle(bundle, precision)
    with OrtSession(model) as session:
        session.workers = None  # all threads on one step
        alone = median(decode_steps(session, case))
    with tempfile.TemporaryDirectory() as folder:
        session = OrtSession(model, OrtSettings(profiled=Path(folder) / "nodes"))
        with session:
            seconds = run_steps(session, case)
            assert session.decoders is not None
            assert session.decoders.first is not None
            events = json.loads(Path(session.decoders.first.session.end_profiling()).read_text(encoding="utf-8"))
    milliseconds: defaultdict[str, float] = defaultdict(float)
    counts = Counter[str]()
    for kind, ms in node_times(events, WARM_UP):
        milliseconds[kind] += ms / STEPS
        counts[kind] += 1
    ceiling, work = ceiling_of(usable_cores()), step_work(case, asdict(bundle.config), precision)
    return StepShares(
        str(case),
        precision,
        1000 * alone,
        1000 * sum(seconds) / STEPS,
        dict(milliseconds),
        {kind: count // STEPS for kind, count in counts.items()},
        1000 * work.bytes / ceiling.read_rate(work.bytes),
        1000 * work.flops / ceiling.flops_per_second,
    )


def decode_steps(session: Session, case: Case) -> list[float]:
    """Seconds of a step in each of some decodes to the full length, the search in Python aside."""
    options = fixed_length(case_options(session, case, defaults=False))
    sources = sources_for(case, session.config)
    splits = [timed_decode(session, sources, options) for _ in range(WARM_UP + DECODES)]
    return [split["step"] / 1e9 / case.target for split in splits[WARM_UP:]]


def run_steps(session: OrtSession, case: Case) -> list[float]:
    """Seconds of every step but the first few, with half of the cache filled."""
    config, random = session.config, np.random.default_rng(0)
    state = session.encode(*encoder_inputs(sources_for(case, config), config))
    filled, slots = case.target // 2 * case.beam, case.target * case.beam
    session.reserve(state, slots, StepForm(candidates=1) if case.beam == 1 else StepForm(best=case.beam + 1))
    mask = np.zeros((case.batch, case.beam, slots), dtype=bool)
    mask[..., : case.target // 2] = True
    positions, written = (np.full(case.batch, value) for value in (case.target // 2, filled))
    # Which distances relative positions look up does not change what a step costs.
    of_slots = [np.zeros((case.batch, slots), dtype=np.int64)] if config.relative else []
    seconds = []
    for _ in range(WARM_UP + STEPS):
        tokens = random.integers(0, config.target_vocab, (case.batch, case.beam))
        started = time.perf_counter()
        session.step(state, tokens, positions, written, mask, *of_slots)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def node_times(events: list[dict[str, Any]], skipped: int = 0) -> Iterator[tuple[str, float]]:
    """Kind and milliseconds of every node that ran, but for its first few times: the very first packs its weights. An
    If holds other nodes and is not counted itself."""
    seen = Counter[str]()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL) and event["args"]["op_name"] != "If":
            seen[event["name"]] += 1
            if seen[event["name"]] <= skipped:
                continue
            yield kind_of(event["args"]["op_name"], event["name"].removesuffix(KERNEL)), event["dur"] / 1000


def print_shares(arguments: list[str]) -> None:
    folder, precision, case = [*arguments, *("", "fp32", "8x4x32x32")[len(arguments) :]]
    print(shares_of_step(open_bundle(folder), precision, cases_from_text([case])[0]).table())


if __name__ == "__main__":
    usage = "python -m seq2engine.benchmarks.timers.node_times BUNDLE [PRECISION] [BATCHxBEAMxSOURCExOUTPUT]"
    sys.exit(exit_code_of(print_shares, usage))
