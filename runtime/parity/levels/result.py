"""The result of one parity run, level by level, as data with a truth value and a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from seq2engine.export.contract import PRECISIONS

from ...numerics.budgets import DecodeResult, TensorResult, finite, times
from ...quality.intervals import Rate
from ...quality.metrics import Quality
from .batch_invariance import InvarianceResult
from .cost import Cost
from .error_growth import ErrorGrowth
from .findings import Finding
from .graphs import GraphResult
from .next_token import NextToken
from .sanity import Doubt
from .weights import WeightResult

LEVELS = ("weights", "graphs", "coverage", "encoder", "steps", "decodes", "quality", "invariance")


@dataclass(frozen=True)
class Stopped:
    """Why a candidate could not be opened, or stopped: the level it was at, and where in its graphs, if known."""

    level: str
    reason: str
    graph: str = ""
    node: str = ""

    def __bool__(self) -> bool:
        return False


Part = WeightResult | GraphResult | TensorResult | DecodeResult | InvarianceResult | Doubt | Stopped


@dataclass(frozen=True)
class Sample:
    """One source with two outputs, as text, or as ids if the model has no tokenizer."""

    search: str
    source: str
    baseline: str  # the side whose output is `expected`: fp32, or the one that `--against` names
    expected: str
    candidate: str


@dataclass(frozen=True)
class Sampled:
    """The number of sources that tensors were compared on: in all, up to the last step, and with beams."""

    tensors: int
    sources: int
    lasting: int
    steps: int
    trees: int

    @property
    def text(self) -> str:
        few = self.tensors > self.sources  # the rest is random
        of = f"{self.sources} sources and {self.tensors - self.sources} random ones" if few else ""
        return (
            f"tensors were compared on {of or f'{self.tensors} of {self.sources} sources'}, on {self.lasting} of them "
            f"up to step {self.steps}, on {self.trees} with beams"
        )


@dataclass(frozen=True)
class ParityResult:
    """True if all errors and divergences are within budget and no output contradicts that.

    Decodes are compared with the baseline: PyTorch in fp32 over the candidate's own weights, or what `--against` names.
    So a pass means that a precision is computed correctly; `cost` is what it loses against fp32, which only a gate
    can fail.
    """

    backend: str
    precision: str
    cache_form: str
    sources: int
    max_length: int
    tensors: tuple[TensorResult, ...]
    decodes: tuple[DecodeResult, ...]
    weights: tuple[WeightResult, ...] = ()  # none on a backend without graphs
    graphs: tuple[GraphResult, ...] = ()  # likewise
    invariance: tuple[InvarianceResult, ...] = ()
    error_growth: ErrorGrowth | None = None
    quality: dict[str, tuple[Quality, ...]] = field(default_factory=dict)  # side -> its error rates, with references
    rates: tuple[Rate, ...] = ()  # both sides with intervals, with references
    next_token: dict[str, NextToken] = field(default_factory=dict)  # side -> its next-token distributions
    finding: Finding | None = None  # the located fault, after a failure
    baseline: str = "PyTorch fp32"
    texts: dict[int, str] = field(default_factory=dict)  # of divergent sources, if the model has a tokenizer
    words: dict[int, str] = field(default_factory=dict)  # of the tokens in their outputs
    doubts: tuple[Doubt, ...] = ()  # outputs that contradict a pass, even within budget
    cost: Cost | None = None  # against fp32; None if not measured
    samples: tuple[Sample, ...] = ()
    about: tuple[tuple[str, str], ...] = ()  # model, date, versions
    against: str = ""  # the baseline, if `--against` names it
    sampled: Sampled | None = None  # None if no tensors were compared
    torch_threads: int | None = None  # PyTorch's threads, if they were chosen
    stopped: Stopped | None = None  # where it could not be opened, or stopped
    left_out: tuple[str, ...] = ()  # options of the model that decodes do not obey, in words

    @property
    def compared_with(self) -> str:
        """What decodes are compared with, and what both sides leave out."""
        without = f", without the model's own {' and '.join(self.left_out)}" if self.left_out else ""
        return self.baseline + without

    @property
    def effort(self) -> str:
        """How much was measured; empty if nothing was."""
        if self.sampled is None:
            return ""
        threads = "" if self.torch_threads is None else f"; PyTorch computed with {self.torch_threads} thread"
        return self.sampled.text + threads + ("s" if (self.torch_threads or 1) > 1 else "")

    @property
    def rounding_warning(self) -> str:
        """What this run does not test, where the backend computes in more precision than the graph states."""
        if self.backend != "onnxruntime" or PRECISIONS.get(self.precision) != "float16":
            return ""
        return (
            "ONNX Runtime's CPU computes most of an fp16 graph in fp32, so this does not test overflow in fp16: "
            "calibration (manifest.json) and an engine do"
        )

    @property
    def candidate(self) -> str:
        return f"{self.backend} {self.precision}"

    @property
    def finished_searches(self) -> list[str]:
        return [decode.search for decode in self.decodes if not decode.failure]

    def level(self, name: str) -> Sequence[Part]:
        doubts: tuple[Part, ...] = tuple(doubt for doubt in self.doubts if doubt.level == name)
        if self.stopped is not None and self.stopped.level == name:
            doubts = (*doubts, self.stopped)
        if name == "weights":
            return self.weights
        if name == "graphs":
            return (*self.graphs, *doubts)
        if name == "decodes":
            return (*self.decodes, *doubts)
        if name == "invariance":
            return self.invariance
        return (*(tensor for tensor in self.tensors if tensor.level == name), *doubts)

    @property
    def first_failure(self) -> tuple[str, Part] | None:
        """The first level and result that fail, in the order of the computation."""
        return next(((level, part) for level in LEVELS for part in self.level(level) if not part), None)

    def needs_locating(self, other_weights: bool) -> bool:
        """Whether the graphs are searched for a fault. Not if two sessions of `--against` differ while all errors are
        within budget, nor for decodes of two precisions (`other_weights`): those may differ.
        """
        parts = [part for level in LEVELS for part in self.level(level) if not part]
        idle = (Doubt, DecodeResult) if other_weights else (Doubt,)
        return any(not isinstance(part, idle) for part in parts) if self.against else bool(parts)

    @property
    def reason(self) -> str:
        if self.first_failure:
            level, part = self.first_failure
            return f"{level}: {part.reason}"
        median, worst = (max(getattr(t, f"{which}_ratio") for t in self.tensors) for which in ("median", "worst"))
        excuses = [f"{doubt.search}: {doubt.fact}, {doubt.excuse}" for doubt in self.doubts]
        decodes = "; ".join([*(decode.summary for decode in self.decodes), *excuses])
        return f"errors at most {times(median)} PyTorch's own at the median, {times(worst)} at the maximum; {decodes}"

    @property
    def claim(self) -> str:
        """What the verdict states; empty for fp32, where it is obvious."""
        if self.against:
            return f"{'same as' if self else 'differs from'} {self.against}"
        if self.precision == "fp32":
            return ""
        return f"{'faithful' if self else 'not faithful'} to its own weights"

    @property
    def verdict_line(self) -> str:
        head = f"parity {'passed' if self else 'FAILED'}: {self.candidate}: "
        return head + (f"{self.claim}: " if self.claim else "") + self.reason

    @property
    def cost_rates(self) -> tuple[Rate, ...]:
        """The rates against fp32; empty if fp32 is the baseline, as `rates` are the same."""
        if self.cost is None or self.cost.baseline == self.baseline:
            return ()
        return tuple(rate for part in self.cost.searches for rate in part.rates)

    @property
    def cost_line(self) -> str:
        """What the precision costs against fp32; empty for fp32 itself."""
        if self.cost is None or self.precision == "fp32":
            return ""
        return f"{self.precision} against {self.cost.baseline}: {self.cost.summary}"

    def __bool__(self) -> bool:
        return self.first_failure is None

    def to_json(self) -> str:
        """NaN and infinity become null: JSON has neither."""
        lines = {"verdict": bool(self), "reason": self.reason, "claim": self.claim, "cost_line": self.cost_line}
        values = {**lines, **dataclasses.asdict(self)}
        for tensor, described in zip(self.tensors, values["tensors"], strict=True):
            described.update(verdict=bool(tensor), median_ratio=tensor.median_ratio, worst_ratio=tensor.worst_ratio)
        for decode, described in zip(self.decodes, values["decodes"], strict=True):
            described.update(verdict=bool(decode), equal=decode.equal)
            for divergence, found in zip(decode.divergences, described["divergences"], strict=True):
                found.update(top_two_budgets=divergence.budgets(divergence.top_two))
        for account, described in zip(self.weights, values["weights"], strict=True):
            described.update(verdict=bool(account), reason=account.reason)
        for doubt, described in zip(self.doubts, values["doubts"], strict=True):
            described.update(verdict=bool(doubt), reason=doubt.reason)
        for arranged, described in zip(self.invariance, values["invariance"], strict=True):
            described.update(verdict=bool(arranged), budgets=arranged.budgets)
        return json.dumps(finite(values), indent=1, allow_nan=False) + "\n"
