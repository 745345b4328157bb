"""Heat maps: colours in their order, pictures that are PNG files, labels that cannot break a page."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from seq2engine.common.heat_map import (
    LEVELS,
    cells_html,
    cut,
    heat_style,
    legend_html,
    levels_of,
    palette,
    picture_html,
    png_of,
)


def brightness(colour):
    """As people see it: green counts most."""
    return float(np.array([0.2126, 0.7152, 0.0722]) @ (np.asarray(colour) / 255) ** 2.2)


def pixels_of(png):
    """Reads the kind of PNG that is written here, with every checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert png[at + 8 + length : at + 12 + length] == struct.pack(">I", zlib.crc32(kind + data))
        chunks[kind], at = data, at + 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, depth, colours, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colours, rest) == (8, 3, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert (rows[:, 0] == 0).all()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[rows[:, 1:]]


def test_colours_only_get_brighter():
    steps = np.diff([brightness(colour) for colour in palette()])
    assert len(palette()) == LEVELS
    assert (steps > 0).all()


def test_levels_follow_the_root_and_bear_anything():
    assert levels_of(np.array([0, 0.25, 1])).tolist() == [0, 32, 63]
    assert levels_of(np.array([np.nan, -1, 2, np.inf])).tolist() == [0, 0, 63, 63]


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(0, LEVELS - 1)))
def test_pictures_hold_their_pixels(places):
    assert np.array_equal(pixels_of(png_of(places)), palette()[places])


def test_a_picture_and_a_table_show_the_same_colours():
    values = np.linspace(0, 1, 12).reshape(3, 4)
    table = cells_html(values, list("abc"), list("defg"), "looks at", 9, labelled=False)
    classes = np.array([int(k) for k in re.findall(r"<td class=k(\d+)", table)]).reshape(3, 4)
    style = dict(re.findall(r"\.k(\d+){background:#(\w+)}", heat_style()))
    picture = picture_html(values, "layer 1", 9)
    (data,) = re.findall(r"base64,([^\"]+)", picture)
    for pixel, level in zip(pixels_of(base64.b64decode(data)).reshape(-1, 3), classes.ravel(), strict=True):
        assert bytes(pixel).hex() == style[str(level)]
    assert 'width="36" height="27"' in picture


def test_every_cell_has_its_tooltip():
    page = cells_html(np.array([[0.834, 0.166]]), ["sh"], ["f", " "], "looks at", 20, labelled=True)
    assert re.findall(r"title='([^']*)'", page) == ['"sh" looks at "f": 0.83', '"sh" looks at "␣": 0.17']


@pytest.mark.parametrize("labelled", [True, False])
def test_labels_cannot_break_the_page(labelled):
    wild = ["<b>&'\"", "'><script>"]
    page = cells_html(np.eye(2), wild, wild, "looks at", 20, labelled)
    assert "<script" not in page
    assert "<b>" not in page
    assert len(re.findall(r"<td class=k\d+ title='[^'<>]*'>", page)) == 4
    assert page.count("<td") == 4
    assert '"<&' not in picture_html(np.eye(2), '"<&', 3)


def test_only_labels_wider_than_their_column_are_rotated():
    page = cells_html(np.eye(2), ["a", "b"], ["a", "longer"], "looks at", 20, labelled=True)
    assert "<th><span>a</span><th class=rotated><span>longer</span>" in page


def test_long_and_invisible_labels():
    assert cut("internationalisation") == "international…"
    assert (cut(""), cut(" a\n")) == ("∅", "␣a⏎")


def test_the_legend_runs_from_0_to_1():
    ticks = re.findall(r'left:([\d.]+)%">([\d.]+)<', legend_html())
    assert (ticks[0], ticks[-1]) == (("0.0", "0"), ("100.0", "1"))
    for place, number in ticks:
        assert float(place) == pytest.approx(100 * float(number) ** 0.5, abs=0.05)


def test_cells_shrink_on_a_narrow_screen_but_not_out_of_sight():
    html = cells_html(np.zeros((2, 12)), "ab", "abcdefghijkl", "looks at", cell=44, labelled=True)
    assert "--cell:max(14px,min(44px,(100vw - 8rem)/12))" in html
    assert "--cell:max(6px,min(6px," in cells_html(np.zeros((1, 1)), "a", "b", "looks at", cell=6, labelled=False)
