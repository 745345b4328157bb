"""Lanes: the same outputs, in the same order, whoever decodes them; and errors that name the right source."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.answers import Answer, NotFiniteError
from seq2engine.runtime.generate import generate
from seq2engine.runtime.lanes import in_lanes
from seq2engine.runtime.ort_session import LANE_ROWS, MOST_LANE_ROWS, OrtSession
from seq2engine.runtime.search import SearchOptions
from seq2engine.runtime.session import open_session
from seq2engine.runtime.torch_session import TorchSession

MODEL = random_model("tiny", seed=5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(MODEL, tmp_path_factory.mktemp("lanes") / "bundle", ("fp32", "w8a8"))


def sources_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, rng.integers(1, 30)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("precision", "shortlist"), [("fp32", None), ("fp32", tuple(range(3, 200, 3))), ("w8a8", None)]
)
@pytest.mark.parametrize("beam", [1, 4])
def test_outputs_are_those_of_one_decode(bundle, precision, shortlist, beam):
    sources = sources_of(70)
    options = SearchOptions(max_length=12, beam=beam, nbest=beam, shortlist=shortlist)
    with (
        open_session(bundle, precision=precision, threads=2) as several,
        open_session(bundle, precision=precision, threads=1) as alone,
    ):
        assert len(several.lanes(len(sources), len(sources) * beam)) == 2
        found, expected = generate(several, sources, options), generate(alone, sources, options)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]


def test_prefixes_go_with_their_sources(bundle):
    sources = sources_of(66)
    prefixes = [[3 + number] if number % 3 else [] for number in range(66)]
    with open_session(bundle, threads=2) as session:
        found = generate(session, sources, SearchOptions(max_length=6), prefixes=prefixes)
    assert all(nbest[0].tokens[: len(prefix)] == tuple(prefix) for nbest, prefix in zip(found, prefixes, strict=True))


def test_who_gets_lanes(bundle):
    enough = 2 * MOST_LANE_ROWS
    with open_session(bundle, threads=2) as session:
        assert session.lanes(enough, enough - 1) == (session,)
        assert session.lanes(1, enough) == (session,)  # one source cannot be dealt out
        lanes = session.lanes(2, enough)
        assert [lane.threads for lane in lanes] == [1, 1]
        assert lanes[0] is lanes[1], "weights are there once for all lanes"
    with open_session(bundle, precision="w8a8", threads=2) as session:
        assert len(session.lanes(4, 2 * LANE_ROWS["w8a8"])) == 2
    with open_session(bundle, threads=1) as session:
        assert session.lanes(enough, enough) == (session,)
    with open_session(bundle, threads=2, deterministic=True) as session:
        assert session.lanes(enough, enough) == (session,)
    with open_session(bundle, "torch") as session:
        assert session.lanes(enough, enough) == (session,)


class ThreeLanes(TorchSession):
    """Runs in three threads, and goes wrong on sources that begin with 13."""

    def __init__(self):
        super().__init__(random_model("tiny", seed=5))
        self.threads_seen = set()

    def lanes(self, sources, rows):
        return (self,) * min(3, sources)

    def encode(self, source_ids, source_mask):
        self.threads_seen.add(threading.get_ident())
        return super().encode(source_ids, source_mask) | {"wrong": source_ids[:, 0] == 13}

    def select(self, state, rows, slots):
        wrong = state.pop("wrong")
        super().select(state, rows, slots)
        state["wrong"] = wrong if rows is None else wrong[rows]

    def step(self, state, *given):
        logits = super().step({k: v for k, v in state.items() if k != "wrong"}, *given).logits
        logits[state["wrong"]] = np.nan
        return Answer(logits)


def test_an_error_names_the_source_by_its_number_in_the_request():
    sources = sources_of(11)
    sources[7] = [13, 5, 6]
    with ThreeLanes() as session, pytest.raises(NotFiniteError, match=r"source 7: the model's logits are not finite"):
        generate(session, sources, SearchOptions(max_length=4))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5))
def test_every_source_is_dealt_out_once_and_lanes_are_even(lengths, count):
    class Dealt:
        def lanes(self, sources, rows):
            assert (sources, rows) == (len(lengths), 3 * len(lengths))
            return (self,) * min(count, sources)

    found = in_lanes(Dealt(), [[0] * length for length in lengths], 3, lambda lane, part: list(part))
    assert sorted(number for part, _ in found for number in part) == list(range(len(lengths)))
    assert all(part == got for part, got in found)
    sizes = [len(part) for part, _ in found]
    assert max(sizes) - min(sizes) <= 1


def test_a_session_of_lanes_closes_with_its_owner(bundle):
    session = open_session(bundle, threads=2)
    (narrow, _) = session.lanes(64, 64)
    assert isinstance(narrow, OrtSession)
    session.close()
    assert not session.narrow
