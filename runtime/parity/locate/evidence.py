"""The evidence about a wrong tensor, and how well a possible cause explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seq2engine.export.debug_outputs import Call

from ...numerics.budgets import ErrorTally
from ...numerics.error_scale import errors_of
from .three_way import MASKED, Trio, add_to


@dataclass(frozen=True)
class Guess:
    cause: str
    detail: str
    expected: Tensor
    module: str | None = None  # the module at fault, if not the one that computes the tensor


@dataclass(frozen=True)
class Evidence:
    """The wrong tensor of one call: its inputs, the right values and those found. Numbers are fp64."""

    trio: Trio
    tensor: str
    precision: str
    call: Call
    exact: np.ndarray
    rounded: np.ndarray
    given: np.ndarray
    fed: dict[str, Tensor]  # the graph's inputs
    others: dict[str, Tensor]  # more tensors of the oracle, which may have been read by mistake

    @property
    def found(self) -> Tensor:
        return torch.from_numpy(self.given.astype(np.float64))

    @property
    def leaf(self) -> Any:
        return self.trio.oracle.leaf(self.tensor)

    @property
    def target(self) -> Any:
        return self.call.node.target

    def strain(self, expected: Tensor) -> float:
        """The share of the budget that is used if the graph computes this; above 1 it does not."""
        if tuple(expected.shape) != self.given.shape or not expected.is_floating_point():
            return math.inf
        wanted = expected.double().numpy()
        with np.errstate(invalid="ignore"):
            errors = self.rounded.astype(np.float64) - self.exact
        errors[self.rounded == self.exact] = 0.0  # infinities as well
        if (hidden := self.exact == MASKED).any():  # nothing is computed here, so the error of the inputs counts
            errors[hidden] = np.resize(errors[~hidden], int(hidden.sum())) if not hidden.all() else 0.0
        tally = ErrorTally(self.precision)
        add_to(tally, self.tensor, wanted, wanted + errors.reshape(wanted.shape), self.given)
        return tally.result("locate", self.tensor).strain

    def again(self, args: tuple[Any, ...]) -> Tensor:
        """The same call with other arguments."""
        node = self.call.node
        args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)  # some write into them
        if node.op == "call_module":
            return self.leaf(*args, **node.kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **node.kwargs)
        return node.target(*args, **node.kwargs)  # type: ignore[operator]


def file_weights(e: Evidence, rank: int, reader: str = "") -> list[np.ndarray]:
    """The stored weights of that rank between a tensor and the tensors before it; `reader`: only those that such an op
    reads, at once or cast."""
    file = e.trio.file
    makers = {name: node for node in file.model.graph.node for name in node.output}
    before, found, front = set(e.trio.names) - {e.tensor}, [], [(e.tensor, False, "")]
    seen: set[str] = set()
    while front:
        name, transposed, read_by = front.pop()
        if name in file.weights:
            array = file.weight(name)
            wanted = array.ndim == rank and reader in ("", read_by)
            found += [array.T if transposed else array] if wanted else []
        elif name in makers and name not in before and name not in seen:
            seen.add(name)
            node = makers[name]
            op = read_by if node.op_type == "Cast" else node.op_type
            front += [(given, transposed ^ (node.op_type == "Transpose"), op) for given in node.input]
    return found


def as_real(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


def described(e: Evidence) -> str:
    """Where a tensor is wrong, if no guess explains it."""
    if e.given.shape != e.exact.shape:
        return f"its shape is {list(e.given.shape)}, expected {list(e.exact.shape)}"
    errors = errors_of(e.exact.astype(np.float64), e.given.astype(np.float64))
    broken = ~np.isfinite(errors)
    if broken.any():
        most = np.abs(e.exact).max(initial=0.0, where=np.isfinite(e.exact))
        return f"{int(broken.sum())} of {errors.size} numbers are not finite, where fp64 reaches {most:.3g}"
    wrong = errors > errors_of(e.exact.astype(np.float64), e.rounded.astype(np.float64)).max()
    columns = np.unique(np.nonzero(wrong)[-1]) if wrong.any() else np.zeros(0)
    where = f", all in column {int(columns[0])}" if len(columns) == 1 else ""
    count = f"{int(wrong.sum())} of {errors.size} numbers"
    return f"no known cause explains it: {count} are off by up to {errors.max():.3g}{where}"
