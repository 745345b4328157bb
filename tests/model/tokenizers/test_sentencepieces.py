"""SentencePiece tokenizers give the ids and the text which the library of their models gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_cases import TEXTS, check_round_trip, pieces, processor, stored
from transformers import M2M100Tokenizer, MarianTokenizer, MBart50Tokenizer, MBartTokenizer, XLMRobertaTokenizer

from seq2engine.errors import CheckpointError, MissingPackageError, RequestError
from seq2engine.model.tokenizers import languages
from seq2engine.model.tokenizers.base import FOLDER
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.model.tokenizers.sentencepieces import SentencePieceTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Recommended")  # of a punctuation package Marian's class never calls


def imported(folder: Path) -> SentencePieceTokenizer:
    tokenizer = tokenizer_from_hugging_face(folder)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def folder_of(folder: Path, **files: Any) -> Path:
    """A folder of files, whose names have __ for a dot; values that are no bytes are written as JSON."""
    folder.mkdir()
    for name, value in files.items():
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def all_pieces(model: bytes) -> list[str]:
    read = processor(model)
    return [read.id_to_piece(i) for i in range(3, read.get_piece_size())]


def marian_folder(folder: Path, separate: bool = False) -> Path:
    source, target = pieces("unigram", 1), pieces("unigram", 2)
    codes = [] if separate else [">>fra<<", ">>deu<<"]
    both = all_pieces(source) if separate else [*all_pieces(source), *all_pieces(target)]
    # Marian's order: end and unknown first, padding last; a few pieces are left out, so that they are unknown.
    names = ["</s>", "<unk>", *codes, *dict.fromkeys(both[5:]), "<pad>"]
    files: dict[str, Any] = {"source__spm": source, "target__spm": target}
    files |= {"vocab__json": {name: i for i, name in enumerate(names)}, "config__json": {"model_type": "marian"}}
    files["tokenizer_config__json"] = {"separate_vocabs": separate}
    if separate:
        names = ["</s>", "<unk>", *reversed(all_pieces(target)), "<pad>"]
        files["target_vocab__json"] = {name: i for i, name in enumerate(names)}
    return folder_of(folder, **files)


def m2m100_folder(folder: Path) -> Path:
    model = pieces("bpe", 3)
    names = ["<s>", "<pad>", "</s>", "<unk>", *all_pieces(model)[4:], "madeupword0000"]
    return folder_of(
        folder,
        sentencepiece__bpe__model=model,
        vocab__json={name: i for i, name in enumerate(names)},
        config__json={"model_type": "m2m_100"},
        special_tokens_map__json={
            "additional_special_tokens": [f"__{code}__" for code in languages.M2M100.split()],
            "eos_token": "</s>",
        },
    )


def aligned_folder(folder: Path, name: str, model: bytes, **settings: Any) -> Path:
    return folder_of(
        folder, sentencepiece__bpe__model=model, tokenizer_config__json={"tokenizer_class": name, **settings}
    )


# Marian


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_marian_is_the_librarys(tmp_path: Path, separate: bool) -> None:
    folder = marian_folder(tmp_path / "marian", separate)
    ours, theirs = imported(folder), MarianTokenizer.from_pretrained(folder)
    for text in (*TEXTS, ">>fra<< hello world", ">>deu<<hello", ">>none<< hello", ">> fra", " >>fra<< hello"):
        assert ours.encode_source(text) == theirs(text)["input_ids"], text[:40]
    for text in TEXTS:
        ids = ours.encode_target(text)
        assert ids == theirs(text_target=text)["input_ids"], text[:40]
        assert ours.decode_target(ids) == theirs.decode(ids, skip_special_tokens=True), text[:40]


def test_marians_languages_are_written_before_the_source(tmp_path: Path) -> None:
    ours = imported(marian_folder(tmp_path / "marian"))
    plain = ours.encode_source("hello")
    assert ours.encode_source(">>fra<< hello") == ours.encode_source("hello", "fra") == [2, *plain]
    with pytest.raises(RequestError, match=r"takes no language; write >>fra<< at the start of the source instead"):
        ours.language_id("fra")
    with pytest.raises(RequestError, match=r"does not know the language 'xyz', expected one of deu, fra$"):
        ours.encode_source("hello", "xyz")


def test_a_marian_model_of_one_pair_has_no_languages(tmp_path: Path) -> None:
    ours = imported(marian_folder(tmp_path / "marian", separate=True))
    for ask in (lambda: ours.encode_source("hello", "fra"), lambda: ours.language_id("fra")):
        with pytest.raises(RequestError, match="'fra' asked for, but this model's tokenizer has no languages"):
            ask()


# M2M100


def test_m2m100_is_the_librarys(tmp_path: Path) -> None:
    folder = m2m100_folder(tmp_path / "m2m100")
    theirs = M2M100Tokenizer.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "saved")  # with more files beside it, which give the languages' ids
    for ours in (imported(folder), imported(tmp_path / "saved")):
        for language in (None, "fr", "zu"):
            theirs.src_lang = language or "en"
            for text in TEXTS:
                ids = ours.encode_source(text, language)
                assert ids == theirs(text)["input_ids"], text[:40]
                assert ours.decode_target(ids) == theirs.decode(ids, skip_special_tokens=True), text[:40]
        assert {code: ours.language_id(code) for code in languages.M2M100.split()} == theirs.lang_code_to_id
        assert ours.encode_target("hello") == ours.encode_source("hello")[1:]


def test_ids_in_the_files_come_before_the_known_order(tmp_path: Path) -> None:
    folder = m2m100_folder(tmp_path / "m2m100")
    listed = {"900": {"content": "__fr__"}, "901": {"content": "<extra>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"src_lang": "de", "added_tokens_decoder": listed}))
    (folder / "added_tokens.json").write_text(json.dumps({"__qq__": 777}))
    ours = imported(folder)
    assert (ours.language_id("fr"), ours.language_id("qq")) == (900, 777)
    assert ours.encode_source("hello")[0] == ours.language_id("de")
    (folder / "tokenizer_config.json").write_text(json.dumps({"language_codes": "wmt21"}))
    assert list(imported(folder).languages) == [*languages.WMT21.split(), "qq"]


# mBART, mBART-50, NLLB, Pegasus


@pytest.mark.parametrize("theirs", [MBartTokenizer, MBart50Tokenizer])
def test_mbart_is_the_librarys(tmp_path: Path, theirs: Any) -> None:
    """Texts are stripped, and mBART's are plain letters: of those the library's own conversion makes other pieces."""
    folder = aligned_folder(tmp_path / "mbart", theirs.__name__, pieces("unigram"))
    ours, library = imported(folder), theirs.from_pretrained(folder)
    for language in (None, "ro_RO"):
        library.src_lang = language or "en_XX"
        for text in TEXTS:
            if theirs is MBartTokenizer and not text.isascii():
                continue
            assert ours.encode_source(text.strip(), language) == library(text.strip())["input_ids"], text[:40]
    assert ours.languages == {code: library.convert_tokens_to_ids(code) for code in ours.languages}
    assert max(ours.languages.values()) + 1 == library.convert_tokens_to_ids("<mask>") == len(library) - 1


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("MBartTokenizer", [], ["en_XX"]),
        ("MBart50Tokenizer", ["en_XX"], []),
        ("NllbTokenizer", ["eng_Latn"], []),
        ("NllbTokenizerFast", ["eng_Latn"], []),
    ],
)
def test_fairseqs_alignment(tmp_path: Path, name: str, before: list[str], after: list[str]) -> None:
    """Against SentencePiece itself, for all texts: the library gives NLLB no languages when it has only this file."""
    model = pieces("bpe")
    ours, read = imported(aligned_folder(tmp_path / "aligned", name, model)), processor(model)
    for text in TEXTS:
        aligned = [3 if i == 0 else i + 1 for i in read.encode(text)]
        framed = [ours.language_id(code) for code in before], [ours.language_id(code) for code in after]
        assert ours.encode_source(text) == [*framed[0], *aligned, 2, *framed[1]]
        assert (
            ours.decode_target([0, *aligned, 2, *framed[1]]) == read.decode([i - 1 for i in aligned if i != 3]).strip()
        )
    assert next(iter(ours.languages.values())) == read.get_piece_size() + 1
    assert ours.decode_target(range(1000)) == ours.decode_target(range(4, read.get_piece_size() + 1))


def test_nllb_of_before_its_correction(tmp_path: Path) -> None:
    folder = aligned_folder(
        tmp_path / "nllb", "NllbTokenizer", pieces("bpe"), legacy_behaviour=True, src_lang="fra_Latn"
    )
    ours = imported(folder)
    assert ours.encode_source("hello")[-2:] == [2, ours.language_id("fra_Latn")]
    assert len(ours.languages) == 202


def test_mbart_50_is_known_by_its_languages(tmp_path: Path) -> None:
    files = {"sentencepiece__bpe__model": pieces("bpe"), "config__json": {"model_type": "mbart"}}
    assert imported(folder_of(tmp_path / "mbart", **files)).place == "last"
    files["special_tokens_map__json"] = {"additional_special_tokens": ["en_XX", "af_ZA"]}
    assert imported(folder_of(tmp_path / "mbart50", **files)).place == "first"


def test_pegasus(tmp_path: Path) -> None:
    """Against SentencePiece itself: the library's present class does not number the pieces of a bare file."""
    model = pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = imported(folder_of(tmp_path / "pegasus", spiece__model=model, config__json={"model_type": "pegasus"}))
    read = processor(model)
    for text in TEXTS:
        ids = [i + 103 for i in read.encode(text)]
        assert ours.encode_source(text) == ours.encode_target(text) == [*ids, 1]
        known = [i - 103 for i in ids if i != 105]
        assert ours.decode_target([0, *ids, 1]) == read.decode(known).strip()


