"""The options of a benchmark, the same for the command line, the demo, the GPU check and Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.default_precision import shared_precision
from seq2engine.runtime.backends import QUANTISED
from seq2engine.runtime.quality.metrics import References
from seq2engine.runtime.text.sources import coder_of

from .cases import Case, cases_for
from .machine import usable_cores
from .natural.result import Workload
from .peers.processes import ENVIRONMENTS
from .scenarios import QUERIES, ScenarioOptions

ROUNDS = 10


def default_backends() -> tuple[str, ...]:
    """PyTorch and ONNX Runtime; without PyTorch, ONNX Runtime alone."""
    return ("onnxruntime",) if find_spec("torch") is None else ("torch", "onnxruntime")


@dataclass(frozen=True)
class BenchOptions:
    """Every backend is timed in every precision on every case; the first of each is what the others are compared with.

    `precisions`: None takes the most precise that all backends run.
    `cases`: None takes four usual ones (cases.py), cut to the lengths of the model.
    `rounds`: timed calls of every arm; arms take turns.
    `threads`: CPU threads of every arm; None takes all cores that this process may use.
    `provider`: where ONNX Runtime computes; None is the CPU.
    `draft`: of speculative decoding, as in `open_session`. It gives every other precision on ONNX Runtime one more arm,
        in cases with one source and one beam; "quantised" only fp32.
    `peers`: other libraries with the same weights, timed end to end: names, or "all". Of all, those that fail are
        listed as failed. `environments` is the folder that holds them (`make peers`).
    `references`: source texts and right outputs. Every arm decodes them, with the beams of every case, and its error
        rates are reported with its times.
    `source_language`, `target_language`: of the references, and the first token of every output, as the model names
        them; None is the model's own.
    `natural`: batches and beams with which the sources of the references are decoded, each to its own end, and timed;
        cases are then timed only if they are given.
    `neighbours`: busy processes that take a core each while everything is timed.
    `scenarios`: single, offline, server (scenarios.py), with the sizes of the first case and that many `queries`;
        `bound_ms` is the p99 latency of a server.
    `quick`: leaves out the ceiling of the machine and the peak memory of every arm.
    `export_times`: exports every precision again and notes how long it takes.
    """

    backends: Sequence[str] = field(default_factory=default_backends)
    precisions: Sequence[str] | None = None
    cases: Sequence[Case] | None = None
    rounds: int = ROUNDS
    threads: int | None = None
    seed: int = 0
    provider: str | None = None
    draft: str | None = None
    peers: Sequence[str] = ()
    environments: Path = ENVIRONMENTS
    references: References | None = None
    source_language: str | None = None
    target_language: str | None = None
    natural: Sequence[Workload] = ()
    neighbours: int = 0
    scenarios: Sequence[str] = ()
    bound_ms: float | None = None
    queries: int = QUERIES
    quick: bool = False
    export_times: bool = False


@dataclass(frozen=True)
class Plan:
    """Options for one bundle, with nothing left to choose."""

    bundle: Bundle
    options: BenchOptions
    precisions: tuple[str, ...]
    cases: tuple[Case, ...]
    threads: int

    @property
    def scenarios(self) -> ScenarioOptions:
        asked = self.options
        return ScenarioOptions(asked.scenarios, asked.bound_ms, asked.queries, asked.seed, self.forced_bos)

    @property
    def forced_bos(self) -> int | None:
        """The first token of every output, where a target language is asked for; None: the model's own."""
        language = self.options.target_language
        return None if language is None else coder_of(self.bundle).language_id(language)

    @property
    def drafted_precisions(self) -> list[str]:
        """The precisions that have one more arm, with speculative decoding."""
        draft = self.options.draft
        others = [name for name in self.precisions if name != draft]
        return [name for name in others if name == "fp32"] if draft == QUANTISED else others

    def threads_of(self, backend: str) -> int | None:
        """Threads of a backend's sessions; None: chosen by the session from the model and this machine."""
        return self.options.threads if backend == "onnxruntime" else self.threads

    @property
    def beams(self) -> list[int]:
        return sorted({case.beam for case in self.cases} | {each.beam for each in self.options.natural})


def plan_from_options(bundle: Bundle, options: BenchOptions) -> Plan:
    precisions = options.precisions
    usual = () if options.natural else cases_for(bundle.config)
    return Plan(
        bundle,
        options,
        tuple([shared_precision(bundle, options.backends)] if precisions is None else precisions),
        usual if options.cases is None else tuple(options.cases),
        usable_cores() if options.threads is None else options.threads,
    )
