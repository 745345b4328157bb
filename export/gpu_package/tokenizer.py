"""Text to token ids and back, from the folder tokenizer/ of this package.

kinds (tokenizer/about.json): symbols, fairseq and bytes are read here; sentencepiece and huggingface by the libraries
`sentencepiece` and `tokenizers`. A package without a tokenizer takes and gives token ids, such as `17 4 250`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from package_files import HERE, PackageError, read_json

FOLDER = HERE / "tokenizer"
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}__")  # fr_XX, fra_Latn, __fr__
FAIRSEQ = {"</s>": 2, "<unk>": 3}
FAIRSEQ_WORDS = 4  # the id of a dictionary's first word


@dataclass(frozen=True)
class Tokenizer:
    """`encode` makes ids of a text in a language (None: the model's own); `unknown` is its id for what it does not
    know, which stands for nothing else; None if there is none."""

    encode: Callable[[str, str | None], list[int]]
    decode: Callable[[Sequence[int]], str]
    unknown: int | None
    language_id: Callable[[str], int]


def read_tokenizer(package: Any) -> Tokenizer:
    if package["tokenizer"] is None:
        return Tokenizer(ids_from_text, lambda ids: " ".join(map(str, ids)), None, no_language)
    return KINDS[package["tokenizer"]](read_json(FOLDER / "about.json"))


def ids_from_text(text: str, language: str | None) -> list[int]:
    if language is not None:
        no_language(language)
    if wrong := [word for word in text.split() if not re.fullmatch("[0-9]{1,9}", word)]:
        raise PackageError(f"{wrong[0][:40]!r} is not a token id; this package has no tokenizer: give ids such as 17 4")
    return [int(word) for word in text.split()]


def no_language(language: str) -> int:
    raise PackageError(f"language {language!r} asked for, but this model has none; leave it out")


def among(language: str, languages: dict[str, int]) -> int:
    if not languages:
        no_language(language)
    if language not in languages:
        shown = ", ".join(sorted(languages)[:8])
        raise PackageError(f"this model does not know the language {language!r}, but {shown}, ...")
    return languages[language]


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageError(f"{name} cannot be imported ({error}); run: pip install -r requirements.txt") from error


def symbols(about: Any) -> Tokenizer:
    """Characters, or words between spaces, by a table of either side."""
    source, target = about["source"], about["target"]
    numbers = {symbol: i for i, symbol in enumerate(source["symbols"])}
    text_ids = {symbol: i for symbol, i in numbers.items() if symbol not in source["specials"]}
    tail = [] if source["end"] is None else [numbers[source["end"]]]
    special = set(target["specials"])

    def encode(text: str, language: str | None) -> list[int]:
        if language is not None:
            no_language(language)
        text = text.lower() if source["lower"] else text
        parts: Iterable[str] = text if source["split"] == "characters" else text.split()
        return [*(text_ids.get(part, numbers["<unk>"]) for part in parts), *tail]

    def decode(ids: Sequence[int]) -> str:
        parts = [target["symbols"][i] for i in ids if 0 <= i < len(target["symbols"])]
        return ("" if target["split"] == "characters" else " ").join(part for part in parts if part not in special)

    return Tokenizer(encode, decode, numbers["<unk>"], no_language)


def byte_level(about: Any) -> Tokenizer:
    """The bytes of a text, three special tokens before them; sentinels are not among them here."""

    def encode(text: str, language: str | None) -> list[int]:
        if language is not None:
            no_language(language)
        return [*(3 + byte for byte in text.encode()), 1]

    def decode(ids: Sequence[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", errors="ignore")

    return Tokenizer(encode, decode, None, no_language)


def fairseq(about: Any) -> Tokenizer:
    """Words of a dictionary of either side, cut into subwords by merge codes where there are any."""
    words = {side: dictionary(FOLDER / f"dict.{side}.txt") for side in ("source", "target")}
    ids = {word: i for i, word in enumerate(words["source"], FAIRSEQ_WORDS)}
    cut = merges((FOLDER / "codes").read_bytes().decode()) if about["codes"] else lambda word: [word]

    def encode(text: str, language: str | None) -> list[int]:
        if language is not None:
            no_language(language)
        parts = [part for word in text.split() for part in cut(word)]
        return [*(ids.get(part, FAIRSEQ["<unk>"]) for part in parts), FAIRSEQ["</s>"]]

    def decode(output: Sequence[int]) -> str:
        known = [i - FAIRSEQ_WORDS for i in output if 0 <= i - FAIRSEQ_WORDS < len(words["target"])]
        return f"{' '.join(words['target'][i] for i in known)} ".replace("@@ ", "").rstrip(" ")

    return Tokenizer(encode, decode, FAIRSEQ["<unk>"], no_language)


def dictionary(path: Path) -> list[str]:
    """The words of a file that has one a line, each followed by a count and a mark."""
    lines = path.read_bytes().decode().rstrip("\n").split("\n")
    return [line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in lines]


def merges(text: str) -> Callable[[str], list[str]]:
    """Cuts words by merge codes as subword-nmt and fastBPE write them: the pair learned first is merged first."""
    lines = text.rstrip("\n").split("\n")
    headed = lines[0].startswith("#version:")
    # Version 0.1 has a symbol of its own at the end of a word; later, and in fastBPE, the last letter carries it.
    separate = lines[0].split()[-1].startswith("0.1") if headed else len(lines[0].split()) != 3
    ranks: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines[headed:]):
        first, second = line.strip("\r ").split(" ")[:2]
        ranks.setdefault((first, second), number)

    def cut(word: str) -> list[str]:
        if len(word) == 1:
            return [word]
        parts = [*word, "</w>"] if separate else [*word[:-1], word[-1] + "</w>"]
        while known := [pair for pair in set(pairwise(parts)) if pair in ranks]:
            parts = joined(parts, min(known, key=ranks.__getitem__))
        ended = parts[:-1] if parts[-1] == "</w>" else [*parts[:-1], parts[-1].removesuffix("</w>")]
        return [*(part + "@@" for part in ended[:-1]), ended[-1]]

    return cut


def joined(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """The parts with every occurrence of a pair put together, from the left."""
    found: list[str] = []
    before = ""  # a part that may be the first of a pair
    for part in parts:
        if before == pair[0] and part == pair[1]:
            found[-1], before = before + part, ""
        else:
            found.append(part)
            before = part
    return found


def sentencepieces(about: Any) -> Tokenizer:
    """SentencePiece models with the model's own numbers of the pieces; a language goes first, last, or is written."""
    processors, numbers = {}, {}
    for side in ("source", "target"):
        file = side if side in about else "source"
        processors[side] = library("sentencepiece").SentencePieceProcessor()
        processors[side].LoadFromSerializedProto((FOLDER / f"{file}.spm").read_bytes())
        numbers[side] = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))
    source, languages, place = about["source"], about["languages"], about["place"]
    pieces = {i: piece for piece, i in numbers["target"].items()}

    def encode(text: str, language: str | None) -> list[int]:
        named = about["language"] if language is None else language
        token = [] if named is None else [among(named, languages)]
        if named is None and place == "written" and text.startswith(">>") and "<<" in text:
            code, text = text[2:].split("<<", 1)
            token = [languages.get(code, source["unknown"])]
        cut = processors["source"].encode(text, out_type=str)
        ids = [*(numbers["source"].get(piece, source["unknown"]) for piece in cut), source["end"]]
        return [*ids, *token] if place == "last" else [*token, *ids]

    def decode(ids: Sequence[int]) -> str:
        text: str = processors["target"].decode_pieces([pieces[i] for i in ids if i in pieces])
        return text.replace("\u2581", " ").strip()

    def language_id(language: str) -> int:
        token = among(language, languages)
        if place == "written":
            raise PackageError(f"write >>{language}<< at the start of the text instead: this decoder takes no language")
        return token

    return Tokenizer(encode, decode, source["unknown"], language_id)


def hugging_face(about: Any) -> Tokenizer:
    text = (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = library("tokenizers").Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    languages = {name.strip("_"): i for name, i in special.items() if LANGUAGE.fullmatch(name)}
    frame = tokenizer.encode("").ids
    places = [place for place in (0, -1) if frame and frame[place] in languages.values()]
    model = json.loads(text)["model"]
    unknown = model.get("unk_id") if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])

    def encode(line: str, language: str | None) -> list[int]:
        ids: list[int] = tokenizer.encode(line).ids
        if language is not None:
            token = among(language, languages)
            if not places:
                raise PackageError(
                    f"language {language!r} asked for, but this model's sources carry none; leave it out"
                )
            ids[places[0]] = token
        return ids

    return Tokenizer(
        encode,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        None if model.get("byte_fallback") else unknown,
        lambda language: among(language, languages),
    )


KINDS: dict[str, Callable[[Any], Tokenizer]] = {
    "symbols": symbols,
    "fairseq": fairseq,
    "bytes": byte_level,
    "sentencepiece": sentencepieces,
    "huggingface": hugging_face,
}
