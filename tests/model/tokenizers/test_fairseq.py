"""fairseq's tokenizers: merge codes cut words as subword-nmt does, and dictionaries number what comes out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from support.tokenizer_cases import TEXTS, check_round_trip, lines, stored

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.model.tokenizers.base import FOLDER
from seq2engine.model.tokenizers.fairseq import FairseqTokenizer, Words
from seq2engine.model.tokenizers.importing import tokenizer_from_fairseq
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.model.tokenizers.subwords import MergeCodes

LETTERS = "abcd"


def learned() -> str:
    written = io.StringIO()
    learn_bpe(io.StringIO("\n".join(lines(0, LETTERS))), written, 120)
    return written.getvalue()


NEW = learned()
OLD = NEW.replace("#version: 0.2", "#version: 0.1")
BARE = OLD.split("\n", 1)[1]  # without a header, which means 0.1
CODES = {"0.2": NEW, "0.1": OLD, "none": BARE, "crlf": NEW.replace("\n", "\r\n"), "twice": NEW + BARE}
OURS = {name: MergeCodes(text) for name, text in CODES.items()}
THEIRS = {name: BPE(io.StringIO(text)) for name, text in CODES.items()}


@pytest.mark.parametrize("version", CODES)
@given(word=st.one_of(st.text(LETTERS, min_size=1, max_size=30), st.text("abé字<w>/@", min_size=1, max_size=12)))
def test_words_are_cut_as_subword_nmt_cuts_them(version: str, word: str) -> None:
    assert list(OURS[version].split(word)) == THEIRS[version].segment_tokens([word])


def test_codes_of_fastbpe_are_those_of_version_2() -> None:
    counted = "".join(f"{line} 17\n" for line in NEW.split("\n")[1:] if line)
    for word in lines(1, LETTERS)[0].split():
        assert MergeCodes(counted).split(word) == OURS["0.2"].split(word)


def test_a_long_word_is_cut_soon() -> None:
    word = "abcd" * 2500
    assert "".join(OURS["0.2"].split(word)).replace("@@", "") == word


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("#version: 0.3\na b\n", "codes of version '0.3', expected 0.1 or 0.2"),
        ("#version: 0.2\na b\nabc\n", "merge 2 of the codes is 'abc', expected two subwords"),
        ("", "merge 1 of the codes is '', expected two subwords"),
    ],
)
def test_damaged_codes(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        MergeCodes(text)


def tokenizer(codes: MergeCodes | None = OURS["0.2"]) -> FairseqTokenizer:
    known = sorted({part for line in lines(0, LETTERS) for word in line.split() for part in OURS["0.2"].split(word)})
    return FairseqTokenizer(Words(tuple(known)), Words(("z", *reversed(known))), codes)


def test_text_comes_back(tmp_path: Path) -> None:
    made = tokenizer()
    for line in lines(0, LETTERS)[:50]:
        assert made.decode_target(made.encode_target(line)) == line
        ids = made.encode_source(line)
        assert 3 not in ids
        assert ids[-1] == 2
    assert made.encode_source("") == [2]
    assert made.encode_source("zzz </s>") == [3, 3, 3, *[3] * 4, 2]  # no letter of these is known
    assert made.decode_target([0, 1, 2, 3, 4, 99_999]) == "z"
    check_round_trip(made, tmp_path / "with")
    check_round_trip(tokenizer(None), tmp_path / "without")


def test_text_that_is_cut_already_needs_no_codes() -> None:
    made = FairseqTokenizer(Words(("he@@", "llo")), Words(("he@@", "llo")))
    assert made.encode_source("he@@ llo hello") == [4, 5, 3, 2]
    assert made.decode_target([4, 4, 5, 5, 2]) == "hehello llo"
    assert made.decode_target([5, 4]) == "llo he"  # a word cut off at the end


def test_no_languages() -> None:
    for ask in (lambda: tokenizer().encode_source("a", "fra"), lambda: tokenizer().language_id("fra")):
        with pytest.raises(RequestError, match="'fra' asked for, but this model's tokenizer has no languages"):
            ask()


def test_words_that_hold_line_separators_and_repeat(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_bytes("a\u2028b 5\nc\x85 4\nd 3\nd 2 #fairseq:overwrite\n".encode())
    made = tokenizer_from_fairseq(tmp_path)
    assert isinstance(made, FairseqTokenizer)
    assert made.source.words == ("a\u2028b", "c\x85", "d", "d")
    assert made.encode_source("d") == [7, 2]  # the later one, as fairseq has it
    check_round_trip(made, tmp_path / "ours")


# Import


def folder_with(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tmp_path


def test_import_by_the_pair(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, dict__de__txt="ab 3\nc@@ 2\n", dict__en__txt="c 9\n", bpecodes=NEW)
    made = tokenizer_from_fairseq(folder / "model.pt", ("en", "de"))
    assert made == FairseqTokenizer(Words(("c",)), Words(("ab", "c@@")), OURS["0.2"])
    with pytest.raises(CheckpointError, match=r"has dict.de.txt, dict.en.txt, expected dict.fr.txt and dict.de.txt$"):
        tokenizer_from_fairseq(folder, ("fr", "de"))
    with pytest.raises(CheckpointError, match=r"has dict.de.txt, dict.en.txt, expected one dictionary for both sides$"):
        tokenizer_from_fairseq(folder)


def test_import_of_one_dictionary(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, dict__de__txt="a 3\n", dict__en__txt="a 3\n")
    made = tokenizer_from_fairseq(folder)
    assert made == FairseqTokenizer(Words(("a",)), Words(("a",)))


def test_nothing_to_import(tmp_path: Path) -> None:
    assert tokenizer_from_fairseq(folder_with(tmp_path, codes=NEW)) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("word\n", "line 1 of dict.en.txt is 'word', expected a word and its count"),
        ("a 1\nb x\n", "line 2 of dict.en.txt is 'b x', expected a word and its count"),
        ("a 1\na 2\n", "line 2 of dict.en.txt gives the word 'a' a second time"),
        ("", "line 1 of dict.en.txt is '', expected a word and its count"),
    ],
)
def test_damaged_dictionaries(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot be used \({error}\); download them again$"):
        tokenizer_from_fairseq(folder_with(tmp_path, dict__en__txt=text))


@pytest.mark.parametrize("name", ["dict.source.txt", "dict.target.txt", "codes"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    root = stored(tokenizer(), tmp_path)
    (root / FOLDER / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}.*; copy or import the checkpoint again$"):
        read_tokenizer(root)


def test_texts_of_all_kinds() -> None:
    for text in TEXTS:
        assert tokenizer().encode_source(text)[-1] == 2
