"""Tokenizers from the files of other libraries' models; nothing in them is ever unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object, read_text, shortened
from seq2engine.errors import CheckpointError, MissingFileError

from ..whisper_tokens import Layout
from . import languages
from .base import Tokenizer
from .byt5 import ByteTokenizer
from .byte_level import merges_from_file, tokenizer_json, vocabulary_from_tiktoken
from .fairseq import FairseqTokenizer, read_exactly, words_from_file
from .hugging_face import FILE, HuggingFaceTokenizer, framed, framed_by_language
from .languages import languages_of
from .sentencepieces import SENTINEL, PieceTable, SentencePieceTokenizer, table_from_file, vocabulary_from_file
from .subwords import MergeCodes
from .symbols import SymbolTable, SymbolTokenizer

SHARED_PIECES = "sentencepiece.bpe.model"
PEGASUS_PIECES = "spiece.model"
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
TEXT_END = "<|endoftext|>"  # of byte-level vocabularies
# Any of these makes a folder one with a tokenizer.
FILES = (FILE, "source.spm", "target.spm", SHARED_PIECES, PEGASUS_PIECES, VOCABULARY, MERGES, "vocab.txt")
FAIRSEQ_CODES = ("codes", "bpecodes", "bpe.codes", "code")
# Classes whose sources carry a language: its place, the default, and all codes in order.
MULTILINGUAL = {
    "MBartTokenizer": ("last", "en_XX", languages.MBART),
    "MBart50Tokenizer": ("first", "en_XX", languages.MBART50),
    "NllbTokenizer": ("first", "eng_Latn", languages.NLLB),
}
# For folders that do not name their tokenizer's class.
CLASS_OF_MODEL = {
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "pegasus": "PegasusTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "MT5Tokenizer",
    "umt5": "T5Tokenizer",
    "whisper": "WhisperTokenizer",
    "vision-encoder-decoder": "RobertaTokenizer",
}
BYTE_LEVEL = ("RobertaTokenizer", "BartTokenizer")  # vocab.json and merges.txt, framed by <s> and </s>
ALIGNED = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}  # before the pieces of fairseq's models
MOST_SENTINELS = 10_000  # their numbers have four digits at most
PEGASUS_OFFSET = 103  # ids before the pieces: pad, end, masks and unused ones


def tokenizer_from_hugging_face(source: Path) -> Tokenizer | None:
    """The tokenizer of a folder as the hub has it, or None where the folder has no tokenizer files at all."""
    if not any((source / name).is_file() for name in (*FILES, "tokenizer_config.json")):
        return None
    try:
        settings = {**json_file(source / "config.json"), **json_file(source / "tokenizer_config.json")}
        name = class_of(source, settings)
        if name == "ByT5Tokenizer":
            return ByteTokenizer(sentinels_of(settings, 125))
        if not any((source / file).is_file() for file in FILES):
            return None
        if (source / "source.spm").is_file():
            return marian_from_folder(source, name == "MarianTokenizer")
        if (source / SHARED_PIECES).is_file() and (source / VOCABULARY).is_file():
            return m2m100_from_folder(source, settings)
        if (source / FILE).is_file():
            return from_tokenizer_json(source, settings, name)
        if name == "WhisperTokenizer" and (source / MERGES).is_file():
            return whisper_from_folder(source, settings)
        if name in BYTE_LEVEL and (source / VOCABULARY).is_file() and (source / MERGES).is_file():
            return roberta_from_folder(source)
        if (source / SHARED_PIECES).is_file() and settings.get("model_type") == "vision-encoder-decoder":
            table = shifted_table(source / SHARED_PIECES, 1, ALIGNED["<unk>"], ALIGNED["</s>"])
            return SentencePieceTokenizer(table, table)  # XLM-R's: its sources would differ, but they are images
        if (source / SHARED_PIECES).is_file() and name in MULTILINGUAL:
            return aligned_from_folder(source, settings, name)
        if (source / PEGASUS_PIECES).is_file() and name == "PegasusTokenizer":
            return pegasus_from_folder(source, settings)
        if (source / PEGASUS_PIECES).is_file() and name in ("T5Tokenizer", "MT5Tokenizer"):
            return t5_from_folder(source, settings, name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the tokenizer in {source} cannot be used ({error}); download it again") from error
    raise CheckpointError(
        f"{source} has a tokenizer without {FILE} ({name or 'of no known class'}); make one with transformers: "
        f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained({str(source)!r})"
    )


def json_file(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be used: {error}") from error


def class_of(source: Path, settings: dict[str, Any]) -> str:
    """The library's class for this tokenizer; '' where no file names it."""
    named: str = settings.get("tokenizer_class") or CLASS_OF_MODEL.get(settings.get("model_type", ""), "")
    named = named.removesuffix("Fast")
    extra = json_file(source / "special_tokens_map.json").get("additional_special_tokens", [])
    return "MBart50Tokenizer" if named == "MBartTokenizer" and "af_ZA" in extra else named


