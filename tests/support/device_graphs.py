"""Tiny graphs run by ONNX Runtime and built by TensorRT-RTX, as tests need them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.export.contract import GraphSpec
from seq2engine.export.engines.build import build_engine
from seq2engine.export.engines.kernels import kernels_from_engine


class OrtGraph:
    """A graph opened by ONNX Runtime: arrays by name in, arrays by name out."""

    def __init__(self, made: tuple[onnx.ModelProto, GraphSpec]):
        model, self.spec = made
        onnx.checker.check_model(model, full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        assert [tensor.name for tensor in self.session.get_inputs()] == [t.name for t in self.spec.inputs]

    def __call__(self, **given: np.ndarray) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.spec.outputs]
        feeds = {tensor.name: np.ascontiguousarray(given[tensor.name]) for tensor in self.spec.inputs}
        found = dict(zip(names, self.session.run(names, feeds), strict=True))
        for tensor in self.spec.outputs:
            assert found[tensor.name].dtype == tensor.dtype
        return found


def launches_of(made: tuple[onnx.ModelProto, GraphSpec], *sizes: dict[str, int]) -> int:
    """Launches of an engine of the graph, built for sm86 and these sizes of its letters at min, opt and max."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    model, spec = made
    least, usual, most = sizes
    shapes = {t.name: (t.shape(least), t.shape(usual), t.shape(most)) for t in spec.inputs}
    engine = build_engine(
        load_tensorrt("tensorrt_rtx"), model, Path(f"{spec.name}.onnx"), shapes, ["sm86"], lambda fraction: None
    )
    return kernels_from_engine(engine).launches
