"""A prefix for every source: what each would get alone with that prefix as its option, on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from support.rounding import rounding_from_session

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
END = SMALL.end_id
SOURCES = [[5, 6, 7], [8] * 9, [9, 10], [11, 12, 13, 14], [5]]
PREFIXES = [[4], [], [7, 7, 9], [20, 21], [30] * 6]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("prefixes") / "b", ("fp32",))


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Session]:
    with open_session(bundle, request.param, threads=1) as opened:
        yield opened


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 3, "nbest": 2},
        {"beam": 2, "beam_style": "ctranslate2", "first_banned": (4, 9, 30)},
        {"sample": True, "nbest": 2, "seed": 4, "no_repeat_ngram": 2},
        {"forced_eos": END, "repetition_penalty": 1.3, "min_length": 8},
        {"beam": 3, "phrases": ((7, 9, 11), (3,))},
        {"alternatives": True, "nbest": 3},
    ],
)
def test_each_gets_what_it_would_get_alone(session: Session, options: dict[str, Any]) -> None:
    search = SearchOptions(max_length=14, **options)
    near = rounding_from_session(session, SOURCES, 14, stretch=search.repetition_penalty)
    together = generate(session, SOURCES, search, prefixes=PREFIXES)
    fed = dict(translate_many(session, SOURCES, search, 2, 1, PREFIXES))
    for row, (source, prefix, found) in enumerate(zip(SOURCES, PREFIXES, together, strict=True)):
        (alone,) = generate(session, [source], SearchOptions(max_length=14, prefix=tuple(prefix), **options))
        for other in (alone, fed[row]):
            assert [one.tokens for one in other] == [one.tokens for one in found]
            assert [one.score for one in other] == near.scores(found, search)
        assert all(list(one.tokens[: len(prefix)]) == prefix for one in found)


def test_an_empty_prefix_leaves_what_is_forced_for_all(session: Session) -> None:
    options = SearchOptions(max_length=6, forced_bos=4)
    found = generate(session, SOURCES[:2], options, prefixes=[[4, 9], []])
    assert found[0][0].tokens[:2] == (4, 9)
    assert found[1] == generate(session, SOURCES[:2], options)[1]


def test_every_problem_of_every_prefix_is_in_one_error(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "encode", lambda *given: pytest.fail("something ran"))
    options = SearchOptions(max_length=4, forced_bos=4, banned=((5,),), trie=trie_from_sequences([(6, 7)]))
    with pytest.raises(RequestError) as raised:
        generate(session, SOURCES[:4], options, prefixes=[[4, END], [4] * 5, [40], [4, 6, 7]])
    message = str(raised.value)
    for problem in (
        f"source 0: the prefix has the end token {END}, expected it nowhere in a prefix",
        "source 0: prefix leaves the trie, expected the beginning of one of its sequences",
        "source 1: a prefix of 5 tokens, expected at most the max length 4",
        "source 2: prefix has token 40, but the vocabulary has 0 to 39",
    ):
        assert problem in message
    assert "source 3" not in message
    with pytest.raises(RequestError, match=r"prefix for all sources and one for each.*1 prefixes for 2 sources"):
        generate(session, SOURCES[:2], SearchOptions(max_length=4, prefix=(4,)), prefixes=[[4]])
