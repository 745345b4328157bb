"""The tokenizer of a package: without our code, the ids and texts that our tokenizers have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tokenizer_cases
from support.handed_over import forget_scripts, script
from tokenizers import Tokenizer, models, processors, trainers

from seq2engine.errors import RequestError
from seq2engine.model.tokenizers.fairseq import FairseqTokenizer, Words
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from seq2engine.model.tokenizers.sentencepieces import PieceTable, SentencePieceTokenizer
from seq2engine.model.tokenizers.subwords import MergeCodes
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts
from seq2engine.packaging.package import SCRIPTS, script_bytes

TEXTS = [*tokenizer_cases.TEXTS, "the cat sat", ">>fra<< hello", ">>xyz<< hello", "lowest lower aaa"]
LINES = tokenizer_cases.lines(1)
MERGES = "l o\nlo w\ne r\nlow er</w>\ne s\nes t</w>\na a\nt h\nth e</w>\n"


def pieces(kind: str, shift: int, seed: int = 0) -> PieceTable:
    model = tokenizer_cases.pieces(kind, seed)
    processor = tokenizer_cases.processor(model)
    ids = {processor.id_to_piece(i): i + shift for i in range(3, processor.get_piece_size())}
    return PieceTable(model, ids, unknown=3, end=2)


def sentencepieces(place: str, language: str | None) -> SentencePieceTokenizer:
    languages = {"fra": 200, "deu": 201}
    return SentencePieceTokenizer(pieces("bpe", 1), pieces("unigram", 4, 1), languages, place, language)


def fairseq(codes: str | None) -> FairseqTokenizer:
    words = Words(("the", "low@@", "est", "lower", "aa@@", "a", "hello", "world", "x@@", "@@", "c@@"))
    return FairseqTokenizer(words, Words((*words.words, "more")), None if codes is None else MergeCodes(codes))


def hugging_face(languages: bool) -> HuggingFaceTokenizer:
    library = Tokenizer(models.Unigram())
    special = ["<unk>", "</s>", "eng_Latn", "fra_Latn"]
    library.train_from_iterator(
        LINES, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=special, show_progress=False)
    )
    first = ["eng_Latn"] if languages else []
    tokens = [(name, library.token_to_id(name)) for name in special]
    library.post_processor = processors.TemplateProcessing(single=[*first, "$A", "</s>"], special_tokens=tokens)
    return HuggingFaceTokenizer(library.to_str(), "</s>")


CASES = {
    "characters": lambda: SymbolTokenizer(*[table_from_texts(["abc helo wrd é"], "characters", True)] * 2),
    "words": lambda: SymbolTokenizer(table_from_texts(LINES, "words"), table_from_texts(LINES[:9], "words")),
    "fairseq words": lambda: fairseq(None),
    "fairseq 0.1": lambda: fairseq(MERGES),
    "fairseq 0.2": lambda: fairseq(f"#version: 0.2\n{MERGES}"),
    "fastBPE": lambda: fairseq("l o 9\nlo w 8\ne r</w> 7\n"),
    "marian": lambda: sentencepieces("written", None),
    "m2m100": lambda: sentencepieces("first", "fra"),
    "mbart": lambda: sentencepieces("last", "deu"),
    "tokenizer.json": lambda: hugging_face(False),
    "nllb": lambda: hugging_face(True),
}
KINDS = {
    SymbolTokenizer: "symbols",
    FairseqTokenizer: "fairseq",
    SentencePieceTokenizer: "sentencepiece",
    HuggingFaceTokenizer: "huggingface",
}


@pytest.fixture(autouse=True)
def scripts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget_scripts()


def handed_over(ours: Any, folder: Path) -> Any:
    for name in SCRIPTS:
        (folder / name).write_bytes(script_bytes(name))
    (folder / "tokenizer").mkdir()
    ours.write(folder / "tokenizer")
    script(folder, "decode")
    return sys.modules["tokenizer"].read_tokenizer({"tokenizer": KINDS[type(ours)]})


@pytest.mark.parametrize("name", CASES)
def test_the_same_ids_and_texts(name: str, tmp_path: Path) -> None:
    ours = CASES[name]()
    theirs = handed_over(ours, tmp_path)
    for text in [*TEXTS, *LINES[:50]]:
        assert theirs.encode(text, None) == ours.encode_source(text)
        known = not ours.unknown_source(text)
        assert (theirs.unknown in theirs.encode(text, None)) is not known
        ids = ours.encode_target(text)
        assert theirs.decode(ids) == ours.decode_target(ids)
    assert theirs.decode(list(range(250))) == ours.decode_target(list(range(250)))


@pytest.mark.parametrize("name", CASES)
def test_languages(name: str, tmp_path: Path) -> None:
    ours = CASES[name]()
    theirs = handed_over(ours, tmp_path)
    refused = sys.modules["package_files"].PackageError
    for language in ("fra", "fra_Latn", "nowhere"):
        for mine, other in (
            (lambda lang: ours.encode_source("hello", lang), lambda lang: theirs.encode("hello", lang)),
            (ours.language_id, theirs.language_id),
        ):
            try:
                expected = mine(language)
            except RequestError:
                with pytest.raises(refused):
                    other(language)
            else:
                assert other(language) == expected


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, package in (("marian", "sentencepiece"), ("nllb", "tokenizers")):
        ours = CASES[kind]()
        (folder := tmp_path / kind).mkdir()
        with monkeypatch.context() as blocked:
            blocked.setitem(sys.modules, package, None)
            with pytest.raises(Exception, match=rf"^{package} cannot be imported \(.*\); run: pip install -r requi"):
                handed_over(ours, folder)
