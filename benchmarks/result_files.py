"""Reads results from a path: a file, a bundle (its latest report), or a folder given to --out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_json
from seq2engine.common.reports import latest_report, reports_in
from seq2engine.errors import ConfigError, UsageError

from .result import BenchResult, result_from_dict

EXPECTED = "expected the JSON file of a benchmark, or a bundle that has one in its reports"
NEXT = "make one with: seq2engine bench BUNDLE"


def result_from_path(path: Path) -> BenchResult:
    """The result in a file, or the latest of a folder."""
    return result_from_file(latest_in(path) if path.is_dir() else path)


def latest_in(folder: Path) -> Path:
    """A bundle's latest report; else the newest in the folder itself, where --out has put it."""
    found = latest_report(folder, "bench") or next(iter(reports_in(folder, "bench")), None)
    if found is None:
        raise UsageError(f"{folder} holds no benchmark result, {EXPECTED}; {NEXT}")
    return found


def result_from_file(path: Path) -> BenchResult:
    if path.suffix == ".html":
        raise UsageError(f"{path} is the page of a report, expected its data: {path.with_suffix('.json')}")
    values = json_from_file(path)
    if not isinstance(values, dict) or not {"format", "arms", "cases"} <= values.keys():
        raise UsageError(f"{path} is JSON, but not a benchmark result; {EXPECTED}; {NEXT}")
    try:
        return result_from_dict(values)
    except ConfigError as error:  # of another format
        raise UsageError(f"{path}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        lost = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is a damaged benchmark result: {lost}; {NEXT}") from error


def json_from_file(path: Path) -> Any:
    try:
        return read_json(path, finite=False)
    except FileNotFoundError as error:
        raise UsageError(f"no file {path}, {EXPECTED}; {NEXT}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; {EXPECTED}") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be used ({error}), {EXPECTED}; {NEXT}") from error
