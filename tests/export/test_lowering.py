"""Small modules become ONNX and compute the same; what has no ONNX form is named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
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
    "number first": lambda x: 0.125 * x,
    "negative": lambda x: -x,
    "matrix product": lambda x: x @ x.transpose(-1, -2) @ x,
    "softmax over the last axis": lambda x: x.softmax(dim=-1),
    "softmax over the middle axis": lambda x: x.softmax(dim=1),
    "halves changing places": lambda x: torch.cat((x.chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]), dim=-1),
    "heads split, used and merged": lambda x: merge_heads(split_heads(x, 4).softmax(dim=-1)),
    "an axis added and left again": lambda x: x[:, None, :, None][:, 0, :, 0],
    "the first position added to all": lambda x: x[:, 0][:, None] + x,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5)])
def test_an_expression_computes_the_same(name, batch, length, run_onnx):
    module = Expression(EXPRESSIONS[name])
    x = numbers(batch, length, WIDTH)
    assert_same(run_onnx(lowered(module), {"x": x})["y"], module(torch.from_numpy(x))[0])


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH, eps=0.1),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "identity and relu": lambda: nn.Sequential(nn.Identity(), nn.ReLU()),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_computes_the_same(name, run_onnx):
    module = Inside(part=random_weights(PARTS[name]()))
    x = numbers(2, 5, WIDTH)
    assert_same(run_onnx(lowered(module), {"x": x})["y"], module(torch.from_numpy(x))[0])


class Lookup(nn.Module):
    """Rows of a table by ids, and of another by position: sizes come from the input, never from an example."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, WIDTH)
        self.positions = nn.Parameter(torch.empty(20, WIDTH))

    def forward(self, ids):
        return (self.tokens(ids) + self.positions[torch.arange(ids.shape[1], device=ids.device)[None]],)


@pytest.mark.parametrize("length", [1, 7, 20])
def test_positions_follow_the_length_of_the_input(length, run_onnx):
    module = random_weights(Lookup())
    model = lowered(module, [IDS])
    assert set(weights_of(model)) >= {"tokens.weight", "positions"}
    ids = np.random.default_rng(0).integers(0, 30, (3, length))
    assert_same(run_onnx(model, {"ids": ids})["y"], module(torch.from_numpy(ids))[0])


class Masked(nn.Module):
    def forward(self, x, mask):
        return (torch.where(mask[:, :, None], x, MASKED).softmax(dim=1),)


