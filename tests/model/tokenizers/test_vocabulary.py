"""A vocabulary in arrays answers as the dict it was made of."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from seq2engine.model.tokenizers import vocabulary
from seq2engine.model.tokenizers.vocabulary import Vocabulary

IDS = {"▁the": 7, "": 3, "a": 0, "\U0001f600": 5, "aa": -2, "▁": 2**62, "ß": 9}


def random_ids(count: int) -> dict[str, int]:
    draw = np.random.default_rng(5)
    pieces = {"".join(map(chr, draw.integers(97, 107, draw.integers(1, 5)))) for _ in range(count)}
    return dict(zip(sorted(pieces), draw.permutation(len(pieces)).tolist(), strict=True))


@pytest.mark.parametrize("ids", [IDS, {}, random_ids(3000)], ids=["odd", "empty", "many"])
def test_it_is_the_dict_it_was_made_of(ids):
    made = Vocabulary(ids)
    assert list(made.items()) == list(ids.items())  # in their order, too
    assert [made[piece] for piece in ids] == list(ids.values())
    assert {number: made.piece(number) for number in ids.values()} == {number: piece for piece, number in ids.items()}
    for missing in ("the", "▁th", "zzz", "b" * 40):
        assert missing not in made
        assert made.get(missing, 1) == 1
    assert made.piece(10**6) is None
    assert made.piece(-1) is None


def test_of_two_pieces_with_one_id_the_later_one_names_it():
    made = Vocabulary({"b": 1, "a": 1, "c": 2})
    assert (made["b"], made["a"], made.piece(1)) == (1, 1, "a")


def test_pieces_with_the_same_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(vocabulary, "hash", len, raising=False)
    made = Vocabulary(random_ids(500))
    assert dict(made) == {piece: made[piece] for piece in random_ids(500)}
    assert "zzz" not in made


def test_a_copy_has_its_own_hashes():
    made = Vocabulary(IDS)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert dict(other) == IDS
        assert other["ß"] == 9


def test_an_id_that_no_model_has_is_refused():
    with pytest.raises(ValueError, match="expected less than 2\\^63"):
        Vocabulary({"a": 2**63})
