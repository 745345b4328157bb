"""Words in any order: every flag of every command before and behind the places, alone and in pairs, and lists."""

from __future__ import annotations

import argparse
from functools import cache
from itertools import combinations, permutations

import pytest

from seq2engine.cli import main as command_line
from seq2engine.cli.main import parsed
from seq2engine.flags.lists import ListAction, OptionalValueAction

SAMPLES = {  # flag -> two words it takes; any other list takes numbers
    "precision": ("fp32", "fp16"),
    "add": ("int8", "w8a8"),
    "gpu": ("sm86", "sm89"),
    "backend": ("torch", "onnxruntime"),
    "case": ("1x1x4x4", "2x1x4x4"),
    "peers": ("optimum", "ctranslate2 int8"),
    "natural": ("1x1", "32x4"),
    "scenario": ("single", "server"),
    "metrics": ("bleu", "chrf"),
}


make_parser = cache(command_line.make_parser)  # it takes a thousand times as long as to read a line


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch):
    monkeypatch.setattr(command_line, "make_parser", make_parser)


def commands():
    (action,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def places_of(sub):
    return [
        next(iter(action.choices or [f"{action.dest}-word"]))
        for action in sub._actions
        if not action.option_strings and action.nargs != "*"
    ]


def flags_of(sub):
    return [action for action in sub._actions if action.option_strings and not isinstance(action, argparse._HelpAction)]


def words_of(action):
    """The flag with a value, as a user would type it."""
    flag = max(action.option_strings, key=len)
    if isinstance(action, ListAction):
        return [flag, *SAMPLES.get(action.dest, ("3", "4"))]
    if action.nargs == 0:
        return [flag]
    if isinstance(action, OptionalValueAction):
        return [flag, "encoder:x"]
    return [flag, next(iter(action.choices)) if action.choices else "3"]


def read(name, words):
    command = next(word for word in (name, *words) if word in commands())
    needed = [words_of(action) for action in flags_of(commands()[command]) if action.required]
    values = vars(parsed([name, *words, *(word for need in needed if need[0] not in words for word in need)]))
    return {key: value for key, value in values.items() if not callable(value)}


@pytest.mark.parametrize("name", commands())
def test_every_flag_stands_before_between_and_behind_the_places(name):
    sub = commands()[name]
    places = places_of(sub)
    for action in flags_of(sub):
        words = words_of(action)
        if not places:
            read(name, words)
            continue
        expected = read(name, [*places, *words])
        dests = [action.dest for action in sub._actions if not action.option_strings and action.nargs != "*"]
        assert all(expected[dest] is not None for dest in dests)
        for at in range(len(places)):
            assert read(name, [*places[:at], *words, *places[at:]]) == expected, (at, words)
        assert read(words[0], [*words[1:], name, *places]) == expected, "before the command"


@pytest.mark.parametrize("name", commands())
def test_pairs_of_flags_stand_anywhere(name):
    sub = commands()[name]
    places = places_of(sub)
    for pair in combinations(flags_of(sub), 2):
        if not any(isinstance(action, (ListAction, OptionalValueAction)) for action in pair):
            continue  # argparse tells these apart by itself
        one, other = map(words_of, pair)
        behind = read(name, [*places, *one, *other])
        for first, second in permutations((one, other)):
            assert read(name, [*first, *places, *second]) == behind, (first, second)
            assert read(name, [*first, *second, *places]) == behind, (first, second)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        (name, action.option_strings[0])
        for name, sub in commands().items()
        for action in flags_of(sub)
        if isinstance(action, ListAction)
    ],
)
def test_a_list_has_commas_or_spaces_or_its_flag_again(name, flag):
    sub = commands()[name]
    places = places_of(sub)
    (action,) = (a for a in flags_of(sub) if flag in a.option_strings)
    first, second = SAMPLES.get(action.dest, ("3", "4"))
    expected = read(name, [*places, flag, first, second])
    for words in (
        [flag, f"{first},{second}"],
        [f"{flag}={first},{second}"],
        [flag, f"{first}, {second}"],
        [flag, first, flag, second],
    ):
        for order in ([*places, *words], [*words, *places], [*places[:1], *words, *places[1:]]):
            assert read(name, order) == expected, order
    assert expected[action.dest] == [action.item(first), action.item(second)]


def test_flags_stand_before_the_command():
    assert read("--quiet", ["inspect", "B"]) == read("inspect", ["B", "--quiet"])
    assert read("--json", ["--quiet", "inspect", "B"]) == read("inspect", ["--json", "B", "--quiet"])


def test_a_bundle_named_like_an_item_needs_an_equals_sign():
    assert read("export", ["--precision=fp32", "ckpt", "fp16"])["bundle"].name == "fp16"
    assert read("build", ["--batch=1", "8"])["bundle"].name == "8"


def test_what_is_behind_the_last_place_is_an_item_whatever_it_is():
    assert read("export", ["ckpt", "B", "--precision", "fp32", "fp61"])["precision"] == ["fp32", "fp61"]


def test_a_value_that_is_optional_leaves_the_bundle_its_place():
    assert read("parity", ["--locate", "B"]) == read("parity", ["B", "--locate"])
    assert read("parity", ["--locate", "encoder:x", "B"]) == read("parity", ["B", "--locate", "encoder:x"])


def test_texts_of_a_run_stay_texts():
    assert read("run", ["B", "--beam", "4", "fp16", "--", "--precision", "x"])["text"] == ["fp16", "--precision", "x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "ckpt", "B", "--precision"], "argument --precision: expected one argument"),
        (["export", "--precision", "fp32,", "ckpt", "B"], "argument --precision: an item is missing in 'fp32,'"),
        (["bench", "B", "--max-length", "8", "x"], "argument --max-length: invalid int value: '8,x'"),
        (["build", "--gpu", "sm89"], "the following arguments are required: bundle"),
        (["run"], "the following arguments are required: bundle; see"),  # and no TEXT: there is standard input
        (["--qiet", "inspect", "B"], "unrecognized arguments: --qiet (did you mean --quiet?)"),
        (["parity", "B", "--batc", "4"], "unrecognized arguments: --batc (did you mean --batch?)"),
        (["run", "B", "--prec=fp16", "x"], "unrecognized arguments: --prec=fp16 (did you mean --precision?)"),
        (["train", "a", "b", "--de", "c"], "unrecognized arguments: --de (did you mean --dev?)"),
        (["parity", "B", "--html", "x"], "unrecognized arguments: --html (did you mean --out?)"),
        (["parity", "B", "--zzzzzz", "x"], "unrecognized arguments: --zzzzzz; see: seq2engine parity --help"),
    ],
)
def test_wrong_lists_are_wrong_usage_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1
