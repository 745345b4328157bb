"""One loader for ONNX files: hard links are read, and what is not whole is one line, whatever its hash."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest

from seq2engine.errors import ExportError, GraphError
from seq2engine.export.artifact.graph_files import array_of, graph_from_file, graph_of_ours


@pytest.fixture
def path(own_bundle) -> Path:
    found: Path = own_bundle.graph_path("fp32", "decoder_step")
    return found


def refusal(path: Path) -> str:
    with pytest.raises(GraphError) as caught:
        graph_from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be used as a graph (")
    assert "\n" not in message
    return message


def test_weights_are_those_that_the_library_reads(path):
    theirs = {weight.name: onnx.numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}
    whole, bare = graph_from_file(path, weights=True), graph_from_file(path)
    for weight, left in zip(whole.graph.initializer, bare.graph.initializer, strict=True):
        assert np.array_equal(onnx.numpy_helper.to_array(weight), theirs[weight.name])
        assert np.array_equal(array_of(left, path.parent), theirs[weight.name])


def test_data_with_a_second_hard_link_is_read(path, tmp_path):
    os.link(path.with_name(path.name + ".data"), tmp_path / "second")  # as `cp -al` makes them
    assert graph_from_file(path, weights=True).graph.initializer[0].raw_data


def test_what_is_no_graph(path, tmp_path):
    path.write_bytes(b"\xff" * 100)
    assert "it is not an ONNX file" in refusal(path)
    path.write_bytes(b"")
    refusal(path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"location": "../x"}, "expected a file next to the graph"),
        ({"location": "/etc/passwd"}, "expected a file next to the graph"),
        ({"offset": str(2**62)}, "of a file of"),
        ({"offset": "-4"}, "of a file of"),
        ({"length": str(2**40)}, "of a file of"),
        ({"offset": "x"}, "invalid literal"),
    ],
)
def test_external_data_that_is_not_there(change, problem, path):
    model = onnx.load(path, load_external_data=False)
    weight = next(w for w in model.graph.initializer if w.external_data)
    fields = {entry.key: entry.value for entry in weight.external_data} | change
    del weight.external_data[:]
    for key, value in fields.items():
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    assert problem in refusal(path)


def test_a_size_that_no_file_has(path):
    model = onnx.load(path, load_external_data=False)
    next(w for w in model.graph.initializer if w.external_data).dims[0] = 2**40
    path.write_bytes(model.SerializeToString())
    assert "of a file of" in refusal(path)


def test_flipped_bytes_are_read_or_refused(path):
    """Any other exception than these two fails here."""
    content, rng = path.read_bytes(), Random(0)
    for _ in range(60):
        flipped = bytearray(content)
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        path.write_bytes(flipped)
        with contextlib.suppress(ExportError, GraphError):
            graph_from_file(path)


@pytest.mark.parametrize("error", [AssertionError("no attention"), KeyError("x"), IndexError(), UnicodeError("x")])
def test_a_pass_that_does_not_find_our_structure_names_the_file(error):
    with (
        pytest.raises(ExportError, match=r"a.onnx is not a graph as seq2engine exports it"),
        graph_of_ours(Path("a.onnx")),
    ):
        raise error
