"""Gates: thresholds from a file, one line for each that breaks, nothing unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seq2engine.errors import ConfigError
from seq2engine.runtime.numerics.budgets import DecodeResult, Divergence, Errors, TensorResult
from seq2engine.runtime.parity.gate import THRESHOLDS, broken_of, gate_from_file
from seq2engine.runtime.parity.levels.batch_invariance import InvarianceResult
from seq2engine.runtime.parity.levels.cost import Cost, SearchCost
from seq2engine.runtime.parity.levels.next_token import NextToken
from seq2engine.runtime.parity.levels.result import ParityResult
from seq2engine.runtime.quality.intervals import Difference, Interval, Rate


def result_of(verdict="tie", **more):
    tensor = TensorResult("steps", "logits", None, 9, 1.0, 1e-9, Errors(1e-6, 1e-5), Errors(2e-6, 5e-5))
    apart = Divergence(1, 2, verdict, "tokens", 0.01, 0.1, (5, 6), (5, 7))
    one = Interval(0.06, 0.05, 0.07)
    rates = tuple(
        Rate("greedy", metric, 10, one, one, Difference(0.01, 0.0, 0.02))
        for metric in ("PER", "WER", "lines wrong", "BLEU", "chrF")
    )
    return ParityResult(
        "onnxruntime",
        "fp16",
        "static",
        10,
        8,
        (tensor,),
        (DecodeResult("greedy", 10, (apart,)), DecodeResult("beam 4", 10)),
        invariance=(InvarianceResult("alone", 8, 8, 0.1, 0.5),),
        next_token={"onnxruntime fp16": NextToken(9, 0.001, 0.01, 0.99, 0.98)},
        rates=rates,
        cost=Cost("PyTorch fp32", (SearchCost("greedy", 10, 9, 0.02, 1.0, rates),)),
        **more,
    )


@pytest.fixture
def gate(tmp_path):
    def read(text, name="gate.toml"):
        (tmp_path / name).write_text(text)
        return gate_from_file(tmp_path / name)

    return read


def test_a_gate_that_holds_is_silent(gate):
    text = "max_median_ratio = 2.1\nmax_worst_ratio = 5.1\nmin_equal = 0.9\nmax_bug = 0\nmax_worse_per = 0.01\n"
    assert broken_of(gate(text), result_of()) == []


def test_every_broken_threshold_is_one_line_with_the_worst_place(gate):
    lines = broken_of(gate("min_equal = 0.95\nmax_tie = 0\nmax_median_ratio = 1.5\nmin_top1 = 0.9\n"), result_of())
    assert lines == [
        "min_equal: 0.9 (greedy), at least 0.95",
        "max_tie: 0.1 (greedy), at most 0",
        "max_median_ratio: 2 (logits), at most 1.5",
    ]


@pytest.mark.parametrize("name", THRESHOLDS)
def test_each_threshold_can_break_and_can_hold(name):
    """No value is at once at most -1 and at least -1 000 000."""
    upper = name.startswith("max_")
    assert len(broken_of({name: -1.0 if upper else 1e6}, result_of())) == 1
    assert broken_of({name: 1e6 if upper else -1.0}, result_of()) == []


def test_the_verdict_counts_by_default(gate):
    failed = result_of("bug")
    assert broken_of(gate(""), failed)[0].startswith("verdict: failed: decodes: greedy: 1 of 10 outputs differ")
    assert broken_of(gate("verdict = false\nmax_bug = 0.1\n"), failed) == []


def test_what_was_not_measured_does_not_hold(gate):
    bare = ParityResult("torch", "fp32", "static", 1, 1, (), ())
    assert "nothing was measured" in broken_of(gate("verdict = false\nmax_wer = 0.3\n"), bare)[0]


def test_json_is_read_too(gate):
    assert gate(json.dumps({"min_equal": 1, "verdict": True}), "gate.json") == {"min_equal": 1, "verdict": True}


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("min_eqal = 1\nmax_kl = 'x'\n", "g.toml", r"unknown threshold 'min_eqal'; max_kl is 'x', expected a number"),
        ("verdict = 1\n", "g.toml", "verdict is 1, expected true or false"),
        ("max_kl = true\n", "g.toml", "max_kl is True, expected a number"),
        ("= 1", "g.toml", "cannot be read"),
        ("{", "g.json", "cannot be read"),
        ("[1]", "g.json", "it is .1., expected an object"),
    ],
)
def test_what_cannot_be_a_gate_is_refused(gate, text, name, message):
    with pytest.raises(ConfigError, match=message):
        gate(text, name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        gate_from_file(tmp_path / "none.toml")


def test_the_documented_gate_is_one(gate):
    text = (Path(__file__).parents[3] / "docs" / "PARITY.md").read_text()
    found = gate(text.split("```toml\n")[1].split("```")[0])
    assert "max_worse_per" in found
    missing = [name for name in THRESHOLDS if name not in text]
    assert missing == []
