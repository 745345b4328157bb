"""Products with float and int8 weights, and what follows them, against exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_bounds import activated, activation_error, added_error, gamma, int8_error, norm_error, product_error
from support.kernel_ops import int8_product, normalised, rounded_rows
from support.kernel_sessions import run, run_node, same_bits, session_of

from seq2engine.export.kernel_forms import ops
from seq2engine.export.ort_forms.int8_matmul import SIGNED, STEPS_OF

pytestmark = pytest.mark.usefixtures("vectors")
ACTIVATIONS = ["", ops.RELU, ops.GELU, ops.SILU]
STEPS = {"": SIGNED, **{name.lower(): steps for name, steps in STEPS_OF.items()}}
ROWS = st.one_of(st.integers(1, 40), st.integers(190, 210))
DEPTHS = st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 777, 1029, 1100]))
COLUMNS = st.one_of(st.integers(1, 200), st.sampled_from([255, 256, 257, 300]))
PARTS = st.fixed_dictionaries(
    {
        "bias": st.booleans(),
        "residual": st.booleans(),
        "smoothing": st.booleans(),
        "norm": st.sampled_from(["", "layer", "layer without bias", "rms"]),
    }
)
NONE = {"bias": False, "residual": False, "smoothing": False, "norm": ""}
ALL = {"bias": True, "residual": True, "smoothing": True, "norm": "layer"}


def paired(rng: np.random.Generator, shape: tuple[int, int], axis: int = 0) -> np.ndarray:
    """int8 weights of which no two neighbours exceed 128 together, as those of a bundle."""
    weights = rng.integers(-127, 128, shape).swapaxes(0, axis)
    even, odd = weights[:-1:2], weights[1::2]
    np.clip(odd, np.abs(even) - 128, 128 - np.abs(even), out=odd)
    return np.ascontiguousarray(weights.swapaxes(0, axis)).astype(np.int8)


def arrays(seed: int, rows: int, depth: int, columns: int, parts: dict, made_by: str = "") -> dict[str, np.ndarray]:
    """Inputs of a Linear by name. `made_by`: the activation function that made x."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    found = {"x": activated(3 * normal(rows, depth), made_by).astype(np.float32), "weight": normal(depth, columns)}
    shapes = {"bias": [columns], "residual": [rows, columns], "smoothing": [depth]}
    found |= {name: normal(*shape) for name, shape in shapes.items() if parts[name]}
    if "smoothing" in found:
        found["smoothing"] = np.exp(found["smoothing"])
    if parts["norm"]:
        found["norm_weight"] = normal(columns)
    if parts["norm"] == "layer":
        found["norm_bias"] = normal(columns)
    return found


