"""Reads ONNX files: one function for all of them, which trusts nothing that a file claims about itself.

We read external weights ourselves: onnx refuses a data file with several hard links, as `cp -al` makes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from seq2engine.common.json_files import read_regular, shortened
from seq2engine.errors import ExportError, GraphError

NODE = re.compile(r"Name: (\S+) OpType")  # of the node that the checker is about
LARGEST = 2**31 - 1  # bytes of a graph without its external weights: protobuf's own limit
PACKED: dict[int, int] = {TensorProto.INT4: 2, TensorProto.UINT4: 2}  # numbers in one byte


def graph_from_file(path: Path, weights: bool = False) -> onnx.ModelProto:
    """The graph of a file, with its external weights loaded or left external; raises if it is incomplete."""
    model = unchecked_graph(path)
    try:
        onnx.checker.check_model(without_external_weights(model))
        check_names(model.graph)
    except (ValueError, onnx.checker.ValidationError) as error:
        raise unusable(path, error) from error
    for weight in model.graph.initializer if weights else ():
        weight.raw_data = raw_bytes(weight, path.parent)
        weight.data_location = TensorProto.DEFAULT
        del weight.external_data[:]
    return model


def check_names(graph: onnx.GraphProto) -> None:
    """Raises a ValueError where there is no node, or a name that is no text: protobuf gives it as bytes."""
    if not graph.node:
        raise ValueError("it has no nodes")
    nodes = [name for node in graph.node for name in (node.name, node.op_type, *node.input, *node.output)]
    values = [value.name for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer)]
    if wrong := next((name for name in (*nodes, *values) if not isinstance(name, str)), None):
        raise ValueError(f"its name {shortened(wrong)} is not UTF-8")


def unchecked_graph(path: Path) -> onnx.ModelProto:
    """The graph of a file whose weights are complete, but whose nodes are not checked: parity compares it with the
    right graph node by node, which finds more than ONNX's checker would."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(read_regular(path, LARGEST))
        for weight in model.graph.initializer:
            check_weight(weight, path.parent)
    except (OSError, ValueError, DecodeError) as error:
        raise unusable(path, error) from error
    return model


def without_external_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with external weights replaced by inputs, because the checker would look for their files."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    kept = [weight for weight in model.graph.initializer if weight.data_location != TensorProto.EXTERNAL]
    del probe.graph.initializer[:]
    probe.graph.initializer.extend(kept)
    probe.graph.input.extend(
        helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims))
        for weight in model.graph.initializer
        if weight.data_location == TensorProto.EXTERNAL
    )
    return probe


def unusable(path: Path, error: Exception) -> GraphError:
    message = error.strerror if isinstance(error, OSError) else str(error)
    reason = "it is not an ONNX file" if isinstance(error, DecodeError) else " ".join(str(message).split())[:200]
    named = NODE.search(str(message))
    message = f"{path} cannot be used as a graph ({reason}); export the checkpoint again"
    return GraphError(message, path.stem, named[1] if named else "")


def check_weight(weight: TensorProto, folder: Path) -> None:
    """Raises a ValueError unless the numbers of a weight are all there: in the graph, or in a file of its folder."""
    name, expected = shortened(weight.name), bytes_of(weight)
    if weight.data_location != TensorProto.EXTERNAL:
        held = len(raw_bytes(weight, folder))
        if held != expected:
            raise ValueError(f"weight {name} has {held:,} bytes, expected {expected:,}")
        return
    location, offset, length = external_of(weight)
    if Path(location).name != location:
        raise ValueError(f"weight {name} is in {shortened(location)}, expected a file next to the graph")
    path = folder / location
    size = path.stat().st_size if path.is_file() else 0
    if length != expected or not 0 <= offset <= size - length:
        raise ValueError(
            f"weight {name} is {length:,} bytes at {offset:,} of a file of {size:,}, expected {expected:,}"
        )


def bytes_of(weight: TensorProto) -> int:
    """Bytes that the numbers of a weight take."""
    if any(size < 0 for size in weight.dims):
        raise ValueError(f"weight {shortened(weight.name)} has a negative size")
    try:
        itemsize = helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize
    except KeyError as error:
        raise ValueError(f"weight {shortened(weight.name)} is of an unknown type {weight.data_type}") from error
    return -(-math.prod(weight.dims) * itemsize // PACKED.get(weight.data_type, 1))


def external_of(weight: TensorProto) -> tuple[str, int, int]:
    """File, offset and length of an external weight."""
    fields = {entry.key: entry.value for entry in weight.external_data}
    return fields.get("location", ""), int(fields.get("offset", "0")), int(fields.get("length", bytes_of(weight)))


def raw_bytes(weight: TensorProto, folder: Path) -> bytes:
    """The bytes of a weight that was checked, from the graph or its external data."""
    if weight.data_location != TensorProto.EXTERNAL:
        return weight.raw_data if weight.HasField("raw_data") else numpy_helper.to_array(weight).tobytes()
    location, offset, length = external_of(weight)
    with (folder / location).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def array_of(weight: TensorProto, folder: Path) -> np.ndarray:
    """The numbers of a weight that was checked; those of a file are mapped, not copied, and cannot be written to."""
    if weight.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(weight)
    if weight.data_type not in PACKED and math.prod(weight.dims):
        location, offset, _ = external_of(weight)
        dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
        return np.memmap(folder / location, dtype, "r", offset, tuple(weight.dims)).view(np.ndarray)
    held = TensorProto(name=weight.name, dims=weight.dims, data_type=weight.data_type)
    held.raw_data = raw_bytes(weight, folder)
    return numpy_helper.to_array(held)


@contextmanager
def graph_of_ours(path: Path) -> Iterator[None]:
    """Wraps passes that rely on the structure of our exports: if they do not find it, the file
    is at fault, even if its hash matches."""
    try:
        yield
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ExportError(f"{path} is not a graph as seq2engine exports it ({reason}); export it again") from error
