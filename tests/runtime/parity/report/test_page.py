"""Parity reports: the verdict comes first, everything that failed is named, the page needs nothing but itself."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser

import pytest

from seq2engine.common.page import macro_html
from seq2engine.runtime.numerics.budgets import DecodeResult, Divergence, Errors, TensorResult
from seq2engine.runtime.parity.levels.error_growth import ErrorGrowth
from seq2engine.runtime.parity.levels.result import ParityResult
from seq2engine.runtime.parity.report.page import EXAMPLES, PACKAGE, TEXT_EXAMPLES, parity_html, parity_table
from seq2engine.runtime.parity.report.plots import error_growth_plot, margin_histogram, ratio_map
from seq2engine.runtime.quality.intervals import Difference, Interval, Rate

VOID = {"meta", "br", "hr", "img", "link", "input"}


def tensor(level, name, ratio=1.0, step=None):
    errors = Errors(ratio * 1e-6, ratio * 1e-5)
    return TensorResult(level, name, step, 100, 1.0, 1e-7, Errors(1e-6, 1e-5), errors)


def divergence(source, verdict="bug", margin=0.5, kind="tokens"):
    return Divergence(source, 6, verdict, kind, margin, 0.1, (*range(10, 20), 71), (*range(10, 16), 99, 2))


def result_of(*tensors, divergences=(), failure=""):
    encoder = tensor("encoder", "encoder_states")
    steps = [tensor("steps", "logits", ratio, step) for ratio, step in ((1.1, None), (1.2, 3), (1.6, 4))]
    decodes = (DecodeResult("greedy", 40, tuple(divergences), failure), DecodeResult("beam 4", 40))
    return ParityResult("onnxruntime", "fp32", "static", 40, 32, (encoder, *tensors, *steps), decodes)


def drawn(macro, plot):
    return macro_html(PACKAGE, "plots.html", macro, plot)


GOOD = result_of()
BAD = result_of(tensor("steps", "self_v.1", 3e4), divergences=[divergence(3), divergence(5, "tie", 0.05)])


class Balance(HTMLParser):
    """Holds a page to closing what it opens, and collects its text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} " if self.open[-1:] in (["td"], ["th"]) else data


