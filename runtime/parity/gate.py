"""Gates for CI: thresholds from a file that a parity result must meet.

verdict = true            # the parity verdict must be a pass (the default)
max_median_ratio = 2.0    # of any tensor's error to PyTorch's
min_equal = 0.999         # share of sources with the same tokens, in every search
max_worse_per = 0.001     # how much larger the error rate may be than the baseline's
min_fp32_equal = 0.9      # the same against fp32: the cost of a precision
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object, read_text
from seq2engine.errors import ConfigError

from .levels.cost import SearchCost
from .levels.result import ParityResult

Gate = dict[str, float | bool]
Measured = Iterator[tuple[str, float]]  # where, value


def verdict_share(verdict: str) -> Callable[[ParityResult], Measured]:
    """The share of sources that diverged with this verdict, by search."""

    def measured(result: ParityResult) -> Measured:
        for decode in result.decodes:
            yield decode.search, sum(d.verdict == verdict for d in decode.divergences) / decode.sources

    return measured


def rate_of(metric: str, which: str) -> Callable[[ParityResult], Measured]:
    """One metric of the candidate, or how much worse it is than the baseline's."""

    def measured(result: ParityResult) -> Measured:
        for rate in result.rates:
            if rate.metric == metric:
                yield rate.search, rate.worse_by if which == "worse" else rate.candidate.value

    return measured


def fp32_rate(metric: str) -> Callable[[ParityResult], Measured]:
    """How much worse a metric of the candidate is than that of fp32."""

    def measured(result: ParityResult) -> Measured:
        for part in costs(result):
            yield from ((rate.search, rate.worse_by) for rate in part.rates if rate.metric == metric)

    return measured


def costs(result: ParityResult) -> tuple[SearchCost, ...]:
    return () if result.cost is None else result.cost.searches


def next_token(name: str) -> Callable[[ParityResult], Measured]:
    def measured(result: ParityResult) -> Measured:
        if result.candidate in result.next_token:
            yield result.candidate, getattr(result.next_token[result.candidate], name)

    return measured


# The values that a threshold bounds: max_ from above, min_ from below.
THRESHOLDS: dict[str, Callable[[ParityResult], Measured]] = {
    "max_median_ratio": lambda result: ((tensor.name, tensor.median_ratio) for tensor in result.tensors),
    "max_worst_ratio": lambda result: ((tensor.name, tensor.worst_ratio) for tensor in result.tensors),
    "min_equal": lambda result: ((decode.search, decode.equal / decode.sources) for decode in result.decodes),
    "max_tie": verdict_share("tie"),
    "max_drift": verdict_share("drift"),
    "max_bug": verdict_share("bug"),
    "max_kl": next_token("kl"),
    "min_top1": next_token("top1"),
    "min_top5": next_token("top5"),
    "max_moved": lambda result: ((arranged.arrangement, arranged.budgets) for arranged in result.invariance),
    "max_per": rate_of("PER", "own"),
    "max_wer": rate_of("WER", "own"),
    "max_lines_wrong": rate_of("lines wrong", "own"),
    "min_bleu": rate_of("BLEU", "own"),
    "min_chrf": rate_of("chrF", "own"),
    "max_worse_per": rate_of("PER", "worse"),
    "max_worse_wer": rate_of("WER", "worse"),
    "max_worse_lines_wrong": rate_of("lines wrong", "worse"),
    "max_worse_bleu": rate_of("BLEU", "worse"),
    "max_worse_chrf": rate_of("chrF", "worse"),
    "min_fp32_equal": lambda result: ((part.search, part.equal / part.sources) for part in costs(result)),
    "max_fp32_edit_rate": lambda result: ((part.search, part.edit_rate) for part in costs(result)),
    "max_fp32_worse_per": fp32_rate("PER"),
    "max_fp32_worse_wer": fp32_rate("WER"),
    "max_fp32_worse_lines_wrong": fp32_rate("lines wrong"),
    "max_fp32_worse_bleu": fp32_rate("BLEU"),
    "max_fp32_worse_chrf": fp32_rate("chrF"),
}


def gate_from_file(path: Path) -> Gate:
    """Reads TOML, or JSON if the name ends so; all problems are raised in one message."""
    values = parsed(path)
    problems = [f"unknown threshold {name!r}" for name in values if name != "verdict" and name not in THRESHOLDS]
    for name, value in values.items():
        if name == "verdict" and not isinstance(value, bool):
            problems.append(f"verdict is {value!r}, expected true or false")
        if name in THRESHOLDS and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{name} is {value!r}, expected a number")
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}; there are verdict, {', '.join(THRESHOLDS)}")
    return values


def parsed(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            return read_object(path)
        values: dict[str, Any] = import_module("tomllib").loads(read_text(path))  # part of Python from 3.11 on
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a file of thresholds") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} is read as TOML, which needs Python 3.11; write it as JSON, named *.json") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); expected lines such as: min_equal = 0.999") from error
    return values


def broken_of(gate: Gate, result: ParityResult) -> list[str]:
    """One line for every broken threshold, with the place of the worst value."""
    lines = []
    if gate.get("verdict", True) and not result:
        lines.append(f"verdict: failed: {result.reason}")
    for name, threshold in gate.items():
        if name == "verdict":
            continue
        found = list(THRESHOLDS[name](result))
        if not found:
            lines.append(f"{name}: nothing was measured; {missing_of(name)}")
            continue
        upper = name.startswith("max_")
        where, value = (max if upper else min)(found, key=lambda pair: pair[1])
        if not (value <= threshold if upper else value >= threshold):
            lines.append(f"{name}: {value:.6g} ({where}), {'at most' if upper else 'at least'} {threshold:g}")
    return lines


def missing_of(name: str) -> str:
    """What a threshold without a measured value needs."""
    if name in ("min_fp32_equal", "max_fp32_edit_rate"):
        return "it needs a parity run without --against"
    return "it needs --references, and --metrics that have it"
