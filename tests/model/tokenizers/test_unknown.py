"""What a model has no token for is named, by every kind of tokenizer: exactly what it makes <unk> of."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_cases import lines, pieces, processor
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from seq2engine.model.tokenizers.base import unknown_text
from seq2engine.model.tokenizers.fairseq import UNKNOWN as FAIRSEQ_UNKNOWN
from seq2engine.model.tokenizers.fairseq import FairseqTokenizer, Words
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from seq2engine.model.tokenizers.sentencepieces import PieceTable, SentencePieceTokenizer
from seq2engine.model.tokenizers.subwords import MergeCodes
from seq2engine.model.tokenizers.symbols import UNKNOWN, SymbolTokenizer, table_from_texts

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def symbols():
    return SymbolTokenizer(*[table_from_texts([LETTERS], "characters")] * 2), UNKNOWN


def sentencepiece():
    model = pieces("unigram")
    spm = processor(model)
    ids = {
        spm.id_to_piece(i): i for i in range(spm.get_piece_size()) if not spm.is_control(i) and not spm.is_unknown(i)
    }
    table = PieceTable(model, ids, spm.unk_id(), spm.eos_id())
    return SentencePieceTokenizer(table, table), spm.unk_id()


def hugging_face(kind="unigram"):
    if kind == "unigram":
        library = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"])
    else:
        library = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False)
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.train_from_iterator(lines(0), trainer)
    return HuggingFaceTokenizer(library.to_str(), "</s>"), library.token_to_id("<unk>")


def fairseq():
    letters = [letter for letter in LETTERS if letter.strip()]
    words = Words((*letters, *(f"{letter}@@" for letter in letters)))
    return FairseqTokenizer(words, words, MergeCodes("#version: 0.2\n")), FAIRSEQ_UNKNOWN


KINDS = {
    "symbols": symbols,
    "sentencepiece": sentencepiece,
    "tokenizer.json unigram": hugging_face,
    "tokenizer.json bpe": lambda: hugging_face("bpe"),
    "fairseq": fairseq,
}


@pytest.fixture(scope="module", params=KINDS)
def made(request):
    return KINDS[request.param]()


def test_unknown_characters_are_named_once_on_both_sides(made):
    tokenizer, _ = made
    for find in (tokenizer.unknown_source, tokenizer.unknown_target):
        assert "".join(find("hello ж world ₿ and ж.")) == "ж₿"
        assert find("hello world.") == find("") == []


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("abc .ж₿"), max_size=12))
def test_something_is_unknown_exactly_where_the_ids_have_the_unknown_token(made, text):
    tokenizer, unknown = made
    assert bool(tokenizer.unknown_source(text)) == (unknown in tokenizer.encode_source(text))
    assert bool(tokenizer.unknown_target(text)) == (unknown in tokenizer.encode_target(text))
    assert set("".join(tokenizer.unknown_source(text))) <= set("ж₿")


def test_a_piece_that_the_model_has_no_id_for_is_named_whole():
    tokenizer, unknown = sentencepiece()
    piece = next(piece for piece in tokenizer.source.ids if len(piece) > 3)
    ids = {other: i for other, i in tokenizer.source.ids.items() if other != piece}
    table = PieceTable(tokenizer.source.model, ids, unknown, tokenizer.source.end)
    text = piece.replace("▁", " ")
    assert table.unknown_parts(text) == [piece.removeprefix("▁")]


def test_an_unknown_language_that_is_written_before_a_text_is_named():
    table = sentencepiece()[0].source
    tokenizer = SentencePieceTokenizer(table, table, {"fra": 7}, "written")
    assert tokenizer.unknown_source(">>fra<< hello") == []
    assert tokenizer.unknown_source(">>xyz<< ж") == [">>xyz<<", "ж"]


def test_words_are_named_where_tokens_are_words():
    tokenizer = SymbolTokenizer(*[table_from_texts(["the cat"], "words", lower=True)] * 2)
    assert tokenizer.unknown_source("The dog") == ["dog"]
    assert unknown_text(["dog"]) == "1 word the model has no token for: 'dog'"


def test_bytes_leave_nothing_unknown():
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(lines(0), trainer)
    assert json.loads(library.to_str())["model"]["unk_token"] is None
    assert HuggingFaceTokenizer(library.to_str(), "</s>").unknown_source("ж₿") == []


def test_a_message_counts_all_and_lists_some():
    assert unknown_text(["ж", "₿"]) == "2 characters the model has no token for: 'ж', '₿'"
    many = unknown_text([chr(0x430 + i) for i in range(12)])
    assert many.startswith("12 characters ")
    assert many.count("'") == 20
    assert many.endswith(", ...")
