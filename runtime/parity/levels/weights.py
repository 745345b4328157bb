"""The result of the first level: every number and node of a graph, traced to the reference. Nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .findings import Finding


@dataclass(frozen=True)
class WeightResult:
    """One graph, as stored or in a backend's form (`form`), and its faults.

    `passes` counts the stored tensors by the passes that made them (`transpose, fp16`); `constants`
    are those that are not weights: shapes, scales, masks, and what a form adds.
    """

    graph: str
    form: str
    nodes: int
    constants: int
    numbers: int
    passes: Mapping[str, int]
    faults: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.graph} for {self.form}" if self.form else self.graph

    @property
    def traced(self) -> int:
        return sum(self.passes.values())

    @property
    def reason(self) -> str:
        if not self.faults:
            return ""
        first, more = self.faults[0], len(self.faults) - 1
        where = first.tensor or first.node
        return f"{self.name}: {where}: {first.cause}: {first.detail}" + (f" (and {more} more)" if more else "")

    def __bool__(self) -> bool:
        return not self.faults


def stored_fault(results: tuple[WeightResult, ...], tensor: str = "") -> Finding | None:
    """The first tensor of the reference that is not stored as it should be; or the fault of the tensor of that name."""
    found = [fault for result in results for fault in result.faults if fault.tensor]
    if tensor:
        return next((fault for fault in found if fault.tensor == tensor), None)
    return next((fault for fault in found if fault.cause != "structure"), None)


def structure_fault(results: tuple[WeightResult, ...]) -> Finding | None:
    """The first node, or constant, that is not what the export of the reference has."""
    return next((fault for result in results for fault in result.faults), None)
