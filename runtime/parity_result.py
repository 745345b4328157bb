"""Everything one parity found, level by level, as data with a truth value and a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from .bootstrap import Rate
from .company import CompanyResult
from .compare import DecodeResult, TensorResult, finite, times
from .drift import Drift
from .findings import Finding
from .graph_level import GraphResult
from .next_token import NextToken
from .quality import Quality

LEVELS = ("graphs", "encoder", "steps", "decodes", "quality", "invariance")

Part = GraphResult | TensorResult | DecodeResult | CompanyResult


@dataclass(frozen=True)
class ParityResult:
    """True if the candidate says what the speaker says, as well as PyTorch can say it at the candidate's precision.

    The speaker is PyTorch in fp32, or what `--against` names. Quality has no verdict of its own: it is told beside the
    rest, and a gate may hold it.
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

    @property
    def candidate(self) -> str:
        return f"{self.backend} {self.precision}"

    def level(self, name: str) -> Sequence[Part]:
        if name == "graphs":
            return self.graphs
        if name == "decodes":
            return self.decodes
        if name == "invariance":
            return self.companies
        return tuple(tensor for tensor in self.tensors if tensor.level == name)

    @property
    def first_failure(self) -> tuple[str, Part] | None:
        """The level and the result at which the candidate first went wrong, in the order data flows."""
        return next(((level, part) for level in LEVELS for part in self.level(level) if not part), None)

    @property
    def reason(self) -> str:
        if self.first_failure:
            level, part = self.first_failure
            return f"{level}: {part.reason}"
        median, worst = (max(getattr(t, f"{which}_ratio") for t in self.tensors) for which in ("median", "worst"))
        said = "; ".join(decode.summary for decode in self.decodes)
        return f"errs at most {times(median)} as much as PyTorch at the median, {times(worst)} at worst; {said}"

    def __bool__(self) -> bool:
        return self.first_failure is None

    def to_json(self) -> str:
        """Not a number and infinity become null: JSON has neither."""
        values = {"verdict": bool(self), "reason": self.reason, **dataclasses.asdict(self)}
        for tensor, described in zip(self.tensors, values["tensors"], strict=True):
            described.update(verdict=bool(tensor), median_ratio=tensor.median_ratio, worst_ratio=tensor.worst_ratio)
        for decode, described in zip(self.decodes, values["decodes"], strict=True):
            described.update(verdict=bool(decode), equal=decode.equal)
            for divergence, told in zip(decode.divergences, described["divergences"], strict=True):
                told.update(top_two_budgets=divergence.budgets(divergence.top_two))
        for company, described in zip(self.companies, values["companies"], strict=True):
            described.update(verdict=bool(company), budgets=company.budgets)
        return json.dumps(finite(values), indent=1, allow_nan=False) + "\n"
