"""Which part of a text that is still being decoded is final."""

from __future__ import annotations

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


def settled(text: str) -> str:
    """The beginning of a text that more tokens cannot change.

    Tokenizers put the text of a token behind the text before it. What may still change is the end: bytes that become a
    character with the next token, and a space that only stands before another word.
    """
    return text.rstrip(f"{REPLACEMENT} ")
