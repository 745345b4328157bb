"""Token ids in place of text, for bundles without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seq2engine.errors import RequestError


class IdsTokenizer:
    """Takes token ids for text: lines such as `17 4 250`."""

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        if language is not None:
            self.language_id(language)
        words = text.split()
        if wrong := [word for word in words if not re.fullmatch("[0-9]{1,9}", word)]:
            raise RequestError(f"{wrong[0][:40]!r} is not a token id, expected a line such as: 17 4 250")
        return [int(word) for word in words]

    def encode_target(self, text: str) -> list[int]:
        return self.encode_source(text)

    def unknown_source(self, text: str) -> list[str]:
        return []

    def unknown_target(self, text: str) -> list[str]:
        return []

    def decode_target(self, ids: Sequence[int]) -> str:
        return " ".join(self.target_tokens(ids))

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return [str(token) for token in ids]

    def language_id(self, language: str) -> int:
        raise RequestError(
            f"language {language!r} asked for, but token ids have none; give text to a bundle that takes it"
        )
