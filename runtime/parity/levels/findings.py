"""A located fault: the first tensor beyond its budget, where it is computed, and the cause that explains it."""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = (  # the names of causes
    "mask",
    "ancestor mask",
    "padding leak",
    "position",
    "start token",
    "token ids",
    "cache slot",
    "missing scale",
    "wrong scale",
    "weight",
    "permutation",
    "shift",
    "sign",
    "transposition",
    "stale weights",
    "constant",
    "structure",
    "export",
    "activation",
    "norm",
    "swapped tensors",
    "residual",
    "head order",
    "softmax axis",
    "precision",
    "overflow",
    "crash",
    "engine",
    "session",
    "other side",
    "other weights",
    "unknown",
)


@dataclass(frozen=True)
class Finding:
    """`graph`, `node` and `tensor` are names in the ONNX file; `module` is the PyTorch module that computes the tensor.

    `layer` is the stack and number (`decoder.1`), or the module itself if it is in no layer. `pattern` is the step
    pattern that was fed: greedy, beams, staggered rows; `step` is the first wrong one (None in the encoder).
    """

    graph: str
    node: str
    tensor: str
    module: str
    layer: str
    pattern: str
    step: int | None
    cause: str
    detail: str
    ratios: tuple[float, float]  # of the tensor's errors to PyTorch's: median and maximum
    command: str

    def __post_init__(self) -> None:
        assert self.cause in CAUSES, self.cause

    @property
    def text(self) -> str:
        if not self.node:
            return f"{self.cause}: {self.detail}"
        pattern = f" ({self.pattern})" if self.pattern not in ("", "greedy") else ""
        when = "" if self.step is None else f", step {self.step}{pattern}"
        where = f"first wrong in {self.layer}: {self.graph} node {self.node}{when}"
        return f"{where}; likely cause: {self.cause}: {self.detail}"


def layer_of(module: str) -> str:
    """decoder.3.cross_attn.out -> decoder.3; target_embedding.tokens -> target_embedding."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]
