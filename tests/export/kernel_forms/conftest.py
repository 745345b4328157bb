"""Small graphs as text, for passes that must fuse this and leave that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

OPSET = 24


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., onnx.ModelProto]:
    """(text of a graph, weights by name) -> a model. Weights that are given as a shape are random."""

    def made(text: str, **weights: np.ndarray | tuple[int, ...]) -> onnx.ModelProto:
        rng = np.random.default_rng(0)
        graph = parser.parse_graph(text)
        for name, weight in weights.items():
            array = weight if isinstance(weight, np.ndarray) else rng.normal(size=weight).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(array, name))
        for node in graph.node:
            node.name = f"module/{node.output[0]}"
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)

    return made