def marian_from_folder(source: Path, declared: bool) -> SentencePieceTokenizer:
    """`declared`: the folder names this class, so a missing file was lost."""
    vocabulary = vocabulary_from_file(source / VOCABULARY)
    other = source / "target_vocab.json"
    target_vocabulary = vocabulary_from_file(other) if other.is_file() else vocabulary
    codes = {piece[2:-2]: i for piece, i in vocabulary.items() if piece.startswith(">>") and piece.endswith("<<")}
    table = listed_table(source / "source.spm", vocabulary)
    if (source / "target.spm").is_file() or not declared:
        target = listed_table(source / "target.spm", target_vocabulary)
    else:
        target = table_of_both_sides(source, table, target_vocabulary, codes)
    return SentencePieceTokenizer(table, target, codes, "written")


def table_of_both_sides(
    source: Path, table: PieceTable, target_vocabulary: dict[str, int], codes: dict[str, int]
) -> PieceTable:
    """The source's table for the target, too, of a folder without target.spm.

    It is right where the one vocabulary holds the pieces of source.spm and no others: a second model's would be among
    them. Else the file is missing; the library itself fails, too.
    """
    read = table.processor
    own = {read.id_to_piece(i) for i in range(read.get_piece_size()) if not (read.is_control(i) or read.is_unknown(i))}
    special = {*ALIGNED, *(f">>{code}<<" for code in codes)}
    text = target_vocabulary.keys() - special
    if own == text:
        return table
    more = f"{len(text - own):,} pieces that source.spm does not have, and lacks {len(own - text):,} of its own"
    raise MissingFileError(
        f"{source / 'target.spm'} is missing: the target's vocabulary has {more}; copy it from where the model comes "
        f"from, or, for a model of token ids, remove source.spm and {VOCABULARY}"
    )


def m2m100_from_folder(source: Path, settings: dict[str, Any]) -> SentencePieceTokenizer:
    vocabulary = vocabulary_from_file(source / VOCABULARY)
    listed = languages.WMT21 if settings.get("language_codes") == "wmt21" else languages.M2M100
    table = listed_table(source / SHARED_PIECES, vocabulary)
    codes = {code: i for i, code in enumerate(listed.split(), len(vocabulary))} | added_languages(source, settings)
    return SentencePieceTokenizer(table, table, codes, "first", settings.get("src_lang") or "en")


def aligned_from_folder(source: Path, settings: dict[str, Any], name: str) -> SentencePieceTokenizer:
    place, language, listed = language_frame(settings, name)
    table = shifted_table(source / SHARED_PIECES, 1, ALIGNED["<unk>"], ALIGNED["</s>"])
    codes = {code: i for i, code in enumerate(listed.split(), table.processor.get_piece_size() + 1)}
    return SentencePieceTokenizer(table, table, codes | added_languages(source, settings), place, language)


def pegasus_from_folder(source: Path, settings: dict[str, Any]) -> SentencePieceTokenizer:
    offset = settings.get("offset", PEGASUS_OFFSET)
    table = shifted_table(source / PEGASUS_PIECES, offset, unknown=2 + offset, end=1)
    return SentencePieceTokenizer(table, table)


def whisper_from_folder(source: Path, settings: dict[str, Any]) -> HuggingFaceTokenizer:
    """vocab.json and merges.txt, with the special tokens that the other files list; timestamps are not special."""
    vocabulary = vocabulary_from_file(source / VOCABULARY)
    listed = {token["content"]: int(i) for i, token in settings.get("added_tokens_decoder", {}).items()}
    added = {TEXT_END: vocabulary.get(TEXT_END)} | json_file(source / "added_tokens.json") | listed
    marked = [(i, name, not name[2:3].isdigit()) for name, i in added.items() if i is not None]
    kept = {token: i for token, i in vocabulary.items() if token not in added or i == added[token]}
    return HuggingFaceTokenizer(tokenizer_json(kept, merges_from_file(source / MERGES), marked), TEXT_END)


def roberta_from_folder(source: Path) -> HuggingFaceTokenizer:
    vocabulary = vocabulary_from_file(source / VOCABULARY)
    added = [(i, name, True) for name, i in vocabulary.items() if name in ALIGNED or name == "<mask>"]
    text = tokenizer_json(vocabulary, merges_from_file(source / MERGES), added)
    return HuggingFaceTokenizer(framed(text, ["<s>", "$A", "</s>"]), "</s>")


