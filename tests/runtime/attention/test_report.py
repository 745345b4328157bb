"""The attention page: everything is on it, it needs nothing but itself, and it stays small."""

from __future__ import annotations

import re
from html import unescape

import numpy as np
import pytest

from seq2engine.runtime.attention.report import attention_html, attention_text
from seq2engine.runtime.attention.view import AttentionView, LayerCheck

PASSED, FAILED = LayerCheck(1, 1.5e-7, 2e-7, 1e-7, 1e-8), LayerCheck(2, 2e-3, 2e-3, 1e-7, 1e-8)
CHECKS = (PASSED, LayerCheck(2, 2e-7, 2e-7, 1e-7, 1e-8))


def view_of(source, target, layers=2, heads=3, seed=0, checks=CHECKS):
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(source)), (layers, heads, len(target)))
    ids = tuple(range(len(source))), tuple(range(len(target)))
    text = " ".join(source), " ".join(target)
    return AttentionView(*text, tuple(source), tuple(target), *ids, "fp32", "static", 1, weights, checks)


VIEW = view_of(["c", "a", "f", "é", "</s>"], ["K", "AH", "</s>"])
PAGE = attention_html(VIEW)


def tooltips(page):
    return [unescape(text) for text in re.findall(r"<td class=k\d+ title='([^']*)'>", page)]


def test_maps_come_in_the_order_of_their_importance():
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", PAGE)
    heads = [f"layer {layer} head {head}" for layer in (1, 2) for head in (1, 2, 3)]
    assert captions == ["all layers and heads", "layer 1", "layer 2", *heads]


def test_every_cell_names_both_tokens():
    maps = [VIEW.weights.mean(axis=(0, 1)), *VIEW.weights.mean(axis=1), *VIEW.weights.reshape(-1, 3, 5)]
    expected = [
        f'"{token}" attends to "{given}": {values[row, column]:.2f}'
        for values in maps
        for row, token in enumerate(VIEW.target)
        for column, given in enumerate(VIEW.source)
    ]
    assert tooltips(PAGE) == expected


def test_the_title_is_source_and_output():
    assert "<title>c a f é &lt;/s&gt; → K AH &lt;/s&gt;</title>" in PAGE
    assert "one greedy decode on ONNX Runtime fp32, static cache: 2 layers of 3 heads, 5 source tokens" in PAGE
    long = attention_html(view_of(["word"] * 40, ["x"]))
    assert re.search(r"<h1>(.*) → x</h1>", long)[1].endswith("…")


def test_source_tokens_with_the_most_weight_are_listed():
    last = VIEW.weights[-1].mean(axis=0)
    rows = re.findall(r"<tr><td[^>]*><span[^>]*>(K|AH|&lt;/s&gt;)</span></td>(.*?)</tr>", PAGE)
    assert len(rows) == 3
    for (_, cells), weights in zip(rows, last, strict=True):
        places = [int(place) - 1 for place in re.findall(r'class="place">(\d+)<', cells)]
        shares = [float(share) for share in re.findall(r'class="share">([\d.]+)<', cells)]
        assert places == np.argsort(-weights)[:3].tolist()
        np.testing.assert_allclose(shares, weights[places], atol=0.0051)


@pytest.mark.parametrize("count", [1, 2])
def test_short_sources_have_short_lists(count):
    page = attention_html(view_of(["a", "b"][:count], ["c"]))
    assert ("<th>second</th>" in page) == (count == 2)
    assert "<th>third</th>" not in page


def test_the_verdict_comes_first_and_the_check_is_shown():
    assert PAGE.index('<span class="badge good">passed</span>') < PAGE.index("<h2>")
    cells = re.findall(r"<td class=number[^>]*>([^<]*)</td>", PAGE)
    assert [cells[i : i + 3] for i in range(len(cells))].count(["1.5e-07", "2e-07", "1e-07"]) == 1
    failed = attention_html(view_of(["a"], ["b"], checks=(PASSED, FAILED)))
    assert "layer 2: error 2e+04x that of PyTorch, allowed 16x" in failed
    assert failed.count('<span class="badge bad">failed</span>') == 2
    assert 'class="badge bad"' not in PAGE


def test_the_page_needs_nothing_but_itself():
    big = attention_html(view_of(["a"] * 64, ["b"] * 64, 6, 8, checks=(PASSED,) * 6))
    for page in (PAGE, big):
        assert not re.search(r"https?://|<script|<link|@import|url\(", page)
        assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', page))


@pytest.mark.parametrize("label", ["<b>", "&amp;", "a'b", 'a"b', "<script>alert(1)</script>", "'><td"])
def test_labels_are_text_and_nothing_else(label):
    page = attention_html(view_of([label, "x"], [label]))
    assert "<script" not in page
    assert "<b>" not in page
    assert f'"{label}" attends to "{label}": ' in tooltips(page)[0]
    assert page.count("<td class=k") == 2 * (1 + 2 + 6)


@pytest.mark.parametrize("label", ["a", "▁internationalisierung", "漢" * 30, "<&'" * 10], ids=len)
def test_a_long_decode_stays_below_two_megabytes(label):
    page = attention_html(view_of([label] * 64, [label] * 64, 6, 8, checks=(PASSED,) * 6))
    assert len(page.encode()) < 2_000_000
    assert page.count("<figure>") == 1 + 6 + 48
    assert page.count("<img") >= 48
    assert page.count("Maps without a tooltip on every cell are pictures") == 1
    assert "are pictures, to keep" not in PAGE


def test_the_text_form():
    lines = attention_text(VIEW).splitlines()
    assert lines[0] == "attention passed: ONNX Runtime and PyTorch attend to the same tokens; largest difference 2e-07"
    assert lines[1] == "c a f é </s> -> K AH </s>"
    assert lines[4].split() == ["1", "1.5e-07", "2e-07", "1e-07", "pass"]
    assert attention_text(view_of(["a"], ["b"], checks=(PASSED, FAILED))).startswith("attention FAILED: layer 2")
