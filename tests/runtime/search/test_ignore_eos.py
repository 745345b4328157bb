"""`ignore_eos`: the end token is a token like any other, beside every option that is about the end of an output."""

from __future__ import annotations

import dataclasses

import pytest

from seq2engine.errors import ConfigError
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession

LENGTH = 6
SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=12, target_vocab=12
)
END, LAST = SMALL.end_id, SMALL.target_vocab - 1
SOURCES = [[5, 6, 7], [8]]
PAIRS = {
    "alone": {},
    "unscored": {"scores": False},
    "shortlist": {"shortlist": (4, 5, LAST)},
    "min length": {"min_length": 4},
    "unscored min length": {"min_length": 4, "scores": False},
    "forced": {"forced_bos": 5, "forced_eos": END},
    "prefix": {"prefix": (5, 6)},
    "allowed": {"allowed": (4, 5, 6)},
    "banned end": {"banned": ((END,), (7,))},
    "no repeats": {"no_repeat_ngram": 2},
    "penalty": {"repetition_penalty": 2.0},
    "ctranslate2": {"beam_style": "ctranslate2", "beam": 2},
    "alternatives": {"alternatives": True, "nbest": 2},
    "sample": {"sample": True, "nbest": 2, "seed": 1},
}


@pytest.fixture(scope="module")
def session():
    return TorchSession(random_model(SMALL, seed=3))


@pytest.mark.parametrize(
    ("name", "beam"), [(name, beam) for name in PAIRS for beam in (1, 3) if (name, beam) != ("sample", 3)]
)
def test_every_output_has_the_maximum_length(session, name, beam):
    pair = PAIRS[name]
    options = SearchOptions(max_length=LENGTH, ignore_eos=True, **{"beam": beam, **pair})
    found = generate(session, SOURCES, options)
    tokens = [hypothesis.tokens for nbest in found for hypothesis in nbest]
    assert len(tokens) == len(SOURCES) * options.nbest
    assert {len(row) for row in tokens} == {LENGTH}
    if "allowed" in pair:
        assert {token for row in tokens for token in row} <= set(pair["allowed"])
    if "banned" in pair:
        assert not {END, 7} & {token for row in tokens for token in row}


def test_where_nothing_would_have_ended_nothing_changes(session):
    for beam in (1, 3):
        usual = SearchOptions(max_length=LENGTH, beam=beam, banned=((END,),), min_length=LENGTH)
        ignoring = dataclasses.replace(usual, ignore_eos=True)
        ended = [nbest[0].tokens[-1] == END for nbest in generate(session, SOURCES, usual)]
        if not any(ended):
            assert generate(session, SOURCES, ignoring) == generate(session, SOURCES, usual)


@pytest.mark.parametrize(
    ("limit", "name"), [({"phrases": ((5,),)}, "phrases"), ({"trie": trie_from_sequences([(5, 6)])}, "a trie")]
)
def test_what_decides_where_an_output_ends_is_refused(limit, name):
    with pytest.raises(ConfigError, match=f"ignore eos together with {name}, which decides where an output may end"):
        SearchOptions(max_length=LENGTH, ignore_eos=True, **limit)