def tokenizer_from_tiktoken(folder: Path, layout: Layout) -> Tokenizer | None:
    """The tokenizer of an OpenAI model from the .tiktoken file beside it; None where there is none."""
    path = folder / ("multilingual.tiktoken" if layout.multilingual else "gpt2.tiktoken")
    if not path.is_file():
        return None
    try:
        vocabulary, merges = vocabulary_from_tiktoken(path)
        names = enumerate(layout.special_tokens(), layout.end)
        return HuggingFaceTokenizer(
            tokenizer_json(vocabulary, merges, [(i, name, not name[2:3].isdigit()) for i, name in names]), TEXT_END
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy it again") from error


def t5_from_folder(source: Path, settings: dict[str, Any], name: str) -> SentencePieceTokenizer:
    """Pieces numbered as in their file, then T5's sentinels, the last one first; mT5 has them among its pieces."""
    table = shifted_table(source / PEGASUS_PIECES, 0, unknown=2, end=1)
    count, first = sentinels_of(settings, 0 if name == "MT5Tokenizer" else 100), table.processor.get_piece_size()
    sentinels = {f"<extra_id_{count - 1 - i}>": first + i for i in range(count)}
    table = replace(table, ids={**table.ids, **sentinels})
    return SentencePieceTokenizer(table, table)


def sentinels_of(settings: dict[str, Any], default: int) -> int:
    """How many tokens <extra_id_0>, ... there are: those that are listed, or the number that the config has."""
    listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    named = [token for token in listed if isinstance(token, str) and SENTINEL.fullmatch(token)]
    count = len(named) or settings.get("extra_ids", default)
    if type(count) is not int or not 0 <= count <= MOST_SENTINELS:
        raise ValueError(f"extra_ids is {shortened(count)}, expected a number from 0 to {MOST_SENTINELS}")
    return count


def listed_table(path: Path, vocabulary: dict[str, int]) -> PieceTable:
    """Pieces numbered by a list of their own, which includes the special tokens."""
    text = {piece: i for piece, i in vocabulary.items() if piece not in ALIGNED}
    return table_from_file(path, text, vocabulary["<unk>"], vocabulary["</s>"])


def shifted_table(path: Path, offset: int, unknown: int, end: int) -> PieceTable:
    """Pieces numbered as in their file, but later; the file's own first three are special tokens."""
    bare = table_from_file(path, {}, unknown, end)
    processor = bare.processor
    return replace(bare, ids={processor.id_to_piece(i): i + offset for i in range(3, processor.get_piece_size())})


def from_tokenizer_json(source: Path, settings: dict[str, Any], name: str) -> HuggingFaceTokenizer:
    special = {**json_file(source / "special_tokens_map.json"), **settings}.get("eos_token")
    special = special or (TEXT_END if name == "WhisperTokenizer" else "</s>")
    end = special["content"] if isinstance(special, dict) else special
    text = read_text(source / FILE)
    if name in MULTILINGUAL:
        place, language, _ = language_frame(settings, name)
        text = framed_by_language(text, language, end, place)
    return HuggingFaceTokenizer(text, end)


def language_frame(settings: dict[str, Any], name: str) -> tuple[str, str, str]:
    """The place of a source's language, the default language, and all codes."""
    place, language, listed = MULTILINGUAL[name]
    return ("last" if settings.get("legacy_behaviour") else place), settings.get("src_lang") or language, listed


def added_languages(source: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Languages whose ids the files give: of both forms in which the library has written added tokens."""
    listed = settings.get("added_tokens_decoder", {})
    now = {token["content"]: int(i) for i, token in listed.items()}
    return languages_of((json_file(source / "added_tokens.json") | now).items())


def tokenizer_from_fairseq(source: Path, pair: tuple[str, str] | None = None) -> Tokenizer | None:
    """The tokenizer of a fairseq model's folder (or of the folder its file is in); None where that has no dict.*.txt.

    `pair` names the source and target language, as the model's own settings do; it may be left out where both sides
    use one dictionary.
    """
    folder = source if source.is_dir() else source.parent
    paths = {path.name.removeprefix("dict.").removesuffix(".txt"): path for path in sorted(folder.glob("dict.*.txt"))}
    if (folder / "dict.txt").is_file():
        paths[""] = folder / "dict.txt"
    if not paths:
        return None
    codes = [folder / name for name in FAIRSEQ_CODES if (folder / name).is_file()]
    try:
        sides = {language: words_from_file(path) for language, path in paths.items()}
        merges = MergeCodes(read_exactly(codes[0])) if codes else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the dictionaries in {folder} cannot be used ({error}); download them again") from error
    if pair is not None and set(pair) <= sides.keys():
        return FairseqTokenizer(sides[pair[0]], sides[pair[1]], merges)
    first, *others = sides.values()
    if any(other != first for other in others):
        wanted = f"dict.{pair[0]}.txt and dict.{pair[1]}.txt" if pair else "one dictionary for both sides"
        raise CheckpointError(f"{folder} has {', '.join(p.name for p in paths.values())}, expected {wanted}")
    return FairseqTokenizer(first, first, merges)


def tokenizer_from_opennmt(
    source: Path, src_tokens: Sequence[str], tgt_tokens: Sequence[str], specials: Sequence[str]
) -> Tokenizer:
    """Words between spaces by the two vocabularies of an OpenNMT model; its sources have no end token."""
    for side, tokens in (("source", src_tokens), ("target", tgt_tokens)):
        needed = ("<unk>",) if side == "source" else ("<unk>", "</s>")
        if missing := [token for token in needed if token not in tokens]:
            raise CheckpointError(f"{source} has no {missing[0]} in its {side} vocabulary, expected OpenNMT's own")
    return SymbolTokenizer(
        SymbolTable("words", tuple(src_tokens), specials=tuple(specials), end=None),
        SymbolTable("words", tuple(tgt_tokens), specials=tuple(specials)),
    )
