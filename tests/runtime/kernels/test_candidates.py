"""The best tokens of a row, the sum of its softmax, and how they are found without all logits."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_bounds import added_error, exp_sum_error, int8_error, product_error, word_sum_error
from support.kernel_ops import int8_product
from support.kernel_sessions import run, run_node, same_bits, session_of

from seq2engine.export.kernel_forms import ops
from seq2engine.export.ort_forms.int8_matmul import SIGNED
from seq2engine.runtime.kernels.library import note_mapped

pytestmark = pytest.mark.usefixtures("vectors")
OUTPUTS = ["logits", "exp_sum", "best_logits", "best_tokens"]
VOCABS = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 2085]))
SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 14), st.one_of(st.integers(1, 70), st.sampled_from([513, 1100])), VOCABS
)


def arrays(seed: int, sources: int, beams: int, depth: int, vocab: int, biased: bool = True) -> dict[str, np.ndarray]:
    """With a table by rows [V,D]."""
    rng = np.random.default_rng(seed)
    found = {"x": rng.normal(size=(sources, beams, depth)), "table": rng.normal(size=(vocab, depth))}
    found |= {"bias": rng.normal(size=vocab)} if biased else {}
    return {name: array.astype(np.float32) for name, array in found.items()}


def in_int8(found: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.integers(-64, 65, found["table"].shape).astype(np.int8)
    return {**found, "table": table, "scale": rng.uniform(0.01, 0.1, len(table)).astype(np.float32)}


def by_columns(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**found, "table": np.ascontiguousarray(found["table"].T)}


def opened(
    found: dict[str, np.ndarray],
    threads: int = 1,
    by_rows: bool = True,
    screened: bool = False,
    in_place: Mapping[str, ort.OrtValue] | None = None,
):
    names = {name: name for name in found} | {"wanted": "wanted"}
    node = ops.candidates("candidates", OUTPUTS, **names, by_rows=by_rows, screened=screened, words=screened)
    return session_of(node, {**found, "wanted": np.zeros(1, np.int64)}, threads, in_place)


def asked(session, found: dict[str, np.ndarray], wanted: int) -> dict[str, np.ndarray]:
    return run(session, {**found, "wanted": np.array([wanted])})


def exact_logits(found: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """And the errors that are allowed."""
    x = found["x"] * found["smoothing"] if "smoothing" in found else found["x"]
    if "scale" in found:
        logits = int8_product(x, found["table"].T, found["scale"], SIGNED.above, SIGNED.zero, SIGNED.least)
        error = int8_error(logits)
    else:
        logits = x.astype(np.float64) @ found["table"].T.astype(np.float64)
        error = product_error(x, found["table"].T)
    if "bias" in found:
        logits, error = logits + found["bias"], added_error(logits, error, found["bias"])
    return logits, error


def ranked(logits: np.ndarray, count: int) -> np.ndarray:
    """The best tokens; of equal ones, the lower first."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count]


def assert_ranked(found: dict[str, np.ndarray], logits: np.ndarray, count: int) -> None:
    """Best tokens are those of these logits, bit by bit."""
    tokens = ranked(logits, count)
    np.testing.assert_array_equal(found["best_tokens"], tokens)
    assert same_bits(found["best_logits"], np.take_along_axis(logits, tokens, axis=-1))


def assert_sums(found: np.ndarray, logits: np.ndarray) -> None:
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)).sum(axis=-1)
    assert (np.abs(found - exact) <= exp_sum_error(logits)).all()


