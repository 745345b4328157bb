"""Which lines of a catalogue are plain sentences, and that their order depends on nothing but them."""

from __future__ import annotations

import struct

import pytest

from seq2engine.benchmarks.real.sentences import is_plain, pairs_from_catalogue


def catalogue(messages: dict[str, str]) -> bytes:
    """A .mo file: sorted originals, translations, both as length and offset, then the bytes."""
    rows = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **messages}.items())
    texts = [text.encode() for column in zip(*rows, strict=True) for text in column]
    place = 28 + 8 * len(texts)
    table = b""
    for text in texts:
        table += struct.pack("<II", len(text), place)
        place += len(text) + 1
    head = struct.pack("<7I", 0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    return head + table + b"".join(text + b"\0" for text in texts)


def test_plain_sentences_are_taken_once_in_the_order_of_their_hashes() -> None:
    messages = {
        "The order was deleted.": "该订单已被成功删除。",
        "The order has been deleted.": "该订单已被成功删除。",
        "You have %d new orders.": "您有%d个新的订单等待。",
        "Please try it again later.": "请稍后再重新试一次。",
    }
    pairs = pairs_from_catalogue(catalogue(messages))
    assert dict(pairs) == {
        "该订单已被成功删除。": "The order has been deleted.",
        "请稍后再重新试一次。": "Please try it again later.",
    }
    assert pairs == pairs_from_catalogue(catalogue(dict(reversed(messages.items()))))


@pytest.mark.parametrize(
    ("chinese", "english"),
    [
        ("删除。", "Delete all of it."),  # too short
        ("该订单已被成功删除。", "Order deleted"),  # no sentence
        ("请看 https://pretix.eu 的说明。", "See the site for more."),
        ("Please use ABC and DEF 吧。", "Please use ABC and DEF."),  # hardly Chinese
    ],
)
def test_what_is_no_plain_sentence_is_left_out(chinese: str, english: str) -> None:
    assert not is_plain(chinese, english)
