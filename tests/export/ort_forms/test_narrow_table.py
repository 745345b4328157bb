"""Fewer columns of a table: those that states use, and none where that does not find the best tokens."""

from __future__ import annotations

import numpy as np
import pytest

from seq2engine.export.ort_forms import narrow_table as module
from seq2engine.export.ort_forms.narrow_table import best_tokens, narrow_table, share_found

VOCAB, WIDTH, COUNT = 3000, 64, 400


def table_of(seed: int = 0) -> np.ndarray:
    """Rows with a mean that is large beside their differences, as trained tables have."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(VOCAB, WIDTH)) + 5 * random.normal(size=WIDTH)).astype(np.float32)


def states_of(directions: int, count: int = COUNT) -> np.ndarray:
    """States that vary in so many directions only: the first ones are the same for any number of them."""
    random = np.random.default_rng(1)
    axes = random.normal(size=(directions, WIDTH))
    return (random.normal(size=(count, directions)) @ axes).astype(np.float32)


@pytest.mark.parametrize("biased", [True, False], ids=["bias", ""])
@pytest.mark.parametrize(("directions", "columns"), [(4, 16), (14, 16), (30, 32)])
def test_columns_are_as_many_as_states_need(directions: int, columns: int, biased: bool, monkeypatch) -> None:
    monkeypatch.setattr(module, "REFINED", 1)  # no other token in its place
    monkeypatch.setattr(module, "SHARES", (4, 2))
    bias = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32) * 3 if biased else None
    table, states = table_of(), states_of(directions)
    made = narrow_table(table, bias, states)
    assert made is not None
    assert made.before.shape == (WIDTH, columns)
    assert made.table.shape == (VOCAB, columns)
    # States of the same kind that it has not seen have the same best tokens.
    others = states_of(directions, count=2 * COUNT)[COUNT:]
    rough = others @ made.before @ made.table.T + (0 if bias is None else bias)
    assert (rough.argmax(axis=1) == best_tokens(table, bias, others)).mean() >= module.FOUND


def test_columns_are_of_one_size() -> None:
    """4 bits with one scale for all of them keep the last ones as well as the first."""
    spread = states_of(30) * np.geomspace(1, 100, WIDTH, dtype=np.float32)
    made = narrow_table(table_of(), None, spread)
    assert made is not None
    sizes = made.table.std(axis=0)
    reduced = (spread @ made.before).std(axis=0)
    np.testing.assert_allclose(sizes, reduced, rtol=0.3)  # both sides share the strength of a direction


def test_no_columns_where_all_of_them_count(monkeypatch) -> None:
    monkeypatch.setattr(module, "REFINED", 2)
    assert narrow_table(table_of(), None, states_of(WIDTH)) is None


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_no_columns_by_states_that_are_no_numbers(broken: float) -> None:
    states = states_of(4)
    states[7, 3] = broken
    assert narrow_table(table_of(), None, states) is None


def test_best_tokens_and_their_share(monkeypatch) -> None:
    monkeypatch.setattr(module, "TOKENS", 700)  # several parts, the last a short one
    table, states = table_of(), states_of(20)
    bias = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    logits = states @ table.T + bias
    best = best_tokens(table, bias, states)
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    monkeypatch.setattr(module, "REFINED", 8)
    half = module.NarrowTable(np.eye(WIDTH, WIDTH // 2, dtype=np.float32), table[:, : WIDTH // 2])
    rough = states[:, : WIDTH // 2] @ table[:, : WIDTH // 2].T + bias
    ranks = (rough > rough[np.arange(COUNT), best][:, None]).sum(axis=1)
    assert share_found(half, bias, states, best) == pytest.approx((ranks < 8).mean(), abs=4 / COUNT)
    assert 0 < (ranks < 8).mean() < 1