@given(
    st.integers(0, 99),
    SIZES,
    st.booleans(),
    st.sampled_from(["rows", "columns", "int8", "int8 columns"]),
    st.booleans(),
    st.integers(1, 2),
)
@settings(max_examples=30)
@example(0, (3, 14, 65, 2085), True, "int8", True, 2)
@example(1, (1, 3, 7, 2), False, "rows", False, 1)
def test_all_ways_of_asking_agree(seed, sizes, biased, kind, smoothed, threads):
    found = arrays(seed, *sizes, biased)
    if smoothed:
        found["smoothing"] = np.exp(np.random.default_rng(seed).normal(size=sizes[2])).astype(np.float32)
    found = in_int8(found, seed) if kind.startswith("int8") else found
    exact, error = exact_logits(found)
    stored = by_columns(found) if kind.endswith("columns") else found
    session = opened(stored, threads, by_rows=not kind.endswith("columns"))
    vocab, beams = sizes[3], sizes[1]
    whole = asked(session, stored, 0)
    logits = whole["logits"]
    assert (np.abs(logits - exact) <= error).all()
    assert_ranked(whole, logits, min(beams + 1, vocab))
    assert_sums(whole["exp_sum"], logits)
    for count in {1, min(5, vocab), min(40, vocab)}:
        summed, few = asked(session, stored, -count), asked(session, stored, count)
        for found_few in (summed, few):
            assert_ranked(found_few, logits, count)
            assert same_bits(found_few["logits"], found_few["best_logits"])
        assert same_bits(summed["exp_sum"], whole["exp_sum"])
        assert np.isfinite(few["exp_sum"]).all()


def test_of_equal_logits_the_lower_token_is_first():
    found = arrays(0, 1, 3, 9, 2100)
    found["table"][:] = found["table"][np.arange(2100) % 3]  # in other vectors, blocks and chunks
    found["bias"][:] = 0
    for screened in (False, True):
        session = opened(found, screened=screened)
        for wanted in (0, 16, -16, 40):
            count = abs(wanted) or 4
            tokens = asked(session, found, wanted)["best_tokens"]
            assert (tokens == tokens[..., :1] + 3 * np.arange(count)).all()
            assert (tokens[..., 0] < 3).all()


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
def test_sums_are_right_however_far_logits_lie_apart(spread):
    found = arrays(0, 2, 3, 9, 3000)
    found["x"] *= spread
    found["bias"] = np.sort(found["bias"])  # the best so far changes all the time
    whole = asked(opened(found), found, 0)
    assert_sums(whole["exp_sum"], whole["logits"])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["x", "table", "bias"])
@pytest.mark.parametrize("kind", ["float", "screened", "int8"])
@pytest.mark.parametrize("wanted", [0, 3, -3])
def test_sums_tell_that_a_logit_is_no_number(kind, place, wrong, wanted):
    found = in_int8(arrays(0, 2, 3, 9, 1500)) if kind == "int8" else arrays(0, 2, 3, 9, 1500)
    session = opened(found, screened=kind == "screened")
    before = asked(session, found, wanted)
    assert np.isfinite(before["exp_sum"]).all()
    name = "scale" if kind == "int8" and place == "table" else place
    found[name] = found[name].copy()
    for token in (0, 700, 1499):
        others = np.ones((2, 3), bool)
        if place == "x":
            x = found["x"].copy()
            x[1, 1, token % 9] = wrong
            others[1, 1] = False
            after = asked(session, {**found, "x": x}, wanted)
        else:
            array = found[name].copy()
            array[token] = wrong
            other = {**found, name: array}
            broken = opened(other, screened=kind == "screened")
            after, logits = asked(broken, other, wanted), asked(broken, other, 0)["logits"][..., token]
            others = np.isneginf(logits)  # as of tokens that are ruled out
            assert not others.all()
        assert not np.isfinite(after["exp_sum"][~others]).any(), token
        for output in OUTPUTS if place == "x" else ():
            assert same_bits(after[output][others], before[output][others])


@pytest.mark.parametrize("kind", ["float", "screened", "int8"])
@pytest.mark.parametrize("wanted", [0, 3, -3])
def test_tokens_that_are_ruled_out_count_for_nothing(kind, wanted):
    found = in_int8(arrays(0, 2, 3, 9, 1500)) if kind == "int8" else arrays(0, 2, 3, 9, 1500)
    found["bias"][np.random.default_rng(0).random(1500) < 0.9] = -np.inf
    session = opened(found, screened=kind == "screened")
    logits, outputs = asked(session, found, 0)["logits"], asked(session, found, wanted)
    assert np.isneginf(logits[..., np.isneginf(found["bias"])]).all()
    assert_ranked(outputs, logits, abs(wanted) or 4)
    assert np.isfinite(outputs["exp_sum"]).all()
    if wanted <= 0:
        assert_sums(outputs["exp_sum"], logits)


