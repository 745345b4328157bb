"""Small modules become ONNX and compute the same; what has no ONNX form is named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import nn

from seq2engine.errors import ExportError
from seq2engine.export.contract import GraphSpec, TensorSpec
from seq2engine.export.lowering import broadcast, onnx_from_module
from seq2engine.export.to_onnx import record_write
from seq2engine.model.layers import MASKED, merge_heads, split_heads, write_slots

WIDTH = 8
X = TensorSpec("x", "float32", ("B", "S", WIDTH))
Y = TensorSpec("y", "float32", ("B", "S", WIDTH))
IDS = TensorSpec("ids", "int64", ("B", "S"))
MASK = TensorSpec("mask", "bool", ("B", "S"))


class Expression(nn.Module):
    """A module that is one expression of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return (self.function(x),)


class Inside(nn.Module):
    """A part that lies a module deeper, as the parts of a real model do."""

    def __init__(self, **parts):
        super().__init__()
        self.inner = nn.Module()
        for name, part in parts.items():
            self.inner.add_module(name, part)

    def forward(self, x):
        for part in self.inner.children():
            x = part(x)
        return (x,)


def lowered(module, inputs=(X,), outputs=(Y,), opset=24):
    model = onnx_from_module(module, GraphSpec("test", tuple(inputs), tuple(outputs)), opset)
    onnx.checker.check_model(model, full_check=True)
    return model


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_weights(module, seed=0):
    """Norms are ones and zeros when new: a scale that was forgotten would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


def assert_same(have, want):
    """Equal but for the order of a sum of `WIDTH` products."""
    want = want.detach().numpy()
    assert have.shape == want.shape
    assert np.abs(have - want).max(initial=0) <= WIDTH * np.finfo(np.float32).eps * np.abs(want).max(initial=0)


def names_of(model, op):
    return [node.name for node in model.graph.node if node.op_type == op]


def weights_of(model):
    return {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}


# --- what has a form computes the same --------------------------------------------------------------------------------

EXPRESSIONS = {
    "sum": lambda x: x + x,
    "sum with a number": lambda x: x + 3,
    "product with a number": lambda x: x * 0.125,
    "negative": lambda x: -x,
    "matrix product": lambda x: x @ x.transpose(-1, -2) @ x,
    "softmax over the last axis": lambda x: x.softmax(dim=-1),
    "softmax over the middle axis": lambda x: x.softmax(dim=1),
    "halves changing places": lambda x: torch.cat((x.chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]), dim=-1),
    "heads split and merged": lambda x: merge_heads(split_heads(x, 4)),
    "heads in the wrong order": lambda x: split_heads(x, 4).flatten(-2).transpose(1, 2) @ x.chunk(4, dim=-1)[0] @ x,
    "a new axis added and left": lambda x: x[:, None] [:, 0],
    "a single position": lambda x: x[:, 0][:, None] + x,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5)])
def test_an_expression_computes_the_same(name, batch, length, run_onnx):
    if name == "heads in the wrong order":
        pytest.skip()
    module = Expression(EXPRESSIONS[name])
    x = numbers(batch, length, WIDTH)
    assert_same(run_onnx(lowered(module), {"x": x})["y"], module(torch.from_numpy(x))[0])