def text_of(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return parser.text


@pytest.mark.parametrize("render", [parity_table, lambda result: text_of(parity_html(result))], ids=["text", "html"])
class TestBoth:
    def test_a_pass_has_a_verdict_and_a_reason(self, render):
        text = render(GOOD)
        assert "passed" in text
        assert "FAIL" not in text
        assert "errors at most 1.60x PyTorch's own at the median" in text

    def test_a_failure_names_the_first_tensor(self, render):
        text = render(BAD)
        assert "steps: self_v.1: 3e+04x PyTorch's own error at the median, allowed 4x" in text
        assert text.index("self_v.1: 3e+04x") < text.index("encoder_states")  # the verdict is read before any table

    def test_of_the_single_steps_only_the_worst_is_listed(self, render):
        assert "logits, step 4" in render(GOOD)
        assert "logits, step 3" not in render(GOOD)

    def test_decodes_are_counted(self, render):
        words = render(BAD).split()
        head = words.index("search")
        assert words[head : head + 6] == ["search", "sources", "equal", "tie", "drift", "bug"]
        assert words[head + 6 : head + 10] == ["score", "difference", "in", "budgets"]
        assert words[head + 10 : head + 16] == ["greedy", "40", "38", "1", "0", "1"]

    def test_divergences_are_shown_largest_margin_first(self, render):
        text = render(BAD)
        assert "greedy, source 3, from step 6: margin 0.5 between the two tokens, budget 0.1" in text
        assert text.index("source 3, from") < text.index("source 5, from")

    def test_only_some_divergences_are_shown(self, render):
        many = result_of(divergences=[divergence(source) for source in range(20)])
        shown = TEXT_EXAMPLES if render is parity_table else EXAMPLES
        assert render(many).count("from step 6: margin") == shown

    def test_all_ways_to_diverge_have_words(self, render):
        text = render(result_of(divergences=[divergence(i, "tie", 0.0, p) for i, p in enumerate(("scores", "beams"))]))
        assert "between the scores of the two outputs" in text
        assert "between the prefixes that only one of the searches kept" in text

    def test_a_decode_that_stopped_is_reported(self, render):
        stopped = "onnxruntime stopped in batch 0: <nan>"
        assert f"greedy: {stopped}" in render(result_of(failure=stopped))

    def test_options_of_the_model_that_were_left_out_are_named(self, render):
        without = "PyTorch fp32, without the model's own sampling and coverage penalty"
        assert without in render(dataclasses.replace(GOOD, left_out=("sampling", "coverage penalty")))
        assert "without" not in render(GOOD)

    def test_numbers_that_are_none_are_words(self, render):
        broken = TensorResult("steps", "self_k.0", None, 4, 1.0, 1e-7, Errors(1e-6, 1e-5), Errors(math.inf, math.inf))
        assert "not finite" in render(result_of(broken))


def test_text_opens_with_the_verdict_and_marks_the_token():
    lines = parity_table(BAD).splitlines()
    assert lines[0].startswith("parity FAILED: onnxruntime fp32: steps: self_v.1")
    assert parity_table(GOOD).startswith("parity passed: onnxruntime fp32: ")
    assert "  PyTorch    ... 12 13 14 15 [16] 17 18 19 71" in lines
    assert "  candidate  ... 12 13 14 15 [99] 2" in lines


def test_text_columns_line_up():
    parts = parity_table(GOOD).split("\n\n")
    (table,) = [part.splitlines() for part in parts if part.startswith("search ")]
    assert len({len(line) for line in table}) == 1


def test_page_marks_the_token_in_both_rows():
    page = parity_html(BAD)
    assert '15 <mark class="bad">16</mark> <span class="after">17 18 19 71</span>' in page
    assert '15 <mark class="bad">99</mark> <span class="after">2</span>' in page
    assert '<mark class="warn">16</mark>' in page  # of the tie


def test_page_shows_the_verdict_before_everything_else():
    page = parity_html(BAD)
    assert page.index('<span class="badge bad">failed</span>') < page.index("<h2>")
    assert '<span class="badge bad">' not in parity_html(GOOD)


def test_page_needs_nothing_from_elsewhere():
    page = parity_html(BAD)
    assert not re.search(r"https?://|<script|<img|<link|@import|url\(", page)


def test_page_without_divergences_has_no_empty_section():
    assert "<h2>Divergent decodes</h2>" not in parity_html(GOOD)
    assert "<h2>Divergent decodes</h2>" in parity_html(BAD)


class TestPictures:
    GROWTH = ErrorGrowth(
        ("self_k.0", "self_v.0", "logits"),
        reference=((1e-6, 1e-6, 2e-6), (1e-6, 1e-6, 1e-6), (1e-6, 1e-6, 1e-6)),
        candidate=((1e-6, 2e-6, 8e-5), (0.0, 1e-6, 1e-6), (1e-6, math.inf, math.nan)),
        floor=1e-8,
    )

    def test_the_pictures_stand_between_the_verdict_and_the_levels(self):
        result = dataclasses.replace(BAD, error_growth=self.GROWTH)
        page = parity_html(result)
        heads = ("Error growth", "Error ratios", "Margins", "Divergent decodes", "4. Encoder", "5. Steps", "6. Decodes")
        places = [page.index('<p class="verdict">'), *(page.index(f"<h2>{head}") for head in heads)]
        assert places == sorted(places)

    def test_a_cell_of_the_map_tells_its_ratio(self):
        html = drawn("ratios", ratio_map(self.GROWTH))
        assert html.count("<td class=k") == 9
        assert "title='layer 0 keys, step 2: 40x'" in html
        assert "<td class=k63 title='layer 0 keys, step 2" in html  # beyond the scale: its end
        assert "<td class=k21 title='layer 0 keys, step 0: 1.00x'" in html

    def test_a_plot_leaves_out_what_is_not_finite_or_nothing(self):
        svg = drawn("error_growth", error_growth_plot(self.GROWTH, "onnxruntime fp32"))
        assert svg.count("<path") == 4
        assert "nan" not in svg
        assert "inf" not in svg

    def test_no_error_at_all_is_reported(self):
        nothing = ErrorGrowth(("self_k.0", "self_v.0", "logits"), ((0.0,),) * 3, ((0.0,),) * 3, 1e-8)
        assert "Neither side has any error" in drawn("error_growth", error_growth_plot(nothing, "torch fp32"))

    def test_margins_are_counted_by_verdict(self):
        found = [divergence(1, "tie", 0.01), divergence(2, "tie", 0.0), divergence(3, "bug", math.inf)]
        svg = drawn("margins", margin_histogram([*found, divergence(4, "drift", 0.05)]))
        for key in ("tie 2", "drift 1", "bug 1"):
            assert key in svg
        assert svg.count("<rect") == 4


def test_tokens_are_spelled_where_there_are_words():
    spelled = dataclasses.replace(BAD, words={16: "AH0", 99: "<b>"}, texts={3: "k n i g h t"})
    assert "[AH0]" in parity_table(spelled)
    page = parity_html(spelled)
    assert '<mark class="bad">&lt;b&gt;</mark>' in page
    assert "k n i g h t" in page


def test_rates_have_their_intervals():
    rate = Rate(
        "greedy", "PER", 9, Interval(0.06, 0.05, 0.07), Interval(0.07, 0.06, 0.08), Difference(0.01, -0.01, 0.02)
    )
    text = parity_table(dataclasses.replace(GOOD, rates=(rate,)))
    assert "6.00% [5.00, 7.00]  7.00% [6.00, 8.00]  +1.00% [-1.00, +2.00]" in text
