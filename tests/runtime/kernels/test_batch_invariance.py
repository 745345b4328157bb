"""A row has the same bits alone and among others, by one thread and by two."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_sessions import run, same_bits, session_of

from seq2engine.export.kernel_forms import ops

pytestmark = pytest.mark.usefixtures("vectors")
ROWS, DEPTH, COLUMNS = 210, 530, 330
PARTS = (
    (0, 1),
    (3, 2),
    (5, 3),
    (40, 4),
    (7, 5),
    (100, 7),
    (20, 12),
    (1, 13),
    (90, 25),
    (33, 100),
    (0, 209),
)  # first, count


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_invariant(node, found, rows: tuple[str, ...], count: int) -> None:
    """`rows`: the inputs that have a row (or a source) each; all outputs have."""
    one, two = session_of(node, found, threads=1), session_of(node, found, threads=2)
    together = run(one, found)
    for name, array in run(two, found).items():
        assert same_bits(array, together[name]), name
    for first, many in PARTS:
        place = slice(first, min(first + many, count))
        some = {**found, **{name: np.ascontiguousarray(found[name][place]) for name in rows}}
        for session in (one, two):
            for name, array in run(session, some).items():
                assert same_bits(array, together[name][place]), f"{name}: rows {place}"


@pytest.mark.parametrize("kind", ["float", "int8", "quantised"])
def test_of_products(kind):
    found = {"x": normal(ROWS, DEPTH), "weight": normal(DEPTH, COLUMNS), "residual": normal(ROWS, COLUMNS)}
    found |= {name: normal(COLUMNS, seed=1) for name in ("bias", "norm_weight", "norm_bias")}
    found["x"][::7] *= 1000  # rows of another size
    if kind == "int8":
        found |= {"weight": np.rint(20 * found["weight"]).clip(-64, 64).astype(np.int8), "scale": normal(COLUMNS)}
    more = {"quantised": True} if kind == "quantised" else {}
    node = ops.linear("linear", "y", **{name: name for name in found}, activation="gelu", epsilon=0.01, **more)
    assert_invariant(node, found, ("x", "residual"), ROWS)


OUTPUTS = ["logits", "exp_sum", "best_logits", "best_tokens"]


@pytest.mark.parametrize("wanted", [0, 3, -3])
@pytest.mark.parametrize("kind", ["float", "screened", "int8"])
def test_of_candidates(kind, wanted):
    vocab, sources = 2100, 70
    found = {
        "x": normal(sources, 1, 65),
        "table": normal(vocab, 65),
        "bias": normal(vocab),
        "wanted": np.array([wanted]),
    }
    found["x"][::7] *= 1000
    if kind == "int8":
        found |= {"table": np.rint(20 * found["table"]).clip(-64, 64).astype(np.int8), "scale": normal(vocab, seed=2)}
    names = {name: name for name in found}
    screened = kind == "screened"
    node = ops.candidates("candidates", OUTPUTS, **names, by_rows=True, screened=screened, words=screened)
    assert_invariant(node, found, ("x",), sources)


def test_of_self_attention():
    sources, beams, heads, slots, width = 70, 3, 4, 37, 24
    found = {"qkv": normal(sources, beams, 3 * heads * width), "write_index": np.arange(sources) % (slots - beams)}
    found |= {name: normal(sources, heads, slots, width) for name in ("self_k", "self_v")}
    found["self_mask"] = np.random.default_rng(0).random((sources, beams, slots)) < 0.5
    names = {name: name for name in found}
    node = ops.self_attention("attention", ["context", "new_k", "new_v"], **names, heads=heads, scale=0.2)
    assert_invariant(node, found, tuple(found), sources)


def cross(sources: int, beams: int, length: int) -> tuple:
    heads, width = 4, 24
    found = {"q": normal(sources, beams, heads * width), "k": normal(sources, heads, width, length)}
    found |= {
        "v": normal(sources, heads, length, width),
        "source_mask": np.random.default_rng(0).random((sources, length)) < 0.9,
    }
    names = {name: name for name in found}
    node = ops.cross_attention("attention", ["context", "weights"], **names, heads=heads, scale=0.2, transposed=True)
    return node, found


def test_of_cross_attention():
    assert_invariant(*cross(70, 6, 45), ("q", "k", "v", "source_mask"), 70)


@pytest.mark.parametrize("beams", [1, 2, 3, 4, 5, 9])
def test_of_beams_of_a_source(beams):
    node, found = cross(3, 9, 45)
    session = session_of(node, found)
    together, fewer = run(session, found), run(session, {**found, "q": np.ascontiguousarray(found["q"][:, :beams])})
    assert same_bits(fewer["context"], together["context"][:, :beams])
    assert same_bits(fewer["weights"], together["weights"][:, :, :beams])


@pytest.mark.parametrize("padding", [1, 7, 16, 40])
def test_of_padding_of_the_source(padding):
    node, found = cross(3, 2, 45)
    more = {
        "k": ((0, 0), (0, 0), (0, 0), (0, padding)),
        "v": ((0, 0), (0, 0), (0, padding), (0, 0)),
        "source_mask": ((0, 0), (0, padding)),
    }
    padded = {**found, **{name: np.pad(found[name], widths) for name, widths in more.items()}}
    session = session_of(node, found)
    assert same_bits(run(session, padded)["context"], run(session, found)["context"])