@pytest.mark.parametrize("kind", ["float", "screened", "int8"])
@pytest.mark.parametrize("wanted", [31, -31, 2**40, -(2**63)])
def test_more_tokens_than_there_are_is_an_error(kind, wanted):
    found = in_int8(arrays(0, 1, 2, 9, 30)) if kind == "int8" else arrays(0, 1, 2, 9, 30)
    with pytest.raises(Exception, match="more tokens are wanted than there are"):
        asked(opened(found, screened=kind == "screened"), found, wanted)


@pytest.mark.parametrize("kind", ["float", "screened", "int8"])
@pytest.mark.parametrize("wanted", [0, 3, -3])
def test_an_empty_batch_is_empty(kind, wanted):
    found = in_int8(arrays(0, 1, 2, 9, 30)) if kind == "int8" else arrays(0, 1, 2, 9, 30)
    found["x"] = found["x"][:0]
    outputs = asked(opened(found, screened=kind == "screened"), found, wanted)
    assert outputs["best_tokens"].shape == (0, 2, abs(wanted) or 3)


def test_a_table_of_another_depth_is_an_error():
    found = arrays(0, 1, 2, 9, 30)
    names = {"x": "x", "table": "table", "wanted": "wanted"}
    node = ops.candidates("candidates", OUTPUTS, **names, by_rows=True, screened=False)
    with pytest.raises(Exception, match=r"Candidates: .* do not fit"):
        run_node(node, {**found, "x": found["x"][..., 1:], "wanted": np.zeros(1, np.int64)})


# Screening: the same tokens and bits as without, whatever the numbers are.


