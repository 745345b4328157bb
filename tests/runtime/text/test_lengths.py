"""How long requests are: by the tokenizer, by a ratio, and by decoding some of them."""

from __future__ import annotations

import pytest

from seq2engine.errors import RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.tokenizers.ids import IdsTokenizer
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.lengths import evenly, lengths_by_decoding, lengths_by_ratio, sources_of_lines
from seq2engine.runtime.text.lines import Line


def test_sources_are_what_the_tokenizer_makes_of_lines_that_are_not_empty():
    lines = [Line(1, "5 6 7"), Line(2, "  "), Line(3, "9")]
    assert sources_of_lines(IdsTokenizer(), lines) == [[5, 6, 7], [9]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (Line(4, "five"), "line 4: 'five' is not a token id"),
        (Line(2, error="byte 1 is not UTF-8"), "line 2: byte 1 is"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, message):
    with pytest.raises(RequestError, match=message):
        sources_of_lines(IdsTokenizer(), [line])


def test_a_ratio_is_rounded_up_and_ends_at_the_models_most():
    sources = [[5] * length for length in (1, 5, 10, 40)]
    assert lengths_by_ratio(sources, 1.1, most=20) == [(1, 2), (5, 6), (10, 11), (40, 20)]
    assert lengths_by_ratio(sources[:1], 0.01, most=20) == [(1, 1)]


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_is_none(ratio):
    with pytest.raises(RequestError, match=r"expected output tokens per source token such as 1\.2"):
        lengths_by_ratio([[5]], ratio, most=20)


@pytest.mark.parametrize(("number", "count"), [(3, 5), (5, 5), (10, 4), (1000, 7)])
def test_a_sample_is_spread_and_has_the_last(number, count):
    chosen = evenly(range(number), count)
    assert len(set(chosen)) == min(number, count)
    assert max(chosen) == number - 1
    steps = {b - a for a, b in zip(sorted(chosen), sorted(chosen)[1:], strict=False)}
    assert max(steps) - min(steps) <= 1


def test_some_are_decoded_and_the_others_get_the_largest_ratio(tmp_path):
    bundle = onnx_from_model(random_model("tiny", seed=12), tmp_path / "bundle", ("fp32",))
    sources = [[3 + i] * (1 + i) for i in range(40)] + [[5] * 99]  # the last is longer than the model takes
    reports = []
    with open_session(bundle) as session:
        options = SearchOptions(max_length=30)
        found = lengths_by_decoding(session, sources, options, 8, lambda *what: reports.append(what))
        decoded = [len(best.tokens) for best, *_ in generate(session, sources[:40], options)]
        with pytest.raises(RequestError, match="0 lines to decode, expected at least 1"):
            lengths_by_decoding(session, sources, options, 0)
    chosen = evenly(range(40), 8)
    ratio = max(decoded[i] / len(sources[i]) for i in chosen)
    assert [s for s, _ in found] == [len(source) for source in sources]
    assert {i: found[i][1] for i in chosen} == {i: decoded[i] for i in chosen}
    others = [i for i in range(41) if i not in chosen]
    assert [found[i] for i in others] == lengths_by_ratio([sources[i] for i in others], ratio, 64)
    assert reports[-1] == ("plan: decode", 1.0)
