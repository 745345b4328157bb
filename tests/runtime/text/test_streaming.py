"""Text that is final while the rest is decoded, for every kind of tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_bundle import TOKENIZER as CHARACTERS
from support.tokenizer_cases import lines, pieces, processor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from seq2engine.model.tokenizers.fairseq import FairseqTokenizer, Words
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from seq2engine.model.tokenizers.ids import IdsTokenizer
from seq2engine.model.tokenizers.sentencepieces import PieceTable, SentencePieceTokenizer
from seq2engine.model.tokenizers.subwords import GOES_ON
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts
from seq2engine.runtime.text.streaming import settled

VOCAB = 380


@cache
def tokenizer(kind):
    if kind == "characters":
        return CHARACTERS
    if kind == "words":
        table = table_from_texts(lines(1), "words")
        return SymbolTokenizer(table, table)
    if kind == "ids":
        return IdsTokenizer()
    if kind == "fairseq":
        words = Words(tuple(word + GOES_ON * (i % 3 == 0) for i, word in enumerate(sorted(set(lines(2)[0].split())))))
        return FairseqTokenizer(words, words)
    if kind == "sentencepiece with bytes":
        model = pieces("bpe", byte_fallback=True, vocab_size=VOCAB)
        table = PieceTable(model, {processor(model).id_to_piece(i): i for i in range(3, VOCAB)}, unknown=0, end=2)
        return SentencePieceTokenizer(table, table)
    return HuggingFaceTokenizer(library(kind), "</s>")


def library(kind):
    special = ["</s>", "<unk>"]
    if kind == "bytes":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    else:
        found = Tokenizer(models.WordPiece(unk_token="<unk>"))
        found.pre_tokenizer, found.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    found.train_from_iterator([*lines(0), "we do n't , I 'm ; it 's ' fine ' . do not !"], trainer)
    return found.to_str()


KINDS = ("characters", "words", "ids", "fairseq", "sentencepiece with bytes", "bytes", "word pieces")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_never_changes(kind):
    coder = tokenizer(kind)
    most = 17 if kind == "characters" else 12 if kind == "fairseq" else 100 if kind == "words" else VOCAB - 1

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, most), max_size=14))
    def holds(ids):
        whole = coder.decode_target(ids)
        shown = ""
        for length in range(1, len(ids) + 1):
            now = settled(coder.decode_target(ids[:length]))
            assert whole.startswith(now)
            assert now.startswith(shown)
            shown = now

    holds()


@pytest.mark.parametrize("kind", ["sentencepiece with bytes", "bytes"])
def test_a_character_of_several_tokens_comes_when_it_is_whole(kind):
    coder = tokenizer(kind)
    ids = coder.encode_target("\u4e2d\u6587")
    assert len(ids) > 4
    seen = {settled(coder.decode_target(ids[:length])) for length in range(len(ids) + 1)}
    assert seen == {"", "\u4e2d", "\u4e2d\u6587"}
