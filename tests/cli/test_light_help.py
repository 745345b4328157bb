"""`--help` and damaged graphs are answered at once: counted in imported modules, as times depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from seq2engine.cli.main import COMMANDS, make_parser
from seq2engine.cli.summaries import SUMMARIES
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

MOST = 75  # modules beside those that the interpreter itself has loaded; argparse alone takes twenty
MOST_OF_ALL = 50  # where no command is named, and none is imported
MOST_OF_OURS = 16  # among those
HEAVY = ("torch", "onnx", "onnxruntime", "numpy", "rich", "tempfile", "ctypes", "subprocess", "logging", "asyncio")
COUNT = """
import sys
before = set(sys.modules)
from seq2engine.__main__ import main
sys.argv = ["seq2engine", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


def imported(*words):
    done = subprocess.run([sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: seq2engine")
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("--help", "bench")])
def test_help_imports_little(words):
    found = imported(*words)
    assert not found & set(HEAVY)
    assert len(found) <= MOST, sorted(found)


def test_help_of_a_command_imports_no_other():
    found = {name for name in imported("train", "--help") if name.startswith("seq2engine.commands.")}
    assert found == {"seq2engine.commands.train"}


def test_help_without_a_command_imports_none():
    found = imported("--help")
    assert not {name for name in found if name.startswith("seq2engine.commands.")}
    assert len(found) <= MOST_OF_ALL, sorted(found)
    assert len([name for name in found if name.startswith("seq2engine")]) <= MOST_OF_OURS, sorted(found)


def test_the_summaries_are_those_of_the_commands():
    """A new command needs its line in seq2engine/cli/summaries.py, in the order of `COMMANDS`."""
    summaries = {one.dest: one.help for one in make_parser()._subparsers._group_actions[0]._choices_actions}
    assert list(summaries.items()) == list(SUMMARIES.items())


@pytest.mark.parametrize(("word", "message"), [("exprt", "exprt (did you mean export?)"), ("zzzz", "zzzz")])
def test_a_command_that_does_not_exist(cli, capsys, word, message):
    with pytest.raises(SystemExit) as ended:
        cli(word, "B")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"seq2engine: error: unknown command {message}; see: seq2engine --help\n"


def test_the_table_maps_modules_to_their_commands():
    for module, names in COMMANDS.items():
        assert tuple(make_parser([module])._subparsers._group_actions[0].choices) == names


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("export C B --cache growing", "--cache is now --cache-form"),
        ("build B --target sm89", "--target is now --gpu"),
        ("--target=sm89 build B", "--target is now --gpu"),
        ("build B --length 8", "--length is now --max-length"),
        ("build B --source 8", "--source is now --source-length"),
        ("build B --cache DIR", "--cache is now --engine-cache"),
        ("build B --no-cache", "--no-cache is now --no-engine-cache"),
        ("plan C B --target sm89", "--target is now --gpu"),
        ("package B P --length 8", "--length is now --max-length"),
        ("bench B --lengths 8 16", "--lengths is now --max-length"),
        ("bench B --output 8", "--output is now --max-length"),
        ("train D C --dev D --max-source 8", "--max-source is now --source-length"),
        ("train D C --dev D --max-target 8", "--max-target is now --max-length"),
    ],
)
def test_a_flag_of_an_older_version_names_the_new_one(cli, capsys, line, new):
    with pytest.raises(SystemExit) as ended:
        cli(*line.split())
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert f"error: {new}; see: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [("package", "B", "made"), ("bench", "B", "--case", "1x1x4x3", "--rounds", "1")])
def test_a_damaged_graph_is_told_before_anything_heavy(words, tmp_path):
    """Both commands come to the graphs last: after PyTorch was imported, and samples recorded or the machine timed."""
    root = onnx_from_model(random_model(PRESETS["tiny"]), tmp_path / "B", ("fp32",)).root
    weights = root / "onnx/fp32/decoder_step.onnx.data"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    done = subprocess.run([sys.executable, "-c", COUNT, *words], capture_output=True, text=True, cwd=tmp_path)
    error, modules = done.stderr.splitlines()
    assert error.startswith(f"error: {weights} is not the file the manifest describes")
    assert not set(modules.split()) & {"torch", "onnx", "onnxruntime"}
    assert not (tmp_path / "made").exists()
