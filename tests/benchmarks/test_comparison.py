"""Two results against each other, made up so that every verdict can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.bench_results import NOISY, STEADY, result, samples

from seq2engine.benchmarks.comparison import Comparison, compare_results, comparison_table
from seq2engine.benchmarks.result import BenchResult
from seq2engine.cli.main import main
from seq2engine.errors import UsageError


def scaled(factor: float) -> BenchResult:
    times = {name: samples(*[n * factor / 1e6 for n in taken.nanoseconds]) for name, taken in STEADY.items()}
    return result(times)


def verdicts(found: Comparison) -> set[str]:
    return {difference.verdict(found.slower) for difference in found.differences}


@pytest.mark.parametrize(
    ("factor", "verdict", "fine"),
    [
        (1.0, "no significant difference", True),
        (0.5, "faster", True),
        (1.04, "slower, within the limit", True),
        (1.06, "SLOWER", False),
    ],
)
def test_a_steady_change_is_seen_for_what_it_is(factor: float, verdict: str, fine: bool) -> None:
    found = compare_results(result(STEADY), scaled(factor))
    assert verdicts(found) == {verdict}
    assert len(found.differences) == 6  # two arms, three parts
    assert bool(found) is fine
    assert found.differences[0].ratio.value == pytest.approx(factor)


def test_noise_is_no_difference() -> None:
    assert verdicts(compare_results(result(NOISY), result(NOISY))) == {"no significant difference"}


def steady(milliseconds: float, rounds: int) -> BenchResult:
    return result({name: samples(*[milliseconds] * rounds) for name in STEADY})


@pytest.mark.parametrize("relative", [False, True])
def test_ten_times_as_long_fails_with_every_number_of_rounds_that_is_accepted(relative: bool) -> None:
    accepted = []
    for before, after in product((1, 2, 3, 4, 5, 6, 10, 40), repeat=2):
        fast, slow = steady(8, before), steady(80, after)
        if relative:  # the first arm stays as it is
            slow = result({"torch fp32": samples(*[8] * after), "onnxruntime fp32": samples(*[80] * after)})
        if 1 / math.comb(before + after, before) > 0.025:  # the chance that all of one run come out above the other
            message = (
                rf"{before} rounds before and {after} after are too few for any verdict at 95%; .*at least --rounds 4"
            )
            with pytest.raises(UsageError, match=message):
                compare_results(fast, slow, relative=relative)
        else:
            accepted.append((before, after))
            assert verdicts(compare_results(fast, slow, relative=relative)) == {"SLOWER"}
            assert verdicts(compare_results(fast, steady(8, after), relative=relative)) == {"no significant difference"}
    assert {(4, 4), (3, 5), (2, 10), (1, 40)} <= set(accepted)
    assert not {(3, 3), (2, 6), (1, 10)} & set(accepted)


@pytest.mark.parametrize("relative", [False, True])
def test_noise_is_rarely_slower(relative: bool) -> None:
    """Runs of the same arms, a tenth of jitter, a limit of 1: at most 2.5 % by chance, and three deviations more."""
    generator = np.random.default_rng(11)
    alarms = total = 0
    for _ in range(60):
        runs = [
            result({name: samples(*np.exp(0.1 * generator.standard_normal(6))) for name in STEADY}) for _ in range(2)
        ]
        found = compare_results(*runs, slower=1.0, relative=relative)
        judged = [one for one in found.differences if one.part == "step"]  # all parts of a made-up result are equal
        total += len(judged)
        alarms += sum(one.verdict(1.0) == "SLOWER" for one in judged)
    assert alarms <= total * 0.025 + 3 * (total * 0.025) ** 0.5


def test_a_limit_that_may_have_been_broken_is_named_so() -> None:
    before = result({name: samples(*[10] * 6) for name in STEADY})
    after = result({name: samples(10.1, 10.2, 10.3, 11, 12, 13) for name in STEADY})
    assert verdicts(compare_results(before, after)) == {"slower, perhaps beyond the limit"}


def test_relative_times_forgive_a_slow_day_but_not_a_slow_arm() -> None:
    slow_day = compare_results(result(STEADY), scaled(3), relative=True)
    assert [found.arm for found in slow_day.differences] == ["onnxruntime fp32"] * 3
    assert verdicts(slow_day) == {"no significant difference"}
    slow_arm = {**STEADY, "onnxruntime fp32": samples(*[8] * 8)}
    assert verdicts(compare_results(result(STEADY), result(slow_arm), relative=True)) == {"SLOWER"}


def test_other_models_and_machines_are_refused_by_default() -> None:
    mine = result(STEADY)
    other = dataclasses.replace(
        mine,
        model={**mine.model, "d_model": 7},
        environment=dataclasses.replace(mine.environment, cpu="Other", threads=9),
    )
    with pytest.raises(UsageError) as refused:
        compare_results(mine, other)
    assert str(refused.value) == (
        "cannot compare: the models differ in d_model; the processor differs, Some CPU before and Other after; "
        "the number of threads differs, 1 before and 9 after; to compare anyway: --anyway"
    )
    assert "warning: the models differ in d_model" in comparison_table(compare_results(mine, other, anyway=True))


def test_other_conditions_are_warnings() -> None:
    mine = result(STEADY)
    other = dataclasses.replace(
        mine,
        checkpoint_sha256="cd" * 32,
        environment=dataclasses.replace(mine.environment, governor="powersave", load_before=8.0),
    )
    assert compare_results(mine, other).warnings == (
        "the weights differ, though not their sizes",
        "the governor differs, None before and powersave after",
        "the machine was busy after (load 8.0 on 2 cores)",
    )


def test_what_one_result_alone_has_is_named() -> None:
    alone = result({"torch fp32": STEADY["torch fp32"]})
    assert "only before: 2x4x8x16, onnxruntime fp32, end to end" in compare_results(result(STEADY), alone).only
    stranger = result({"other fp32": STEADY["torch fp32"]})
    with pytest.raises(UsageError, match="no case and arm in common"):
        compare_results(result(STEADY), stranger)
    with pytest.raises(UsageError, match="--relative needs one first arm, found torch fp32 and onnxruntime fp32"):
        compare_results(result(STEADY), result({"onnxruntime fp32": STEADY["torch fp32"]}), relative=True)
    for slower in (0.5, float("nan"), float("inf")):  # with the last two nothing could ever fail
        with pytest.raises(UsageError, match=f"--slower {slower:g}, expected at least 1"):
            compare_results(result(STEADY), alone, slower=slower)


def test_the_command_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(result(STEADY).to_json())
    after.write_text(scaled(1.2).to_json())
    assert main(["bench", "compare", str(before), str(before)]) == 0
    assert "0 of 6 measurements are significantly slower than 1.05x" in capsys.readouterr().out
    assert main(["bench", "compare", str(before), str(after), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] is False
    assert values["differences"][0]["verdict"] == "SLOWER"
    assert main(["bench", "compare", str(before), str(after), "--slower", "1.3"]) == 0
    capsys.readouterr()
    for wrong, message in (
        ([str(before)], "compare takes two results"),
        ([str(before), str(tmp_path / "none.json")], "none.json, expected the JSON file of a benchmark"),
    ):
        assert main(["bench", "compare", *wrong]) == 2
        assert message in capsys.readouterr().err