# To disk and back


@pytest.mark.parametrize("family", ["marian", "separate", "m2m100", "MBartTokenizer", "NllbTokenizer"])
def test_round_trip(tmp_path: Path, family: str) -> None:
    if family in ("marian", "separate"):
        folder = marian_folder(tmp_path / "theirs", family == "separate")
    elif family == "m2m100":
        folder = m2m100_folder(tmp_path / "theirs")
    else:
        folder = aligned_folder(tmp_path / "theirs", family, pieces("bpe"))
    ours = imported(folder)
    check_round_trip(ours, tmp_path / "ours")
    written = {path.name for path in (tmp_path / "ours" / FOLDER).iterdir()}
    one_side = {"about.json", "source.spm", "source.json"}
    assert written == (one_side | {"target.spm", "target.json"} if family in ("marian", "separate") else one_side)


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    ours = imported(aligned_folder(tmp_path / "mbart", "MBartTokenizer", pieces("unigram")))
    assert ours.encode_source("a </s> fr_XX b").count(2) == 1
    assert ours.language_id("fr_XX") not in ours.encode_source("a </s> fr_XX b")


# Errors


def error_of(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return stored(imported(marian_folder(tmp_path / "theirs")), tmp_path / "ours")


@pytest.mark.parametrize("keep", [0, 1, 100, 50_000, -1])
def test_a_truncated_model(root: Path, keep: int) -> None:
    path = root / FOLDER / "target.spm"
    path.write_bytes(path.read_bytes()[:keep])
    assert "(target.spm is not a complete SentencePiece model); copy or import the checkpoint again" in error_of(root)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "source.json", "target.json"])
