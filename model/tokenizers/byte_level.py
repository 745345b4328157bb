"""Byte-level BPE of the GPT-2 kind as a tokenizer.json, from vocab.json and merges.txt or from a .tiktoken file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

# Bytes that stand for themselves in such a vocabulary; all others get letters from U+0100 on, in their order.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
LONGEST_TOKEN = 1024  # bytes; finding the merges of a token takes the square of them


def tokenizer_json(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], added: Iterable[tuple[int, str, bool]]
) -> str:
    """The text of a tokenizer.json. `added` are id, text and whether it is special, for tokens beside the BPE's own."""
    whole = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True, "type": "ByteLevel"}
    tokens: list[dict[str, Any]] = [
        {
            "id": i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for i, content, special in sorted(added)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": tokens,
            "normalizer": None,
            "pre_tokenizer": whole,
            "post_processor": whole,
            "decoder": whole,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": dict(vocabulary),
                "merges": [list(pair) for pair in merges],
            },
        },
        ensure_ascii=False,
    )


def merges_from_file(path: Path) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, the first merged first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path.name} has the line {' '.join(wrong[0])!r}, expected two tokens")
    return [(first, second) for first, second in pairs]


def letters_of_bytes() -> list[str]:
    """The letter of each byte in a byte-level vocabulary."""
    others = iter(range(256, 512))
    return [chr(byte) if byte in PRINTABLE else chr(next(others)) for byte in range(256)]


def vocabulary_from_tiktoken(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a .tiktoken file: a line for each token, its bytes in base 64 and its rank."""
    ranks: dict[bytes, int] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        if line.strip():
            encoded, number = line.split()
            token = base64.b64decode(encoded)
            if len(token) > LONGEST_TOKEN:
                raise ValueError(f"it has a token of {len(token)} bytes, expected at most {LONGEST_TOKEN}")
            ranks[token] = int(number)
    letters = letters_of_bytes()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1 and len(parts := parts_before(token, rank, ranks)) == 2:
            merges.append((text(parts[0]), text(parts[1])))
    return {text(token): rank for token, rank in ranks.items()}, merges


def parts_before(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two parts that a token is merged from: its bytes after all merges of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        found = [ranks.get(first + second, rank) for first, second in pairwise(parts)]
        least = min(found)
        if least >= rank:
            break
        place = found.index(least)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
