"""The measured tables of README and docs/BENCHMARK.md agree with the committed results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.bench_results import STEADY, result, samples

from seq2engine.benchmarks.report.readme import MEASURED, PAGES, readme_text, with_tables
from seq2engine.benchmarks.result import Arm


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_tables_of_the_committed_results(page: Path) -> None:
    text = page.read_text()
    assert MEASURED.search(text)
    assert text == with_tables(text), "run: make readme"


def test_ours_stands_against_the_best_peer_of_its_precision(tmp_path: Path) -> None:
    times = {
        "onnxruntime fp32": STEADY["onnxruntime fp32"],
        "slow fp32": samples(*[12] * 8),
        "quick fp32": samples(*[6] * 8),
        "quickest int8": samples(*[1] * 8),
    }
    found = result(times, equal={"quickest int8": 1})
    arms = {name: dataclasses.replace(arm, peer=not name.startswith("onnx")) for name, arm in found.arms.items()}
    begin, end = "<!-- measured: result.json, some weights -->\n", "<!-- end of measured -->\n"
    (tmp_path / "result.json").write_text(dataclasses.replace(found, arms=arms, failed={"gone": "no reason"}).to_json())
    text = with_tables(f"before\n{begin}old\n{end}after\n", tmp_path)
    assert "| batch 2, beam 4, source 8, output 16 | 4.00 ms | quick fp32, 6.00 ms | 1.50 (1.50 to 1.50) |\n" in text
    assert "differ from onnxruntime fp32's somewhere: quickest int8." in text
    assert "gone did not run: no reason." in text
    assert text.startswith(f"before\n{begin}|")
    assert text.endswith(f"{end}after\n")


def test_speculative_decoding_gets_a_sentence_where_one_row_is_decoded() -> None:
    times = {
        "onnxruntime fp32": STEADY["onnxruntime fp32"],
        "quick fp32": samples(*[6] * 8),
        "ours drafted": samples(*[2] * 8),
    }
    found = result(times)
    arms = dict(found.arms)
    arms["quick fp32"] = dataclasses.replace(arms["quick fp32"], peer=True)
    arms["ours drafted"] = dataclasses.replace(
        arms["ours drafted"], backend="onnxruntime", precision="fp32", draft="w8a8"
    )
    (case,) = found.cases
    single = dataclasses.replace(case, case=dataclasses.replace(case.case, batch=1, beam=1))
    wide = dataclasses.replace(case, arms={name: arm for name, arm in case.arms.items() if name != "ours drafted"})
    text = readme_text(dataclasses.replace(found, arms=arms, cases=(single, wide)), "some weights")
    assert text.count("fp32, speculative decoding with a draft in w8a8") == 1
    assert "beam 1, source 8, output 16: 2.00 ms; quick fp32, 6.00 ms; 3.00 (3.00 to 3.00) times as fast.\n" in text
    assert text.count("| 4.00 ms | quick fp32, 6.00 ms |") == 2


def test_a_case_without_a_peer_is_marked() -> None:
    alone = result({"onnxruntime fp32": STEADY["onnxruntime fp32"]})
    assert {type(arm) for arm in alone.arms.values()} == {Arm}
    assert "| 4.00 ms | none ran |  |" in readme_text(alone, "some weights")
