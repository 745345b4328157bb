"""Tables of symbols: what they know comes back, the rest is unknown, and no text can hold a special token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_cases import check_round_trip, stored

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.model.tokenizers.base import FOLDER
from seq2engine.model.tokenizers.importing import tokenizer_from_opennmt
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.model.tokenizers.symbols import (
    END,
    SPECIALS,
    UNKNOWN,
    SymbolTable,
    SymbolTokenizer,
    table_from_texts,
)


def example(lower: bool = True) -> SymbolTokenizer:
    return SymbolTokenizer(
        table_from_texts(["Hello", "world é"], "characters", lower),
        table_from_texts(["HH AH L OW", "W ER L D"], "words"),
    )


def test_ids_are_in_sorted_order() -> None:
    made = example()
    assert made.source.symbols == (*SPECIALS, *sorted(set("helloworld é")))
    assert made.target.symbols == (*SPECIALS, "AH", "D", "ER", "HH", "L", "OW", "W")
    assert made.encode_target("L  HH ") == [8, 7, END]


def test_lower_casing() -> None:
    assert example().encode_source("HeLLo É") == example().encode_source("hello é")
    assert example(lower=False).encode_source("hellO")[-2] == UNKNOWN


def test_what_is_unknown_or_no_text() -> None:
    made = example()
    assert made.encode_source("h\U0001f600") == [made.source.symbols.index("h"), UNKNOWN, END]
    assert made.encode_target("</s> L <pad>") == [UNKNOWN, 8, UNKNOWN, END]
    assert made.encode_source("") == [END]
    assert made.decode_target([0, 1, 8, 3, 7, 2, -1, 99]) == "L HH"


def test_a_text_with_the_name_of_a_special_does_not_double_it() -> None:
    assert table_from_texts(["a <s> </s>"], "words").symbols == (*SPECIALS, "a")


@given(st.lists(st.text(min_size=1), max_size=5))
def test_known_text_comes_back(texts: list[str]) -> None:
    table = table_from_texts(texts, "characters")
    for text in texts:
        assert table.decode(table.encode(text)) == text


def test_round_trip(tmp_path: Path) -> None:
    check_round_trip(example(), tmp_path / "example")
    assert [path.name for path in (tmp_path / "example" / FOLDER).iterdir()] == ["about.json"]


def test_opennmts_words(tmp_path: Path) -> None:
    source = ["<unk>", "<blank>", "hello", "world"]
    target = ["<unk>", "<blank>", "<s>", "</s>", "bonjour", "monde"]
    made = tokenizer_from_opennmt(tmp_path / "model.pt", source, target, ["<unk>", "<blank>", "<s>", "</s>"])
    assert made.encode_source("hello new world <blank>") == [2, 0, 3, 0]  # and no end
    assert made.encode_target("bonjour monde") == [4, 5, 3]
    assert made.decode_target([2, 4, 0, 5, 3, 1]) == "bonjour monde"
    check_round_trip(made, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"model.pt has no </s> in its target vocabulary, expected OpenNMT's own"):
        tokenizer_from_opennmt(tmp_path / "model.pt", source, source, ["<unk>", "<blank>"])


def test_ids_that_have_no_symbol_are_shown_as_numbers() -> None:
    count = len(example().target.symbols)
    assert example().target_tokens([count, -1]) == [f"<{count}>", "<-1>"]
    assert example().source_tokens([10**9]) == ["<1000000000>"]


def test_no_languages() -> None:
    for ask in (lambda: example().encode_source("hello", "fra"), lambda: example().language_id("fra")):
        with pytest.raises(RequestError, match="'fra' asked for, but this model's tokenizer has no languages"):
            ask()


def change(**values: object) -> str:
    """An about.json with other values for its target side."""
    side = {"split": "words", "lower": False, "specials": SPECIALS, "end": "</s>", "symbols": [*SPECIALS, "a"]}
    return json.dumps({"kind": "symbols", "source": side, "target": side | values})


@pytest.mark.parametrize(
    ("about", "error"),
    [
        ('{"kind": "symbols"', "not JSON: it is truncated"),
        ('{"kind": "runes"}', "kind 'runes', expected one of symbols, sentencepiece, huggingface, fairseq"),
        ('{"kind": "symbols"}', "missing field source; missing field target"),
        ("[1]", "it is [1], expected an object"),
        (change(split="lines"), "splits by 'lines', expected one of characters, words"),
        (change(symbols=None), "target.symbols is None, expected a list"),
        (change(end="<none>"), "target has no symbol '<none>', expected"),
        (change(specials=[]), "target has no symbol '<unk>', expected"),
    ],
)
def test_damaged_files(tmp_path: Path, about: str, error: str) -> None:
    path = stored(example(), tmp_path) / FOLDER / "about.json"
    path.write_text(about)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be used ({error}")
    assert message.endswith("; copy or import the checkpoint again")
    assert "\n" not in message


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(tokenizer/about.json\), so it takes no text"):
        read_tokenizer(tmp_path)


def test_a_table_needs_its_specials() -> None:
    with pytest.raises(KeyError, match="<unk>"):
        SymbolTable("words", ("a", "b"))
