"""Everything one parity found, level by level, as data with a truth value and a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...numerics.budgets import DecodeResult, TensorResult, finite, times
from ...quality.intervals import Rate
from ...quality.metrics import Quality
from .batch_invariance import CompanyResult
from .cost import Cost
from .error_growth import Drift
from .findings import Finding
from .graphs import GraphResult
from .next_token import NextToken
from .sanity import Doubt

LEVELS = ("graphs", "encoder", "steps", "decodes", "quality", "invariance")

Part = GraphResult | TensorResult | DecodeResult | CompanyResult | Doubt


@dataclass(frozen=True)
class Sample:
    """One source with two outputs, as text, or as ids where the model takes no text."""

    search: str
    source: str
    baseline: str  # whose output is `expected`: fp32's, or the other side's of `--against`
    expected: str
    candidate: str


@dataclass(frozen=True)
class Sampled:
    """On how many of all sources tensors were compared, how many of those to the last step, and how many as trees."""

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

    The speaker, whose decodes are compared, is PyTorch in fp32 over the candidate's own weights, or what `--against`
    names. So a pass says that a precision is computed faithfully; `cost` says what it loses against fp32, and is
    information: only a gate fails on it.
    """

    backend: str
    precision: str
    cache_form: str
    sources: int
    max_length: int
    tensors: tuple[TensorResult, ...]
    decodes: tuple[DecodeResult, ...]
    graphs: tuple[GraphResult, ...] = ()  # none of a backend that runs none
    companies: tuple[CompanyResult, ...] = ()
    drift: Drift | None = None
    quality: dict[str, tuple[Quality, ...]] = field(default_factory=dict)  # who spoke -> how well, if references tell
    rates: tuple[Rate, ...] = ()  # the same with intervals, of both
    next_token: dict[str, NextToken] = field(default_factory=dict)  # who -> its next-token distributions
    finding: Finding | None = None  # what the hunt found, where there was something to hunt for
    speaker: str = "PyTorch fp32"
    texts: dict[int, str] = field(default_factory=dict)  # of sources that part, where they are text
    words: dict[int, str] = field(default_factory=dict)  # of the tokens in their outputs
    doubts: tuple[Doubt, ...] = ()  # outputs that contradict a pass, whatever the budgets say
    cost: Cost | None = None  # against fp32; None where that was not measured
    samples: tuple[Sample, ...] = ()
    about: tuple[tuple[str, str], ...] = ()  # model, date, versions: what tells this report from another
    against: str = ""  # the speaker, where `--against` named it
    sampled: Sampled | None = None  # None where no tensors were compared
    torch_threads: int | None = None  # that PyTorch computed with; None where nobody chose

    @property
    def effort(self) -> str:
        """What was measured on how much; empty where nothing was."""
        if self.sampled is None:
            return ""
        threads = "" if self.torch_threads is None else f"; PyTorch computed with {self.torch_threads} thread"
        return self.sampled.text + threads + ("s" if (self.torch_threads or 1) > 1 else "")

    @property
    def candidate(self) -> str:
        return f"{self.backend} {self.precision}"

    @property
    def finished_searches(self) -> list[str]:
        return [decode.search for decode in self.decodes if not decode.failure]

    def level(self, name: str) -> Sequence[Part]:
        doubts = tuple(doubt for doubt in self.doubts if doubt.level == name)
        if name == "graphs":
            return self.graphs
        if name == "decodes":
            return (*self.decodes, *doubts)
        if name == "invariance":
            return self.companies
        return (*(tensor for tensor in self.tensors if tensor.level == name), *doubts)

    @property
    def first_failure(self) -> tuple[str, Part] | None:
        """The level and the result at which the candidate first went wrong, in the order data flows."""
        return next(((level, part) for level in LEVELS for part in self.level(level) if not part), None)

    def to_hunt(self, other_weights: bool) -> bool:
        """Whether there is something to look for in the graphs. Where two sessions of `--against` differ and all of it
        is within budget, there is not, nor in decodes of two precisions (`other_weights`): those may differ.
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
        said = "; ".join([*(decode.summary for decode in self.decodes), *excuses])
        return f"errs at most {times(median)} as much as PyTorch at the median, {times(worst)} at worst; {said}"

    @property
    def claim(self) -> str:
        """What the verdict is about, where that is not plain."""
        if self.against:
            return f"{'as' if self else 'not as'} {self.against}"
        if self.precision == "fp32":
            return ""
        return f"{'faithful' if self else 'not faithful'} to its own weights"

    @property
    def verdict_line(self) -> str:
        head = f"parity {'passed' if self else 'FAILED'}: {self.candidate}: "
        return head + (f"{self.claim}: " if self.claim else "") + self.reason

    @property
    def cost_rates(self) -> tuple[Rate, ...]:
        """Those against fp32, unless `rates` are: where fp32 is the speaker."""
        if self.cost is None or self.cost.baseline == self.speaker:
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
        """Not a number and infinity become null: JSON has neither."""
        lines = {"verdict": bool(self), "reason": self.reason, "claim": self.claim, "cost_line": self.cost_line}
        values = {**lines, **dataclasses.asdict(self)}
        for tensor, described in zip(self.tensors, values["tensors"], strict=True):
            described.update(verdict=bool(tensor), median_ratio=tensor.median_ratio, worst_ratio=tensor.worst_ratio)
        for decode, described in zip(self.decodes, values["decodes"], strict=True):
            described.update(verdict=bool(decode), equal=decode.equal)
            for divergence, told in zip(decode.divergences, described["divergences"], strict=True):
                told.update(top_two_budgets=divergence.budgets(divergence.top_two))
        for doubt, described in zip(self.doubts, values["doubts"], strict=True):
            described.update(verdict=bool(doubt), reason=doubt.reason)
        for company, described in zip(self.companies, values["companies"], strict=True):
            described.update(verdict=bool(company), budgets=company.budgets)
        return json.dumps(finite(values), indent=1, allow_nan=False) + "\n"
