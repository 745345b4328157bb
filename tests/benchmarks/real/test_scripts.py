"""Modules of the benchmark that are started by their name: usage and errors are one line."""

from __future__ import annotations

import sys

import pytest

from seq2engine.benchmarks.real.scripts import exit_code_of
from seq2engine.errors import ConfigError


def refusing(arguments: list[str]) -> None:
    raise ConfigError(f"no model at {arguments[0]}")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [([], 2, "usage: it FOLDER\n"), (["--help"], 2, "usage: it FOLDER\n"), (["a"], 1, "error: no model at a\n")],
)
def test_what_is_wrong_is_one_line(monkeypatch, capsys, arguments, code, told):
    monkeypatch.setattr(sys, "argv", ["it", *arguments])
    assert exit_code_of(refusing, "it FOLDER") == code
    assert capsys.readouterr().err == told


def test_the_work_gets_its_arguments(monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["it", "folder", "3"])
    assert exit_code_of(given.extend, "it FOLDER") == 0
    assert given == ["folder", "3"]
