"""Completion as bash does it: the script is read by a real bash, which is asked what it would offer."""

from __future__ import annotations

import os
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
    assert offered(script, "seq2engine p") == ["plan", "package", "push", "parity"]
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
        ("seq2engine export C B --precision a", []),
        ("seq2engine run B --precision a", ["auto"]),
        ("seq2engine run B --draft a", ["auto"]),
        ("seq2engine serve B --draft q", ["quantised"]),
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


def test_fish_shows_the_help_of_a_flag_with_its_default(cli):
    lines = cli("completion", "fish")[1].splitlines()
    assert not [line for line in lines if "%(" in line]
    (backend,) = [line for line in lines if "_from run'" in line and "-l backend " in line]
    assert "(default: onnxruntime)" in backend


LINES = (
    ("seq2engine --vers", "--version"),
    ("seq2engine pari", "parity"),
    ("seq2engine run B --beam-style c", "ctranslate2"),
    ("seq2engine run --scor", "--scores"),
)
IN_ZSH = """
eval "$1"
ask() {
  emulate -L sh  # as zsh's bashcompinit calls it
  setopt kshglob noshglob braceexpand
  COMP_WORDS=(${(z)1}); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _seq2engine
  print -l -- "${COMPREPLY[@]}"
}
ask "$2"
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(("line", "word"), LINES)
def test_zsh_offers_it(cli, tmp_path, line, word):
    """zsh reads bash's script through bashcompinit, which leaves the choice among the words to zsh."""
    _, script, _ = cli("completion", "zsh")
    command = ["zsh", "-f", "-c", IN_ZSH, "zsh", script, line]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ZDOTDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout.split()


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "word"), LINES)
def test_fish_offers_it(cli, tmp_path, line, word):
    (tmp_path / "script.fish").write_text(cli("completion", "fish")[1])
    asked = f"source {tmp_path}/script.fish; complete -C '{line}'"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True)
    assert [found.split("\t")[0] for found in done.stdout.splitlines()] == [word]
