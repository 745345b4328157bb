"""One default for one thing: a flag of a command and the field of the same name in its Python options."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import seq2engine
from seq2engine.cli.main import make_parser
from seq2engine.flags.shared import BACKENDS
from seq2engine.runtime import backends

OPTIONS = {
    "bench": "BenchOptions",
    "build": "BuildOptions",
    "package": "PackageOptions",
    "parity": "ParityOptions",
    "push": "PushOptions",
    "train": "TrainOptions",
    "transcribe": "TranscribeOptions",
    "triton": "TritonOptions",
}


def default_of(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default  # type: ignore[misc]


@pytest.mark.parametrize(("command", "options"), OPTIONS.items())
def test_a_flag_has_the_default_of_its_field(command: str, options: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(getattr(seq2engine, options))}
    actions = make_parser()._subparsers._group_actions[0].choices[command]._actions  # type: ignore[union-attr, index, call-overload]
    compared = [action for action in actions if action.dest in fields and action.default is not None]
    for action in compared:
        given = tuple(action.default) if isinstance(action.default, list) else action.default
        assert given == default_of(fields[action.dest]), f"{command} {action.option_strings}"
    assert compared or command in ("train", "transcribe")  # where every flag is None: left to the field


def test_backends_are_listed_once() -> None:
    assert tuple(backends.BACKENDS) == BACKENDS