def outlying(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Channels of x a thousand times as large as the others: in int8 the others are 0 or 1."""
    found["x"][..., rng.integers(0, found["x"].shape[-1], 2)] *= 1000


def close(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Tokens that hardly differ: which is best is a matter of the last bits."""
    noise = 1 + 1e-7 * rng.normal(size=found["table"].shape)
    found["table"][:] = (found["table"][:1] * noise).astype(np.float32)
    found["bias"][:] = 0


def banned(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    found["bias"][rng.random(len(found["bias"])) < 0.5] = -np.inf


def all_banned(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    found["bias"][2:] = -np.inf


def heavy(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """A bias beside which products are small: many logits are the same number once they are added."""
    found["bias"][:] = 1e4
    found["x"] *= 1e-3


def uneven(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Rows of the table of all sizes, and one of zeros."""
    found["table"] *= np.exp(4 * rng.normal(size=(len(found["table"]), 1))).astype(np.float32)
    found["table"][0] = 0


def silent(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    found["x"][:, 0] = 0


CASES = [None, outlying, close, banned, all_banned, heavy, uneven, silent]


@given(st.integers(0, 99), SIZES, st.sampled_from(CASES), st.integers(1, 16), st.integers(1, 2))
@settings(max_examples=40)
@example(0, (3, 14, 65, 2085), close, 5, 2)  # more rows than are screened at a time
@example(1, (1, 4, 65, 2085), outlying, 16, 1)
@example(2, (2, 2, 65, 1500), all_banned, 5, 1)
@example(3, (2, 2, 1, 300), close, 3, 1)
@example(4, (2, 2, 1100, 300), heavy, 3, 1)
@example(5, (3, 14, 9, 2085), heavy, 16, 1)
@example(2, (1, 1, 1, 1), banned, 1, 1)  # no token is left
def test_screening_changes_nothing(seed, sizes, case, wanted, threads):
    found = arrays(seed, *sizes)
    if case is not None:
        case(found, np.random.default_rng(seed))
    wanted = min(wanted, sizes[3])
    plain = asked(opened(found, threads), found, wanted)
    screened = asked(opened(found, threads, screened=True), found, wanted)
    for name in OUTPUTS:
        assert same_bits(screened[name], plain[name]), name


@pytest.mark.parametrize("wanted", [3, -3], ids=["in int8", "in words"])
@pytest.mark.parametrize("case", [None, close], ids=["few tokens are exact", "all are"])
def test_a_table_in_a_mapped_file_is_read_from_the_file(case, wanted, tmp_path):
    """Pages that were touched would count as memory of the process. Here the memory has other numbers than the file."""
    found = arrays(0, 2, 5, 65, 1500)
    if case is not None:
        case(found, np.random.default_rng(0))
    plain = asked(opened(found, screened=True), found, wanted)
    pages = mmap.mmap(-1, found["table"].nbytes)
    memory, path = np.frombuffer(pages, np.float32).reshape(found["table"].shape), tmp_path / "table"
    memory[:] = 7
    path.write_bytes(found["table"].tobytes())
    table = ort.OrtValue.ortvalue_from_numpy(memory)
    with path.open("rb") as file:
        note_mapped(memory.ctypes.data, memory.nbytes, file.fileno())
        read = asked(opened(found, screened=True, in_place={"table": table}), found, wanted)
        note_mapped(memory.ctypes.data, memory.nbytes, -1)
    for name in OUTPUTS:
        assert same_bits(read[name], plain[name]), name


def test_rows_that_are_no_numbers_leave_the_others_as_they_are():
    found = arrays(0, 2, 20, 65, 1500)
    before = asked(opened(found), found, 3)
    found["x"][0, 3], found["x"][1, 7, 5] = np.nan, np.inf
    after = asked(opened(found, screened=True), found, 3)
    right = np.ones((2, 20), bool)
    right[0, 3] = right[1, 7] = False
    for name in OUTPUTS:
        assert same_bits(after[name][right], before[name][right])
    assert not np.isfinite(after["exp_sum"][~right]).any()
    assert ((after["best_tokens"] >= 0) & (after["best_tokens"] < 1500)).all()


# Words of 16 bits: the same tokens and bits as without; sums err by no more than chance allows.


def alike(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """All tokens the same, so that none has much of the sum, and as far from whole steps as can be."""
    found["table"][:] = found["table"][:1]
    found["bias"][:] = 0


def flat(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    found["x"] *= 0.01
    found["bias"][:] = 0


def peaked(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """One token has nearly all of the sum, wherever it is."""
    found["bias"][rng.integers(0, len(found["bias"]))] += 30


def gridded(found: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """A table that was in int8 before: what rounding does to a number, it does to all that are equal."""
    scale = np.abs(found["table"]).max(axis=1, keepdims=True) / 127
    found["table"][:] = np.rint(found["table"] / scale) * scale


WORD_CASES = [*CASES, alike, flat, peaked, gridded]


@given(st.integers(0, 99), SIZES, st.sampled_from(WORD_CASES), st.integers(1, 16), st.integers(1, 2))
@settings(max_examples=60)
@example(0, (3, 14, 65, 2085), close, 5, 2)
@example(1, (1, 4, 65, 2085), outlying, 16, 1)
@example(2, (2, 2, 65, 1500), all_banned, 5, 1)
@example(3, (2, 5, 513, 2085), alike, 5, 2)
@example(4, (3, 14, 513, 2085), flat, 5, 1)
@example(5, (2, 5, 70, 2085), peaked, 3, 2)
@example(6, (3, 14, 513, 2085), gridded, 16, 2)
@example(2, (1, 1, 1, 1), banned, 1, 1)  # no token is left
def test_words_change_nothing_but_the_last_digits_of_a_sum(seed, sizes, case, wanted, threads):
    found = arrays(seed, *sizes)
    if case is not None:
        case(found, np.random.default_rng(seed))
    wanted = min(wanted, sizes[3])
    plain = asked(opened(found, threads), found, -wanted)
    words = asked(opened(found, threads, screened=True), found, -wanted)
    for name in ("logits", "best_logits", "best_tokens"):
        assert same_bits(words[name], plain[name]), name
    logits, error = exact_logits(found)
    np.testing.assert_array_equal(np.isfinite(words["exp_sum"]), np.isfinite(logits).any(axis=-1))
    error = np.where(np.isfinite(logits), error, 0)
    known = np.isfinite(logits).any(axis=-1) & (error.max(axis=-1) < 1)  # else floats have no digit of a sum either
    if not known.any():
        return
    logits, error, total = logits[known], error[known], words["exp_sum"][known]
    exact = np.exp(logits - words["best_logits"][known][:, :1].astype(np.float64)).sum(axis=-1)
    allowed = word_sum_error(found["x"][known], found["table"], logits, error)
    assert (np.abs(total - exact) <= allowed * np.exp(error.max(axis=-1))).all()


@pytest.mark.parametrize("same", [False, True], ids=["different tokens", "equal tokens"])
@pytest.mark.parametrize("vocab", [300, 2085], ids=["all exact", "none exact"])
def test_errors_of_coarse_words_do_not_add_up(vocab, same):
    """An input that is always 0 has weights so large that words are coarse beside the others. Where hundreds of tokens
    have the sum, they are exact; where thousands have it, errors of equal tokens are independent all the same."""
    found = arrays(0, 3, 14, 65, vocab, biased=False)
    found["x"][..., 0], found["table"][:, 0] = 0, 100
    found["x"][..., 1:] *= 0.05
    if same:
        found["table"][:] = found["table"][:1]
    words = asked(opened(found, screened=True), found, -5)
    logits, error = exact_logits(found)
    exact = np.exp(logits - words["best_logits"][..., :1].astype(np.float64)).sum(axis=-1)
    allowed = word_sum_error(found["x"], found["table"], logits, error)
    assert (np.abs(words["exp_sum"] - exact) <= allowed).all()


def test_rows_for_which_words_are_too_large_or_no_numbers_have_the_same_bits_as_without():
    found = arrays(0, 2, 20, 65, 1500)
    found["x"][0, 3], found["x"][1, 7, 5], found["x"][1, 8] = np.nan, np.inf, 1e32 * found["x"][1, 8]
    plain, words = asked(opened(found), found, -3), asked(opened(found, screened=True), found, -3)
    for name in ("logits", "best_logits", "best_tokens"):
        assert same_bits(words[name], plain[name])
    right = np.isfinite(plain["exp_sum"])
    assert right.sum() == 38
    np.testing.assert_array_equal(np.isfinite(words["exp_sum"]), right)
    assert words["exp_sum"][1, 8] == plain["exp_sum"][1, 8] == 1  # the best token is far above the others


@pytest.mark.parametrize("wanted", [3, -3])
@pytest.mark.parametrize("size", [1e-44, 1e-37, 1e-30, 1e30, 1e37])
def test_tables_of_the_smallest_and_largest_numbers_are_screened_as_others(size, wanted):
    found = arrays(0, 2, 3, 65, 1500, biased=False)
    found["table"] = (size * (found["table"] / 10)).astype(np.float32)
    found["x"] /= np.float32(size) if size > 1 else np.float32(1)
    plain, rough = asked(opened(found), found, wanted), asked(opened(found, screened=True), found, wanted)
    for name in ("logits", "best_logits", "best_tokens"):
        assert same_bits(rough[name], plain[name])
    np.testing.assert_allclose(rough["exp_sum"], plain["exp_sum"], rtol=1e-4)


@pytest.mark.parametrize("case", [None, flat, alike, peaked])
def test_sums_of_words_have_the_same_bits_in_every_run(case):
    """Though threads find other tokens first."""
    found = arrays(0, 3, 14, 65, 20_000)
    if case is not None:
        case(found, np.random.default_rng(0))
    first = asked(opened(found, screened=True), found, -5)
    session = opened(found, 2, screened=True)
    for _ in range(20):
        for name, array in asked(session, found, -5).items():
            assert same_bits(array, first[name]), name
