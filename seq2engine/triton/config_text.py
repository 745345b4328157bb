"""The config.pbtxt of Triton models: inputs, outputs and instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "string": "TYPE_STRING",
}


@dataclass(frozen=True)
class Tensor:
    """An input or output; letters of the axes are dynamic. `optional` inputs may be left out."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Warmup:
    """Requests that Triton sends when a model is loaded: the shape of every input, filled with zeros."""

    name: str
    shapes: dict[str, tuple[int, ...]]


# Of the model that decodes. Text is UTF-8 in uint8: strings end the Python stub of older servers with numpy 2, and with
# it every request, so that they are declared only on request.
STRING_INPUT, STRING_OUTPUT = Tensor("text", "string", (1,), optional=True), Tensor("text", "string", (1,))
DECODING_INPUTS = (
    Tensor("text_utf8", "uint8", ("bytes",), optional=True),
    Tensor("ids", "int64", ("tokens",), optional=True),
)
DECODING_OUTPUTS = (
    Tensor("text_utf8", "uint8", ("bytes",)),
    Tensor("tokens", "int64", ("tokens",)),
    Tensor("score", "float32", (1,)),
    Tensor("rank", "int32", (1,)),
    Tensor("final", "bool", (1,)),
)


def decoding_config(name: str, instances: int, gpu: bool, strings: bool = False) -> str:
    """For the Python model. It batches by itself, so Triton must not: `max_batch_size` is 0."""
    return "\n".join(
        [
            *head_lines(name, 'backend: "python"'),
            "model_transaction_policy { decoupled: true }",
            *tensor_lines("input", (*DECODING_INPUTS, *([STRING_INPUT] if strings else []))),
            *tensor_lines("output", (*DECODING_OUTPUTS, *([STRING_OUTPUT] if strings else []))),
            *instance_lines(instances, gpu),
            "",
        ]
    )


def graph_config(
    name: str,
    platform: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    instances: int,
    gpu: bool,
    warmup: Warmup,
) -> str:
    """For a graph or engine alone. Its batch is an ordinary axis: sources of a step share shapes."""
    types = {tensor.name: TYPES[tensor.dtype] for tensor in inputs}
    return "\n".join(
        [
            *head_lines(name, f'platform: "{platform}"'),
            *tensor_lines("input", inputs),
            *tensor_lines("output", outputs),
            *instance_lines(instances, gpu),
            "model_warmup [",
            "  {",
            f'    name: "{warmup.name}"',
            "    batch_size: 0",
            *(
                f'    inputs {{ key: "{key}" value {{ data_type: {types[key]} dims: [ {joined(shape)} ] '
                "zero_data: true } }"
                for key, shape in warmup.shapes.items()
            ),
            "  }",
            "]",
            "",
        ]
    )


def head_lines(name: str, kind: str) -> list[str]:
    return [f'name: "{name}"', kind, "max_batch_size: 0"]


def tensor_lines(side: str, tensors: Iterable[Tensor]) -> list[str]:
    lines = []
    for tensor in tensors:
        dims = joined(axis if isinstance(axis, int) else -1 for axis in tensor.axes)
        optional = " optional: true" if tensor.optional else ""
        lines.append(f'  {{ name: "{tensor.name}" data_type: {TYPES[tensor.dtype]} dims: [ {dims} ]{optional} }}')
    return [f"{side} [", ",\n".join(lines), "]"]


def instance_lines(count: int, gpu: bool) -> list[str]:
    return [f"instance_group [ {{ count: {count} kind: {'KIND_GPU' if gpu else 'KIND_CPU'} }} ]"]


def joined(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