def in_int8(found: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = found["weight"].shape[1]
    scale = rng.uniform(0.001, 0.02, columns).astype(np.float32)
    return {**found, "weight": paired(rng, found["weight"].shape), "scale": scale}


def node_of(found: dict[str, np.ndarray], parts: dict, **more):
    return ops.linear("linear", "y", **{name: name for name in found}, epsilon=0.01, rms=parts["norm"] == "rms", **more)


def finished(product, error, found, activation, parts) -> tuple[np.ndarray, np.ndarray]:
    """What follows a product: exact, and the error that is allowed."""
    y = product
    if "bias" in found:
        y, error = y + found["bias"], added_error(y, error, found["bias"])
    y, error = activated(y, activation), activation_error(y, error, activation)
    if "residual" in found:
        y, error = y + found["residual"], added_error(y, error, found["residual"])
    if parts["norm"]:
        norm = found["norm_weight"], found.get("norm_bias"), 0.01, parts["norm"] == "rms"
        y, error = normalised(y, *norm), norm_error(y, error, *norm)
    return y, error


def assert_within(found: np.ndarray, exact: np.ndarray, error: np.ndarray) -> None:
    assert found.shape == exact.shape
    off = np.abs(found - exact)
    worst = np.argmax(off - error)
    assert (off <= error).all(), f"{found.flat[worst]} for {exact.flat[worst]}: only {error.flat[worst]} is allowed"


def smoothed(found) -> np.ndarray:
    return found["x"] * found["smoothing"] if "smoothing" in found else found["x"]


@given(st.integers(0, 99), ROWS, DEPTHS, COLUMNS, st.sampled_from(ACTIVATIONS), PARTS, st.integers(1, 2))
@settings(max_examples=30)
@example(0, 13, 1029, 130, "gelu", ALL, 2)
@example(1, 1, 513, 129, "", NONE, 1)
def test_float_products_are_exact_but_for_rounding(seed, rows, depth, columns, activation, parts, threads):
    found = arrays(seed, rows, depth, columns, parts)
    y = run_node(node_of(found, parts, activation=activation), found, threads)["y"]
    x = smoothed(found)
    product = x.astype(np.float64) @ found["weight"].astype(np.float64)
    assert_within(y, *finished(product, product_error(x, found["weight"]), found, activation, parts))


@given(
    st.integers(0, 99),
    ROWS,
    DEPTHS,
    COLUMNS,
    st.sampled_from(ACTIVATIONS),
    PARTS,
    st.sampled_from([*STEPS]),
    st.integers(1, 2),
)
@settings(max_examples=30)
@example(0, 13, 1029, 130, "gelu", ALL, "", 2)
@example(1, 1, 3, 129, "", NONE, "gelu", 1)
@example(2, 3, 17, 65, "silu", NONE, "silu", 1)
@example(3, 2, 9, 32, "relu", NONE, "relu", 1)
def test_int8_products_have_exact_sums(seed, rows, depth, columns, activation, parts, made_by, threads):
    found = in_int8(
        arrays(seed, rows, depth, columns, {**parts, "smoothing": parts["smoothing"] and not made_by}, made_by), seed
    )
    steps = STEPS[made_by]
    y = run_node(node_of(found, parts, activation=activation, steps=steps), found, threads)["y"]
    product = int8_product(smoothed(found), found["weight"], found["scale"], steps.above, steps.zero, steps.least)
    assert_within(y, *finished(product, int8_error(product), found, activation, parts))


@given(st.integers(0, 99), ROWS, DEPTHS, COLUMNS, PARTS)
@settings(max_examples=15)
def test_float_weights_are_rounded_by_output(vectors, seed, rows, depth, columns, parts):
    found = arrays(seed, rows, depth, columns, parts)
    y = run_node(node_of(found, parts, quantised=True), found)["y"]
    weight, scale, unsure = rounded_weight(found["weight"], most=127 if vectors == 16 else 64)
    product = int8_product(smoothed(found), weight, scale, SIGNED.above, SIGNED.zero, 0.0)
    integers, rows = rounded_rows(smoothed(found), SIGNED.above, SIGNED.zero, 0.0)
    either = (np.abs(integers) @ unsure) * scale.astype(np.float64) * rows / SIGNED.above
    assert_within(y, *finished(product, int8_error(product) + (1 + gamma(4)) * either, found, "", parts))


def rounded_weight(weight: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As the library rounds it: steps, scales, and where a weight lies between two steps but for rounding.

    Without VNNI two neighbours must not exceed 128 together, so there are fewer steps."""
    scale = np.abs(weight).max(axis=0) / np.float32(most)
    steps = weight.astype(np.float64) * (np.float32(1) / scale).astype(np.float64)
    unsure = np.abs(np.abs(steps - np.floor(steps)) - 0.5) <= gamma(1) * np.abs(steps)
    return np.rint(steps).astype(np.int8), scale, unsure


@given(st.integers(0, 99), ROWS, st.integers(1, 70), st.sampled_from(["layer", "layer without bias", "rms"]))
@settings(max_examples=10)
def test_inputs_are_normalised_as_outputs_are(seed, rows, depth, norm):
    """The same bits as of a product with 1 that is normalised and goes into the product that follows."""
    before = arrays(seed, rows, depth, depth, {**NONE, "norm": norm}) | {"weight": np.eye(depth, dtype=np.float32)}
    x = run_node(node_of(before, {"norm": norm}), before)["y"]
    found = arrays(seed, rows, depth, 40, {**NONE, "smoothing": True})
    names = {f"input_{name}": before[name] for name in ("norm_weight", "norm_bias") if name in before}
    for each in (found, in_int8(found, seed)):
        expected = run_node(node_of(each, NONE), {**each, "x": x})["y"]
        fused = {**each, "x": before["x"], **names}
        node = node_of(fused, NONE, input_epsilon=0.01, input_rms=norm == "rms")
        assert same_bits(run_node(node, fused)["y"], expected)


@pytest.mark.parametrize("kind", ["float", "int8", "quantised"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_of_zeros_are_the_bias(kind, activation):
    parts = {**NONE, "bias": True}
    found = arrays(0, 3, 13, 37, parts)
    found["x"][1] = 0
    found = in_int8(found, 0) if kind == "int8" else found
    node = node_of(found, parts, activation=activation, **({"quantised": True} if kind == "quantised" else {}))
    bias = found["bias"].astype(np.float64)
    exact, error = activated(bias, activation), activation_error(bias, np.zeros(37), activation)
    assert_within(run_node(node, found)["y"][1], exact, error)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kind", "steps"), [("float", ""), ("quantised", ""), *(("int8", steps) for steps in STEPS)])
def test_what_is_no_number_stays_in_its_row_and_shows_there(kind, steps, wrong):
    """At each place of a row: at its beginning, inside a vector, and in what is left behind the last whole one."""
    found = arrays(0, 20, 35, 40, ALL, steps)
    del found["smoothing"]
    found = in_int8(found, 0) if kind == "int8" else found
    more = {"steps": STEPS[steps]} if kind == "int8" else {"quantised": kind == "quantised"}
    session = session_of(node_of(found, ALL, **more), found)
    before = run(session, found)["y"]
    for place, row in ((0, 0), (17, 7), (34, 19)):
        x = found["x"].copy()
        x[row, place] = wrong
        y = run(session, {**found, "x": x})["y"]
        assert not np.isfinite(y[row]).any()
        others = np.arange(20) != row
        assert same_bits(y[others], before[others])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_hold_over_the_whole_range(activation):
    """x passes the product unchanged: one input, whose weight is 1."""
    magnitudes = np.concatenate([np.geomspace(1e-30, 300, 2000), np.linspace(0, 20, 2000)])
    x = np.concatenate([-magnitudes, magnitudes]).astype(np.float32)[:, None]
    found = {"x": x, "weight": np.ones((1, 1), np.float32)}
    y = run_node(node_of(found, NONE, activation=activation), found)["y"]
    exact = activated(x.astype(np.float64), activation)
    assert_within(y, exact, activation_error(x.astype(np.float64), np.zeros(x.shape), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_no_number_are_none(activation):
    found = {"x": np.full((2, 1), np.nan, np.float32), "weight": np.ones((1, 1), np.float32)}
    assert np.isnan(run_node(node_of(found, NONE, activation=activation), found)["y"]).all()


def test_the_norm_of_a_single_number_is_its_bias():
    found = arrays(0, 5, 7, 1, ALL) | {
        name: np.full(1, 0.5, np.float32) for name in ("bias", "norm_weight", "norm_bias")
    }
    assert (run_node(node_of(found, ALL), found)["y"] == 0.5).all()


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)])
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_an_empty_batch_is_empty(shape, kind):
    found = arrays(0, 1, 5, 9, {**ALL, "residual": False})
    found = in_int8(found, 0) if kind == "int8" else found
    found["x"] = np.zeros(shape, np.float32)
    assert run_node(node_of(found, ALL), found)["y"].shape == (*shape[:-1], 9)


def test_all_axes_but_the_last_are_rows():
    found = arrays(0, 12, 5, 7, NONE)
    flat = run_node(node_of(found, NONE), found)["y"]
    deep = {**found, "x": found["x"].reshape(2, 3, 2, 5)}
    assert same_bits(run_node(node_of(deep, NONE), deep)["y"], flat.reshape(2, 3, 2, 7))


def test_a_weight_of_another_depth_is_an_error():
    found = {"x": np.zeros((2, 4), np.float32), "weight": np.zeros((5, 3), np.float32)}
    with pytest.raises(Exception, match=r"x \[.., D\], weight \[D, N\] and the other inputs do not fit"):
        run_node(node_of(found, NONE), found)
