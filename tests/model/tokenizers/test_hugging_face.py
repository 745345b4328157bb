"""Tokenizers of a tokenizer.json give the ids and the text which the library's own classes give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_cases import TEXTS, check_round_trip, lines, pieces, stored
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import MBart50Tokenizer, MBartTokenizer, NllbTokenizer, PreTrainedTokenizerFast

from seq2engine.errors import CheckpointError, MissingPackageError, RequestError
from seq2engine.model.tokenizers.base import FOLDER
from seq2engine.model.tokenizers.byte_level import tokenizer_json
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face
from seq2engine.model.tokenizers.reading import read_tokenizer

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def imported(folder: Path) -> HuggingFaceTokenizer:
    tokenizer = tokenizer_from_hugging_face(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def bart_like() -> Tokenizer:
    """Byte-level BPE between <s> and </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines(0),
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def t5_like() -> Tokenizer:
    """Unigram before </s>, with pieces that are unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        lines(0),
        trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def saved(tokenizer: Any, folder: Path, **settings: Any) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **settings
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [bart_like, t5_like])
def test_ids_and_text_are_the_librarys(tmp_path: Path, make: Any) -> None:
    folder = saved(make(), tmp_path / "theirs")
    ours, theirs = imported(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode_source(text)
        assert ids == theirs(text)["input_ids"], text[:40]
        assert ours.decode_target(ids) == theirs.decode(ids, skip_special_tokens=True), text[:40]
        assert ours.encode_target(text) == [*theirs(text, add_special_tokens=False)["input_ids"], 2]


def test_byte_level_text_comes_back_whole() -> None:
    ours = HuggingFaceTokenizer(bart_like().to_str(), "</s>")
    for text in TEXTS:
        assert ours.decode_target(ours.encode_target(text)) == text
    assert ours.decode_target([99_999, 1, 0, 2]) == ""


def test_a_file_that_cuts_and_pads_does_not(tmp_path: Path) -> None:
    tokenizer = bart_like()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=1, length=16)
    ours = HuggingFaceTokenizer(tokenizer.to_str(), "</s>")
    assert len(ours.encode_source("x" * 10_000)) > 1000
    assert 1 not in ours.encode_source("x")


@pytest.mark.parametrize("theirs", [MBartTokenizer, MBart50Tokenizer, NllbTokenizer])
def test_languages_are_the_librarys(tmp_path: Path, theirs: Any) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sentencepiece.bpe.model").write_bytes(pieces("bpe" if theirs is NllbTokenizer else "unigram"))
    named = ["eng_Latn", "fra_Latn", "zho_Hans"] if theirs is NllbTokenizer else ["en_XX", "fr_XX", "zh_CN"]
    extra = {"extra_special_tokens": named} if theirs is NllbTokenizer else {}  # which it loses from a bare file
    library = theirs.from_pretrained(tmp_path / "bare", **extra)
    library.save_pretrained(tmp_path / "saved")
    ours = imported(tmp_path / "saved")
    for language in (None, *named):
        library.src_lang = language or named[0]
        for text in TEXTS:
            ids = ours.encode_source(text, language)
            assert ids == library(text)["input_ids"], text[:40]
            assert ours.decode_target(ids) == library.decode(ids, skip_special_tokens=True), text[:40]
    assert [ours.language_id(name) for name in named] == library.convert_tokens_to_ids(named)
    assert ours.encode_target("hello") == [*library("hello", add_special_tokens=False)["input_ids"], 2]
    check_round_trip(ours, tmp_path / "ours")


def multilingual() -> Tokenizer:
    tokenizer = bart_like()
    tokenizer.add_special_tokens(["fra_Latn", "eng_Latn", "__de__", "ro_RO", "<mask>", "not_Lang"])
    tokenizer.add_tokens(["deu_Latn"])
    return tokenizer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokenizer_class": "NllbTokenizerFast"}, ["eng_Latn", "x", "</s>"]),
        ({"tokenizer_class": "NllbTokenizer", "src_lang": "fra_Latn"}, ["fra_Latn", "x", "</s>"]),
        ({"tokenizer_class": "NllbTokenizer", "legacy_behaviour": True}, ["x", "</s>", "eng_Latn"]),
        ({"tokenizer_class": "MBartTokenizer", "src_lang": "ro_RO"}, ["x", "</s>", "ro_RO"]),
        ({"tokenizer_class": "BartTokenizer"}, ["<s>", "x", "</s>"]),
    ],
)
def test_the_class_overrules_the_files_frame(tmp_path: Path, settings: dict[str, Any], expected: list[str]) -> None:
    """As it does in the library: hub files of NLLB still put the language last."""
    (tmp_path / "tokenizer.json").write_text(multilingual().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, **settings}))
    ours = imported(tmp_path)
    assert ours.encode_source("x") == [ours.tokenizer.token_to_id(name) for name in expected]


def test_languages_are_the_special_tokens_of_that_format() -> None:
    ours = HuggingFaceTokenizer(multilingual().to_str(), "</s>")
    assert set(ours.languages) == {"fra_Latn", "eng_Latn", "de", "ro_RO", "not_Lang"}
    with pytest.raises(RequestError, match="language 'de' asked for, but this model's sources carry no language"):
        ours.encode_source("x", "de")
    with pytest.raises(RequestError, match="does not know the language 'xx', expected one of de, eng_Latn, fra_Latn"):
        ours.language_id("xx")


def test_round_trip_and_no_languages(tmp_path: Path) -> None:
    ours = HuggingFaceTokenizer(t5_like().to_str(), "</s>")
    check_round_trip(ours, tmp_path)
    for ask in (lambda: ours.encode_source("x", "fra"), lambda: ours.language_id("fra")):
        with pytest.raises(RequestError, match="'fra' asked for, but this model's tokenizer has no languages"):
            ask()


def error_of(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stored(HuggingFaceTokenizer(bart_like().to_str(), "</s>"), tmp_path / "root")
    path = root / FOLDER / "tokenizer.json"
    whole = path.read_text()
    (root / FOLDER / "about.json").write_text('{"kind": "huggingface", "end": "<none>"}')
    assert "tokenizer.json has no end token '<none>'" in error_of(root)
    path.write_text(whole[: len(whole) // 2])
    assert "tokenizer.json cannot be read" in error_of(root)
    path.unlink()
    assert "tokenizer.json" in error_of(root)
    path.write_text(whole)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match=r"tokenizers, which is not installed.*pip install 'tokenizers'"):
        read_tokenizer(root)


def test_a_language_the_file_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(bart_like().to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
    with pytest.raises(CheckpointError, match=r"\(tokenizer.json has no token 'eng_Latn'\); download it again"):
        tokenizer_from_hugging_face(tmp_path)


def replaced(part: str, value: Any) -> HuggingFaceTokenizer:
    """A tokenizer.json over letters with another part."""
    letters = {letter: 3 + i for i, letter in enumerate("abcdefghij ")}
    values = json.loads(tokenizer_json(letters, [], [(2, "</s>", True)]))
    return HuggingFaceTokenizer(json.dumps({**values, part: value}), "</s>")


SLOW = {"Regex": "(a+)+$"}  # takes 2^n steps; the library gives up
VOCABULARY = {"a": 0, "</s>": 2}


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("model", {"type": "BPE", "vocab": VOCABULARY, "merges": [], "unk_token": "<u>"}, "Unk token `<u>` not found"),
        ("model", {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<u>"}, r"Missing \[UNK\] token"),
        ("model", {"type": "Unigram", "vocab": [["</s>", 0.0], ["a", -1.0]]}, "`unk_id` is missing"),
        ("pre_tokenizer", {"type": "Split", "pattern": SLOW, "behavior": "Isolated", "invert": False}, "retry-limit"),
        ("normalizer", {"type": "Replace", "pattern": SLOW, "content": "x"}, "retry-limit"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "chunk size must be non-zero"),
    ],
)  # fmt: skip
def test_a_text_that_the_file_fails_on_is_one_error(part: str, value: Any, reason: str) -> None:
    """Of files that can be read. Some of these are panics of the library, which are no Exceptions."""
    made = replaced(part, value)
    for encode in (made.encode_source, made.encode_target):
        with pytest.raises(RequestError, match=f"^tokenizer.json cannot encode this text: .*{reason}"):
            encode("a" * 40 + "b")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("post_processor", {
            "type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        }),
    ],
)  # fmt: skip
def test_a_file_that_panics_is_refused(part: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer\.json cannot be "):
        replaced(part, value)


def test_outputs_that_the_file_fails_on_are_one_error() -> None:
    made = replaced("decoder", {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40})
    with pytest.raises(RequestError, match=r"^tokenizer\.json cannot decode the output: index out of bounds"):
        made.decode_target([3, 4])
