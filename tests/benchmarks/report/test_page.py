"""Reports of made-up results, so that every verdict can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from support.bench_results import CASE, NOISY, SPLIT, STEADY, result, samples

from seq2engine.benchmarks.report.page import bench_html, bench_json, bench_table
from seq2engine.benchmarks.report.tables import number
from seq2engine.benchmarks.result import (
    PARTS,
    CaseResult,
    result_from_dict,
    winner,
)
from seq2engine.errors import ConfigError


def test_json_round_trips():
    for found in (result(STEADY), result(NOISY, equal={"onnxruntime fp32": 1}, load_before=None)):
        assert result_from_dict(json.loads(bench_json(found))) == found


def test_json_has_what_the_samples_come_to():
    values = json.loads(bench_json(result(STEADY)))
    arm = values["cases"][0]["arms"]["onnxruntime fp32"]["parts"]["end_to_end"]
    assert arm["samples"]["nanoseconds"] == [4_000_000] * 8
    assert arm["summary"] == {
        "median_ms": 4.0,
        "p10_ms": 4.0,
        "p90_ms": 4.0,
        "p99_ms": 4.0,
        "spread": 0.0,
        "tokens_per_second": 8000.0,
        "verdict": "faster",
        "of_ceiling": None,
    }


@pytest.mark.parametrize("other", [None, 0, 99])
def test_a_result_of_another_format_is_refused(other):
    values = {**json.loads(bench_json(result(STEADY))), "format": other}
    with pytest.raises(ConfigError, match=rf"format {other}, this version reads 4; .* seq2engine bench"):
        result_from_dict(values)


def test_the_winner_is_measured_against_the_next_best():
    three = {**STEADY, "onnxruntime fp16": samples(*[2] * 8)}
    best, second, ratio = winner(result(three).cases[0], "step")
    assert (best, second, ratio.value) == ("onnxruntime fp16", "onnxruntime fp32", 2.0)
    assert winner(result({"torch fp32": STEADY["torch fp32"]}).cases[0], "step") is None


def test_table():
    text = bench_table(result(STEADY))
    row = next(line for line in text.splitlines() if line.startswith("end to end    onnxruntime"))
    assert re.sub(" +", " ", row) == (
        "end to end onnxruntime fp32 4.00 4.00 4.00 0% 8,000 2.00x (2.00 to 2.00) faster equal"
    )
    assert "end to end: onnxruntime fp32 is fastest, 2.00x (2.00 to 2.00) over torch fp32\n" in text
    assert "pair: batch 2, beam 4, source 8, output 16" in text
    assert "Some CPU, 1 of 2 cores, 8 rounds, 2026-01-02 03:04:05 UTC" in text
    assert "busy" not in text


def test_quality_stands_beside_speed():
    for text in (bench_table(result(STEADY)), bench_html(result(STEADY))):
        for rate in ("25.00%", "50.00%", "12.50%", "37.50%"):
            assert rate in text
    without = dataclasses.replace(result(STEADY), quality={})
    assert "PER" not in bench_table(without) + bench_html(without)


def test_few_rounds_are_never_a_contradiction():
    """Ten times as fast in five rounds is sure; in three it is not, and no interval decides."""
    five = result({"torch fp32": samples(*[40] * 5), "onnxruntime fp32": samples(*[4] * 5)})
    assert "onnxruntime fp32 is fastest, 10.00x (10.00 to 10.00) over torch fp32" in bench_table(five)
    three = result({"torch fp32": samples(*[40] * 3), "onnxruntime fp32": samples(*[4] * 3)})
    text = bench_table(three)
    assert "onnxruntime fp32 took the least time, but 3 rounds are too few to be sure" in text
    assert "10.00x (3 rounds, an interval needs 4)" in text
    assert result_from_dict(json.loads(bench_json(three))) == three


def heat_cells(page):
    return re.findall(
        r'<td class="number" data-name="pair" style="([^"]*)">(.*?)</td>', page.partition("How to read")[0]
    )


@pytest.mark.parametrize("rounds", [3, 8])
def test_the_heat_map_bolds_the_fastest_alone(rounds):
    page = bench_html(result({"torch fp32": samples(*[40] * rounds), "onnxruntime fp32": samples(*[4] * rounds)}))
    (slow, slow_text), (fast, fast_text) = heat_cells(page)
    assert "font-weight:700" in fast
    assert "font-weight" not in slow
    assert ("background" in slow) == (rounds == 8)  # how much slower is painted where it is sure
    assert ("\u2248" in slow_text) == (rounds == 3)
    assert "\u2248" not in fast_text


def test_an_interrupted_run_is_marked():
    found = dataclasses.replace(result(STEADY), interrupted="interrupted after 1 of 4 cases")
    assert "interrupted after 1 of 4 cases; scenarios, error rates and memory are missing" in bench_table(found)
    assert '<span class="badge bad">interrupted</span> interrupted after 1 of 4 cases' in bench_html(found)
    assert result_from_dict(json.loads(bench_json(found))) == found
    assert "interrupted" not in bench_html(result(STEADY))


def test_the_page_has_model_machine_and_date():
    page = bench_html(result(STEADY)).partition("Fastest arm by case")[0]
    for message in ("run7", "2+2 layers", "abababababab", "2026-01-02 03:04:05 UTC", "torch 2.13.0", "Some CPU"):
        assert message in page


def test_noise_is_called_unsure():
    assert "unsure whether" in bench_table(result(NOISY))
    page = bench_html(result(NOISY))
    assert '<span class="badge warn">unsure</span>' in page
    assert "is fastest" not in page


def test_outputs_that_differ_are_shown_everywhere():
    found = result(STEADY, equal={"onnxruntime fp32": 1})
    text, page = bench_table(found), bench_html(found)
    assert "DIFFER: 1 and 1 of 2 equal" in text
    assert "over torch fp32, but its outputs differ" in text
    assert '<span class="badge bad">1 of 2 equal</span>' in page
    assert '<span class="badge bad">outputs differ</span> onnxruntime fp32' in page
    assert "outputs equal" not in page


@pytest.mark.parametrize("counts", [{"equal": 1}, {"equal_timed": 1}])
def test_one_differing_decode_of_the_two_is_enough(counts):
    (case,) = result(STEADY).cases
    arms = {**case.arms, "onnxruntime fp32": dataclasses.replace(case.arms["onnxruntime fp32"], **counts)}
    assert not CaseResult(CASE, arms).same("onnxruntime fp32")
    assert CaseResult(CASE, arms).same("torch fp32")


def test_a_busy_machine_is_named():
    found = result(STEADY, load_before=3.5)
    assert "the machine was busy when the run began (load 3.5 on 2 cores)" in bench_table(found)
    assert "busy machine" in bench_html(found)


def test_one_arm_has_no_winner():
    found = result({"torch fp32": STEADY["torch fp32"]})
    assert "there is only one arm" in bench_table(found)
    assert "there is only one arm" in bench_html(found)


def test_the_page_needs_nothing_else():
    page = bench_html(result(STEADY))
    assert not re.search(r"https?:|//|<script|<link|<img|<iframe|@import|url\(|\ssrc=", page)
    assert page.count("<svg") == len(PARTS) + 1  # and the split
    legend = re.findall(r"</i> (\w+)</span>", page)  # words of the page, which a narrow one breaks into lines
    assert legend == list(SPLIT)
    assert page.count("<") == page.count(">")


def test_bars_and_whiskers_are_drawn_to_scale():
    times = {"torch fp32": samples(*[10] * 8), "onnxruntime fp32": samples(*range(1, 9))}
    page = bench_html(result(times))
    full = 10 * 1.02
    widths = [float(value) for value in re.findall(r'<rect [^>]*width="([\d.]+)%"', page)]
    assert widths[:2] == pytest.approx([100 * 10 / full, 100 * 4.5 / full], abs=0.01)
    whisker = re.findall(r'<line x1="([\d.]+)%" x2="([\d.]+)%"', page)[3]  # after the first arm's whisker and its ends
    assert [float(end) for end in whisker] == pytest.approx([100 * 1.7 / full, 100 * 7.3 / full], abs=0.01)


def test_the_search_has_a_figure_of_its_own():
    found = result(STEADY)
    row = next(line for line in bench_table(found).splitlines() if line.startswith("onnxruntime fp32"))
    assert re.sub(" +", " ", row) == (
        "onnxruntime fp32 0.500 ms, 12.5% 2.00 ms, 50.0% 1.00 ms, 25.0% 0.500 ms, 12.5% 0 ms, 0.0% 1 20 24 1.50x"
    )
    page = bench_html(found)
    assert "onnxruntime fp32, search 25.0%" in page
    widths = [float(value) for value in re.findall(r'<rect x="[\d.]+%" y="\d+" width="([\d.]+)%"', page)]
    assert widths == [12.5, 50, 25, 12.5, 0, 6.25, 25, 12.5, 6.25, 0]  # the second arm takes half the time
    split = json.loads(bench_json(found))["cases"][0]["arms"]["torch fp32"]["split"]
    assert {piece: values["share"] for piece, values in split.items()} == {p: n / 8 for p, n in SPLIT.items()}


def test_cases_that_differ_in_length_make_a_curve():
    short, long = result(STEADY), result({name: samples(*[20] * 8) for name in STEADY})
    assert short.curves() == ()
    (first,), (second,) = short.cases, long.cases
    longer = dataclasses.replace(second, case=dataclasses.replace(CASE, name="longer", target=64))
    found = dataclasses.replace(short, cases=(longer, first))
    torch, onnxruntime = found.curves()
    assert torch.costs == {16: 8 / 32, 64: 20 / 32}  # the tokens are those of the measure
    assert (torch.axis, torch.others) == ("target", {"batch": 2, "beam": 4, "source": 8})
    assert onnxruntime.growth == pytest.approx(5)
    assert "16: 0.250, 64: 0.625" in bench_table(found)
    page = bench_html(found)
    assert page.count("<polyline") == 2
    assert re.findall(r'<text [^>]*text-anchor="(end|middle)">0</text>', page) == [
        "end",
        "middle",
    ]  # both axes begin there
    assert result_from_dict(json.loads(bench_json(found))) == found
    curve = json.loads(bench_json(found))["curves"][1]
    assert (curve["arm"], curve["costs"]) == ("onnxruntime fp32", {"16": 4 / 32, "64": 20 / 32})


def test_names_are_escaped():
    found = dataclasses.replace(result(STEADY), bundle="out/<b>&co")
    assert "Benchmark of &lt;b&gt;&amp;co" in bench_html(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0001234, "0.000123"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.5, "1234"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text
