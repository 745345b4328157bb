"""The split of the pronouncing dictionary: fixed, by word, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seq2engine.model.g2p.make_data import lexicon_from_lines, make_data, rows_of, split_words
from seq2engine.model.shipped import TEST_SPLIT, shipped_checkpoint

LINES = ["read R EH1 D", "read(2) R IY1 D # the other one", "a AH0", "o'neil OW0 N IY1 L"]


def test_pronunciations_of_a_word_stay_together_in_their_order():
    lexicon = lexicon_from_lines(LINES)
    assert lexicon == {"read": ["R EH1 D", "R IY1 D"], "a": ["AH0"], "o'neil": ["OW0 N IY1 L"]}
    assert rows_of(["read"], lexicon) == "read\tR EH1 D\nread\tR IY1 D\n"


@given(st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=200))
def test_every_word_is_in_one_split(words):
    splits = split_words(words)
    assert sorted(word for split in splits.values() for word in split) == sorted(words)
    assert len(splits["dev"]) == len(splits["test"]) == round(0.05 * len(words))


def test_the_split_does_not_depend_on_order_and_does_on_the_seed():
    words = [f"w{i}" for i in range(400)]
    assert split_words(words) == split_words(reversed(words))
    assert split_words(words)["test"] != split_words(words, seed=1)["test"]
    assert split_words(words)["test"][:3] == ["w104", "w108", "w169"]


def test_the_whole_dictionary(tmp_path):
    assert make_data(tmp_path / "data") == {"train": 113446, "dev": 6303, "test": 6303}
    assert "Carnegie Mellon" in (tmp_path / "data" / "LICENSE.cmudict").read_text()
    assert (tmp_path / "data" / "test.tsv").read_bytes() == (shipped_checkpoint("g2p") / TEST_SPLIT).read_bytes()
