"""Report pages: what a user wrote is text, not HTML, and nothing is fetched from anywhere."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.common.page import badge_html, heading_html, note_html, page_html, table_html

NASTY = "<script>alert(\"1 & 2\")</script> 'quoted'"
VOID = {"meta"}


class Reader(HTMLParser):
    """Reads a page: its tags with their attributes, and the text inside each tag. Every tag has to be closed."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (the innermost tag, its text)
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))

    def text_of(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]

    def numbers(self, tag: str) -> list[bool]:
        """Of every cell, whether it is set as a number."""
        return [attributes.get("class") == "number" for name, attributes in self.tags if name == tag]


def whole_page() -> str:
    blocks = [
        heading_html("Speed"),
        note_html("One core."),
        badge_html("passed", "good"),
        table_html(["backend", "ms"], [["torch", 1.5], ["tensorrt", 0.25]]),
    ]
    return page_html("Report", "of a run", blocks)


def test_a_page_holds_its_blocks_in_order() -> None:
    page = Reader(whole_page())
    assert page.text_of("title") == page.text_of("h1") == ["Report"]
    body = [text for tag, text in page.texts if tag not in ("title", "style")]
    assert body == [
        "Report",
        "of a run",
        "Speed",
        "One core.",
        "passed",
        "backend",
        "ms",
        "torch",
        "1.5",
        "tensorrt",
        "0.25",
    ]


def test_a_page_is_a_whole_document() -> None:
    text = whole_page()
    assert text.startswith("<!doctype html>\n")
    page = Reader(text)
    assert [tag for tag, _ in page.tags][:2] == ["html", "head"]
    assert ("meta", {"charset": "utf-8"}) in page.tags


def test_a_page_refers_to_nothing_outside_itself() -> None:
    text = whole_page()
    page = Reader(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
    assert {name for _, attributes in page.tags for name in attributes}.isdisjoint({"src", "href", "srcset", "style"})
    assert not any(word in text for word in ("://", "url(", "@import", "@font-face"))


@pytest.mark.parametrize(
    ("html", "tag"),
    [
        (page_html(NASTY, "", []), "title"),
        (page_html(NASTY, "", []), "h1"),
        (page_html("", NASTY, []), "p"),
        (heading_html(NASTY), "h2"),
        (note_html(NASTY), "p"),
        (badge_html(NASTY, "bad"), "span"),
        (table_html([NASTY], []), "th"),
        (table_html(["name"], [["a " + NASTY]]), "td"),
    ],
    ids=["title", "h1", "subtitle", "heading", "note", "badge", "table head", "table cell"],
)
def test_text_is_escaped(html: str, tag: str) -> None:
    assert "<script" not in html
    assert Reader(html).text_of(tag)[0].removeprefix("a ") == NASTY


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "<", ">", "&", '"', "'", "&lt;", "</td>", "<b>", "-->"])).map("".join))
def test_any_cell_reads_as_it_was_written(text: str) -> None:
    page = Reader(table_html(["name"], [["a" + text]]))
    assert page.text_of("td") == ["a" + text]
    assert [tag for tag, _ in page.tags].count("td") == 1


@pytest.mark.parametrize("value", [3, 0.25, -1.5, "+3%", ".5", "12.3 ms", "0.0"])
def test_numbers_are_set_right(value: object) -> None:
    page = Reader(table_html(["name", "value"], [["torch", value]]))
    assert page.numbers("th") == page.numbers("td") == [False, True]
    assert page.text_of("td") == ["torch", str(value)]


@pytest.mark.parametrize("value", ["torch", None, True, "n/a", "nan", "sm89"])
def test_words_are_set_left(value: object) -> None:
    page = Reader(table_html(["name", "value"], [[1, value]]))
    assert page.numbers("th") == page.numbers("td") == [True, False]


def test_the_style_knows_numbers_and_badges() -> None:
    style = Reader(whole_page()).text_of("style")[0]
    assert "td.number, th.number { text-align: right }" in style
    for kind in ("good", "bad", "warn"):
        assert f".badge.{kind} {{ background: var(--{kind}) }}" in style
        assert ("span", {"class": f"badge {kind}"}) in Reader(badge_html("x", kind)).tags


def test_a_cell_may_be_html_of_ours() -> None:
    page = Reader(table_html(["verdict"], [[badge_html("failed", "bad")]]))
    assert page.text_of("span") == ["failed"]
    assert page.numbers("td") == [False]


def test_a_table_may_be_empty_and_may_come_from_a_generator() -> None:
    assert Reader(table_html(["name", "ms"], [])).numbers("th") == [False, False]
    page = Reader(table_html(["name", "ms"], (row for row in [("torch", 1), ("trt", 2)])))
    assert page.text_of("td") == ["torch", "1", "trt", "2"]
    assert page.numbers("th") == [False, True]
    assert ("div", {"class": "scroll"}) in page.tags  # wide tables scroll, the page does not


def test_a_column_without_any_value_is_left_out() -> None:
    page = Reader(table_html(["name", "ms", "note"], [["torch", "", ""], ["trt", "", 7]]))
    assert page.text_of("th") == ["name", "note"]
    assert page.text_of("td") == ["torch", "trt", "7"]


def test_many_columns_are_named_in_every_cell_for_a_narrow_screen() -> None:
    names = ["arm", "a", "b", "c", NASTY]
    page = Reader(table_html(names, [["torch", 1, 2, 3, "reached"], ["trt", 4, 5, 6, 7]]))
    assert [attributes["data-name"] for tag, attributes in page.tags if tag == "td"] == names * 2
    assert ("table", {"class": "wide"}) in page.tags
    few = Reader(table_html(names[:3], [["torch", 1, 2]]))
    assert ("table", {}) in few.tags
    assert "data-name" not in str(few.tags)
    long = Reader(table_html(names[:2], [["torch", "many words " * 20]]))
    assert ("table", {"class": "wide"}) in long.tags


@pytest.mark.parametrize("column", [["none", "1"], ["", "2", "none", "3"]])
def test_a_column_that_begins_with_a_word_may_hold_numbers(column: list[str]) -> None:
    page = Reader(table_html(["first difference"], [[cell] for cell in column]))
    assert page.numbers("th") == [True]
    assert page.numbers("td") == [True] * len(column)


def test_a_word_in_a_column_of_numbers_is_set_right() -> None:
    assert Reader(table_html(["share"], [["8%"], ["reached"], [""]])).numbers("td") == [True] * 3


def test_a_token_of_html_is_text():
    """Special tokens such as </s> must show in a report, not vanish in it."""
    assert "<td>&lt;unk&gt;</td>" in table_html(("token",), [("<unk>",)])
