"""ByT5's tokenizer: the bytes of a text in UTF-8, three special tokens before them and sentinels after them; no file.

<pad> 0, </s> 1, <unk> 2, bytes 3 to 258, <extra_id_0> 259, <extra_id_1> 260, ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import typed_from_json

from .base import ABOUT, no_language
from .sentencepieces import SENTINEL

SPECIALS = ("<pad>", "</s>", "<unk>")
END, OFFSET = 1, len(SPECIALS)
FIRST_SENTINEL = OFFSET + 256


@dataclass(frozen=True)
class ByteTokenizer:
    sentinels: int = 125  # tokens <extra_id_0>, <extra_id_1>, ...

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in SENTINEL.split(text):
            number = int(part[10:-1]) if SENTINEL.fullmatch(part) else self.sentinels
            ids += [FIRST_SENTINEL + number] if number < self.sentinels else [OFFSET + b for b in part.encode()]
        return [*ids, END]

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        no_language(language)
        return self.encode(text)

    def encode_target(self, text: str) -> list[int]:
        return self.encode(text)

    def unknown_source(self, text: str) -> list[str]:
        return []  # every text has bytes

    def unknown_target(self, text: str) -> list[str]:
        return []

    def decode_target(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 are left out, as the library does."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="ignore")

    def bytes_of(self, token: int) -> bytes:
        if OFFSET <= token < FIRST_SENTINEL:
            return bytes([token - OFFSET])
        return self.name(token).encode() if token >= FIRST_SENTINEL else b""

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.name(token) for token in ids]

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.name(token) for token in ids]

    def name(self, token: int) -> str:
        """A letter where the byte is one, else its number in hexadecimal."""
        if token < OFFSET:
            return SPECIALS[token]
        if token >= FIRST_SENTINEL:
            return f"<extra_id_{token - FIRST_SENTINEL}>"
        byte = token - OFFSET
        return chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"

    def language_id(self, language: str) -> int:
        no_language(language)
        raise AssertionError("no_language raises")

    def write(self, folder: Path) -> None:
        about = {"kind": "bytes", "sentinels": self.sentinels}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class AboutFields:
    sentinels: int


def bytes_from_about(about: dict[str, Any]) -> ByteTokenizer:
    fields = typed_from_json(AboutFields, about)
    if fields.sentinels < 0:
        raise ValueError(f"sentinels {fields.sentinels}, expected a whole number from 0 on")
    return ByteTokenizer(fields.sentinels)
