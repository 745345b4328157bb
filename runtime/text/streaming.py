"""The final part of a text that is still being decoded."""

from __future__ import annotations

from collections.abc import Sequence

from seq2engine.model.tokenizers.base import Coder

REPLACEMENT = "\ufffd"  # what a decoder returns for incomplete bytes of a character


def settled(text: str) -> str:
    """The beginning of a text that further tokens cannot change.

    Tokenizers append the text of a token to the text before it. What may still change is the end: bytes that become a
    character with the next token, and a space that only precedes another word.
    """
    return text.rstrip(f"{REPLACEMENT} ")


class TextStream:
    """Tokens in as they are decoded, pieces of text out; joined, they are the text of the whole output."""

    def __init__(self, tokenizer: Coder):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        """The text that this token makes final; often none."""
        self.tokens.append(token)
        return self.rest(settled(self.tokenizer.decode_target(self.tokens)))

    def finish(self, tokens: Sequence[int]) -> str:
        """What is left of the text, once all its tokens are known."""
        return self.rest(self.tokenizer.decode_target(tokens))

    def rest(self, whole: str) -> str:
        if len(whole) <= len(self.shown):
            return ""
        assert whole.startswith(self.shown), "text that was shown has changed"
        piece, self.shown = whole[len(self.shown) :], whole
        return piece
