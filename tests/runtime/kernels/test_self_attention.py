"""Attention over a tree cache, and what it writes there."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_bounds import attention_error
from support.kernel_sessions import run, run_node, same_bits, session_of

from seq2engine.export.kernel_forms import ops

pytestmark = pytest.mark.usefixtures("vectors")
SIZES = st.tuples(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([8, 13, 15, 16, 17, 40, 100]),
    st.integers(1, 70),
)


def arrays(seed: int, sources: int, beams: int, heads: int, slots: int, width: int) -> dict[str, np.ndarray]:
    """Beams see some of the slots before theirs, and of those that are written now their own alone: a tree."""
    rng = np.random.default_rng(seed)
    found = {"qkv": rng.normal(size=(sources, beams, 3 * heads * width)).astype(np.float32)}
    found |= {name: rng.normal(size=(sources, heads, slots, width)).astype(np.float32) for name in ("self_k", "self_v")}
    index = rng.integers(0, slots - beams + 1, sources)
    mask = (rng.random((sources, beams, slots)) < 0.6) & (np.arange(slots) < index[:, None, None])
    for source, start in enumerate(index):
        mask[source, np.arange(beams), start + np.arange(beams)] = True
    return found | {"write_index": index, "self_mask": mask}


def node_of(found: dict[str, np.ndarray], scale: float = 0.3):
    names, heads = {name: name for name in found}, found["self_k"].shape[1]
    return ops.self_attention("attention", ["context", "new_k", "new_v"], **names, heads=heads, scale=scale)


def written(found: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The caches with the new slots."""
    sources, heads, _, width = found["self_k"].shape
    beams = found["qkv"].shape[1]
    caches = found["self_k"].copy(), found["self_v"].copy()
    for part, cache in enumerate(caches, start=1):
        new = found["qkv"].reshape(sources, beams, 3, heads, width)[:, :, part].swapaxes(1, 2)
        for source, start in enumerate(found["write_index"]):
            cache[source, :, start : start + beams] = new[source]
    return caches


def assert_right(found: dict[str, np.ndarray], context: np.ndarray, scale: float) -> None:
    keys, values = written(found)
    sources, heads, _, width = keys.shape
    beams = context.shape[1]
    queries = found["qkv"].reshape(sources, beams, 3, heads, width)[:, :, 0]
    for source, beam, head in np.ndindex(sources, beams, heads):
        seen = found["self_mask"][source, beam]
        q = queries[source, beam, head].astype(np.float64) * (scale if seen.any() else 0)
        seen = np.flatnonzero(seen if seen.any() else ~seen)
        k, v = keys[source, head], values[source, head]
        scores = k[seen].astype(np.float64) @ q
        weights = np.exp(scores - scores.max())
        exact = weights / weights.sum() @ v[seen].astype(np.float64)
        off = np.abs(context[source, beam].reshape(heads, width)[head] - exact)
        assert (off <= attention_error(q, k, v, 1.0, seen)[1]).all(), (source, beam, head)


@given(st.integers(0, 99), SIZES, st.integers(1, 2))
@settings(max_examples=20)
@example(0, (5, 4, 4, 100, 64), 2)
@example(1, (1, 1, 8, 40, 64), 2)
@example(2, (40, 2, 1, 15, 9), 1)  # slots behind the last eight
def test_is_exact_but_for_rounding(seed, sizes, threads):
    found = arrays(seed, *sizes)
    outputs = run_node(node_of(found), found, threads)
    for name, cache in zip(("new_k", "new_v"), written(found), strict=True):
        assert same_bits(outputs[name], cache)
    assert_right(found, outputs["context"], float(np.float32(0.3)))


def test_a_beam_that_sees_nothing_has_the_mean_of_all_slots():
    found = arrays(0, 2, 3, 2, 13, 20)
    found["self_mask"][1, 1] = False
    assert_right(found, run_node(node_of(found), found)["context"], float(np.float32(0.3)))


def test_slots_that_are_not_seen_may_hold_anything():
    found = arrays(0, 2, 3, 2, 13, 20)
    before = run_node(node_of(found), found)["context"]
    for name in ("self_k", "self_v"):
        found[name][~np.broadcast_to(found["self_mask"].any(axis=1)[:, None, :, None], found[name].shape)] = np.nan
    assert same_bits(run_node(node_of(found), found)["context"], before)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_shows_and_stays_in_its_source(wrong):
    found = arrays(0, 3, 2, 2, 13, 20)
    before = run_node(node_of(found), found)["context"]
    found["qkv"][1, 0, 5] = wrong  # of the query of beam 0
    after = run_node(node_of(found), found)["context"]
    assert not np.isfinite(after[1, 0, :20]).any()
    assert same_bits(after[[0, 2]], before[[0, 2]])
    assert same_bits(after[1, 1], before[1, 1])


def bound(session: ort.InferenceSession, found: dict[str, np.ndarray], in_place: bool) -> tuple[dict, dict]:
    """Runs with caches in memory of ours -> the caches that went in and those that came out."""
    binding = session.io_binding()
    given = {name: array.copy() for name, array in found.items()}
    sources, beams, width = found["qkv"].shape
    made = {"context": np.empty((sources, beams, width // 3), np.float32)}
    for name, old in (("new_k", "self_k"), ("new_v", "self_v")):
        made[name] = given[old] if in_place else np.full_like(found[old], 7)
    for name, array in given.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for name, array in made.items():
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
    session.run_with_iobinding(binding)
    return given, made


@pytest.mark.parametrize("in_place", [True, False])
def test_caches_are_written_where_they_lie_or_copied(in_place):
    found = arrays(0, 3, 2, 4, 13, 20)
    given, made = bound(session_of(node_of(found), found), found, in_place)
    for (name, old), cache in zip((("new_k", "self_k"), ("new_v", "self_v")), written(found), strict=True):
        assert same_bits(made[name], cache)
        assert same_bits(given[old], cache if in_place else found[old])
    assert_right(found, made["context"], float(np.float32(0.3)))


@pytest.mark.parametrize("index", [-1, 12, 13, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_place_out_of_the_cache_is_an_error_that_says_so(index, threads):
    found = arrays(0, 3, 2, 2, 13, 20)
    session = session_of(node_of(found), found, threads)
    right = run(session, found)["context"]
    wrong = found["write_index"].copy()
    wrong[1] = index
    with pytest.raises(Exception, match="write_index is out of the cache"):
        run(session, {**found, "write_index": wrong})
    assert same_bits(run(session, found)["context"], right)  # and the session goes on


@pytest.mark.parametrize(
    ("name", "shape"),
    [("self_mask", (3, 2, 12)), ("write_index", (2,)), ("qkv", (3, 2, 60)), ("self_v", (3, 2, 12, 20))],
)
def test_shapes_that_do_not_fit_are_an_error(name, shape):
    found = arrays(0, 3, 2, 2, 13, 20)
    with pytest.raises(Exception, match=r"SelfAttention: .* do not fit"):
        run_node(node_of(found), {**found, name: np.zeros(shape, found[name].dtype)})


def test_an_empty_batch_is_empty():
    found = {name: array[:0] for name, array in arrays(0, 1, 2, 2, 13, 20).items()}
    assert run_node(node_of(found), found)["context"].shape == (0, 2, 40)