def test_a_missing_file(root: Path, name: str) -> None:
    (root / FOLDER / name).unlink()
    assert name in error_of(root)


def test_an_unknown_place(root: Path) -> None:
    path = root / FOLDER / "about.json"
    path.write_text(path.read_text().replace('"written"', '"middle"'))
    assert "place 'middle', expected one of first, last, written" in error_of(root)


def test_without_the_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingPackageError, match=r"sentencepiece, which is not.*pip install 'sentencepiece'"):
        read_tokenizer(root)


def test_an_unknown_language_lists_some(tmp_path: Path) -> None:
    ours = imported(m2m100_folder(tmp_path / "m2m100"))
    for ask in (lambda: ours.encode_source("hello", "fra"), lambda: ours.language_id("fra")):
        with pytest.raises(RequestError, match="'fra', expected one of af, am, ar, ast, az, ba, be, bg and 92 more"):
            ask()


def test_pieces_of_xlm_r_decode_the_outputs_of_a_model_of_images(tmp_path: Path) -> None:
    """As the small TrOCR models have them: a fairseq numbering without languages."""
    folder = aligned_folder(tmp_path / "trocr", "XLMRobertaTokenizer", pieces("unigram"))
    (folder / "config.json").write_text(json.dumps({"model_type": "vision-encoder-decoder"}))
    ours, library = imported(folder), XLMRobertaTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode_target(text)
        assert ours.decode_target(ids) == library.decode(ids, skip_special_tokens=True).strip(), text[:40]
