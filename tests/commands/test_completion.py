"""Completion as bash does it: the script is read by a real bash, which is asked what it would offer."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from seq2engine.cli.main import make_parser

ASK = """
eval "$1"
COMP_WORDS=($2)
[[ "$2" == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_seq2engine
printf '%s\\n' "${COMPREPLY[@]}"
complete -p seq2engine >/dev/null
"""


@pytest.fixture(scope="module")
def script():
    command = [sys.executable, "-m", "seq2engine", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def offered(script, line):
    done = subprocess.run(["bash", "-c", ASK, "bash", script, line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def commands():
    return make_parser()._subparsers._group_actions[0].choices


def test_commands_are_offered(script):
    assert offered(script, "seq2engine ") == list(commands())
    assert offered(script, "seq2engine p") == ["plan", "package", "parity"]
    assert offered(script, "seq2engine --v") == ["--version"]


@pytest.mark.parametrize("name", commands())
def test_every_flag_of_a_command_is_offered(script, name):
    found = offered(script, f"seq2engine {name} --")
    flags = {flag for action in commands()[name]._actions for flag in action.option_strings if flag.startswith("--")}
    assert set(found) == flags
    assert offered(script, f"seq2engine --quiet {name} B --") == found


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("seq2engine run B --backend t", ["torch", "tensorrt"]),
        ("seq2engine run B --beam-style c", ["ctranslate2"]),
        ("seq2engine export C B --precision fp", ["fp32", "fp16", "fp8"]),
        ("seq2engine export C B --cache-form ", ["static", "growing"]),
        ("seq2engine completion ", ["bash", "zsh", "fish"]),
        ("seq2engine run B --input ", []),  # a file: bash's own completion
    ],
)
def test_values_of_a_flag_are_offered(script, line, values):
    assert offered(script, line) == values


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(cli, shell):
    code, out, err = cli("completion", shell)
    assert (code, err) == (0, "")
    assert all(name in out for name in commands())
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=out, text=True, check=True)
    elif shell == "zsh":  # the same script, behind two lines that have zsh read it
        subprocess.run(["bash", "-n"], input=out, text=True, check=True)
