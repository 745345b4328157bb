"""One operator of the kernel library in a session of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from seq2engine.export.kernel_forms.ops import DOMAIN, VERSION
from seq2engine.runtime.kernels.library import library

Arrays = Mapping[str, np.ndarray]
WEIGHTS = {
    "weight",
    "table",
    "scale",
    "bias",
    "smoothing",
    "norm_weight",
    "norm_bias",
    "input_norm_weight",
    "input_norm_bias",
}
TOKENS = "best_tokens"  # the one output that is not float


def model_of(node: NodeProto, given: Arrays, weights: set[str] = WEIGHTS) -> bytes:
    """A graph of one node. `given` has an array for each of its inputs: `weights` are stored, others are fed."""
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(given[name].dtype), [None] * given[name].ndim
        )
        for name in node.input
        if name and name not in weights
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if name == TOKENS else TensorProto.FLOAT, None)
        for name in node.output
    ]
    stored = [numpy_helper.from_array(given[name], name) for name in node.input if name in weights]
    graph = helper.make_graph([node], "operator", inputs, outputs, stored)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


def options_of(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.intra_op_num_threads, options.log_severity_level = threads, 4  # 4: errors are raised, not written, too
    options.enable_cpu_mem_arena = False  # so that each tensor is memory of its own, whose ends a sanitizer knows
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def session_of(
    node: NodeProto, given: Arrays, threads: int = 1, in_place: Mapping[str, ort.OrtValue] | None = None
) -> ort.InferenceSession:
    """Stored arrays are copied, but for those `in_place`, which must live longer than the session."""
    options = options_of(threads)
    for name, value in (in_place or {}).items():
        options.add_initializer(name, value)
    return ort.InferenceSession(model_of(node, given), options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, given: Arrays) -> dict[str, np.ndarray]:
    """Outputs by name; of what is given, a session takes what it is fed."""
    fed = {value.name: given[value.name] for value in session.get_inputs()}
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, fed), strict=True))


def run_node(node: NodeProto, given: Arrays, threads: int = 1) -> dict[str, np.ndarray]:
    return run(session_of(node, given, threads), given)


def open_model(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """A whole graph with operators of the library."""
    return ort.InferenceSession(model.SerializeToString(), options_of(threads), providers=["CPUExecutionProvider"])


def run_in_place(
    session: ort.InferenceSession, given: Arrays, outputs: Sequence[str], cached: str = "new_"
) -> dict[str, np.ndarray]:
    """Outputs by name; an output `new_X` is written to (a copy of) input X, as sessions bind their caches."""
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(np.array(array)) for name, array in given.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        value = values.get(name.removeprefix(cached)) if name.startswith(cached) else None
        if value is None:
            binding.bind_output(name)
        else:
            binding.bind_ortvalue_output(name, value)
    session.run_with_iobinding(binding)
    return {name: np.array(value.numpy()) for name, value in zip(outputs, binding.get_outputs(), strict=True)}


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()