def test_a_mask_selects_and_a_fully_masked_row_stays_finite(run_onnx):
    x, mask = numbers(3, 4, WIDTH), np.array([[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool)
    y = run_onnx(lowered(Masked(), [X, MASK]), {"x": x, "mask": mask})["y"]
    assert_same(y, Masked()(torch.from_numpy(x), torch.from_numpy(mask))[0])
    assert (y[:2][~mask[:2]] == 0).all()
    assert (y[2] == 0.25).all()


class Scatter(nn.Module):
    def forward(self, cache, *rest):
        return (record_write(cache, rest[0], rest[1]),)


def test_slots_are_written_at_each_write_index(run_onnx):
    cache = TensorSpec("cache", "float32", ("B", 2, "L", 3))
    new = TensorSpec("new", "float32", ("B", 2, "K", 3))
    where = TensorSpec("where", "int64", ("B",))
    model = lowered(Scatter(), [cache, new, where], [TensorSpec("new_cache", "float32", cache.axes)])
    assert names_of(model, "TensorScatter") == ["TensorScatter"]
    feeds = {"cache": numbers(3, 2, 6, 3), "new": numbers(3, 2, 2, 3, seed=1), "where": np.array([0, 4, 2])}
    expected = write_slots(*(torch.tensor(array) for array in feeds.values())).numpy()
    np.testing.assert_array_equal(run_onnx(model, feeds)["new_cache"], expected)


# --- weights and names ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An output projection that is the embedding table, as in most translation models."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, WIDTH)
        self.output = nn.Linear(WIDTH, 30, bias=False)
        self.output.weight = self.tokens.weight
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return (self.output(self.tokens(ids)),)


def test_a_tied_weight_is_stored_once_and_an_unused_one_not_at_all(run_onnx):
    module = random_weights(Tied())
    model = lowered(module, [IDS], [TensorSpec("y", "float32", ("B", "S", 30))])
    assert {name: array.shape for name, array in weights_of(model).items()} == {"tokens.weight": (30, WIDTH)}
    ids = np.random.default_rng(0).integers(0, 30, (3, 4))
    assert_same(run_onnx(model, {"ids": ids})["y"], module(torch.from_numpy(ids))[0])


def test_a_part_that_is_called_twice_is_stored_once():
    part = nn.Linear(WIDTH, WIDTH)
    model = lowered(Inside(first=part, again=nn.Sequential(part)))
    assert set(weights_of(model)) == {"inner.first.weight", "inner.first.bias"}
    assert len(names_of(model, "MatMul")) == 2


def test_names_are_module_paths_and_never_repeat():
    model = lowered(Inside(first=nn.Linear(WIDTH, WIDTH), second=nn.Sequential(nn.SiLU(), nn.SiLU())))
    assert names_of(model, "MatMul") == ["inner.first/MatMul"]
    assert names_of(model, "Sigmoid") == ["inner.second.0/Sigmoid", "inner.second.1/Sigmoid"]
    every = [node.name for node in model.graph.node]
    assert len(set(every)) == len(every)
    assert [node.output[0] for node in model.graph.node[:-1]] == every[:-1]  # a tensor is named after its node


def test_a_name_used_again_gets_a_number():
    model = lowered(Expression(lambda x: x + x + x + x))
    assert names_of(model, "Add") == ["Add", "Add.1", "Add.2"]


def test_equal_constants_are_stored_once():
    model = lowered(Expression(lambda x: (x * 0.5 + 0.5) * 0.5 + 2.0))
    assert sorted(float(array) for array in weights_of(model).values()) == [0.5, 2.0]


def test_the_least_ir_version_of_the_opset_is_written():
    old, new = lowered(Expression(lambda x: -x), opset=20), lowered(Expression(lambda x: -x), opset=24)
    assert [model.opset_import[0].version for model in (old, new)] == [20, 24]
    assert old.ir_version < new.ir_version


# --- what has no form -------------------------------------------------------------------------------------------------


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Ceiling(nn.Module):
    def forward(self, x):
        return x.ceil()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Wave(), "sin in inner.part: no ONNX form is known for sin"),
        (Ceiling(), "ceil in inner.part: no ONNX form is known for ceil"),
        (nn.Tanh(), "inner_part in inner.part: no ONNX form is known for Tanh"),
    ],
)
def test_an_op_without_a_form_is_named_with_its_module(part, message):
    with pytest.raises(ExportError) as error:
        lowered(Inside(part=part))
    assert str(error.value) == message


def test_an_op_at_the_top_is_in_the_model():
    with pytest.raises(ExportError, match=r"^cos in the model: no ONNX form is known for cos$"):
        lowered(Expression(torch.cos))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.flatten(1), "only fixed sizes are merged"),
        (lambda x: x.transpose(1, 2).unflatten(1, (2, 4)), "a dynamic axis may not move"),
        (lambda x: x.chunk(2, dim=1)[0], "fixed widths only"),
        (lambda x: x.chunk(3, dim=2)[0], "equal parts only"),
        (lambda x: x[:, 1:], "only whole axes"),
    ],
)
def test_a_size_that_would_have_to_be_written_down_is_refused(function, message):
    with pytest.raises(AssertionError, match=message):
        lowered(Expression(function))


# --- shapes -----------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(2, 9), min_size=0, max_size=4)


@settings(deadline=None)  # a busy machine is not a failure
@given(sizes, st.data())
def test_broadcast_shapes_are_numpys(full, data):
    def thinned():
        kept = [size if data.draw(st.booleans()) else 1 for size in full]
        return tuple(kept[data.draw(st.integers(0, len(kept))) :])

    a, b = thinned(), thinned()
    assert broadcast(a, b) == np.broadcast_shapes(a, b)


def test_a_letter_wins_over_one():
    assert broadcast(("B", 1, 8), (1, "S", 1)) == ("B", "S", 8)
