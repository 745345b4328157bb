"""The documentation is code: its commands run, its links lead somewhere, its tree is the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return found


def environment() -> dict[str, str]:
    """The commands of this installation first on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_quickstart_commands_run(tmp_path):
    # How two runs on this machine compare is not the documentation's business; that they are compared is.
    script = "set -euo pipefail\n" + re.sub(
        r"(?m)^(seq2engine bench compare [^#\n]+)", r"\1 || [ $? = 1 ] ", block("sh")
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "measurements take surely more than 1.05 times as long" in done.stdout
    pages = {path.name for path in (tmp_path / "out" / "g2p" / "reports").glob("*.html")}
    dated = {re.sub(r"-\d{8}-\d{6}", "", name) for name in pages}
    assert dated == {"attention.html", "parity-onnxruntime-fp32.html", "index.html"}


def test_quickstart_python_runs(tmp_path):
    done = subprocess.run([sys.executable, "-c", block("python")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_is_documented():
    from seq2engine.cli.main import make_parser

    (commands,) = [action for action in make_parser()._actions if action.choices and "export" in action.choices]
    for name in commands.choices:
        assert f"seq2engine {name}" in README, f"README does not show `seq2engine {name}`"


def test_the_tree_is_the_tree():
    (tree,) = re.findall(r"## Where things live\n\n(.*?)\n\n", README, flags=re.DOTALL)
    folder = ""
    listed = set()
    for line in tree.splitlines():
        words = line.split()
        if words[0].endswith("/"):
            folder = words[0]
        listed |= {f"{folder}{word}" for word in words if word.endswith(".py")}
    for name in listed:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/LOG.md", "docs/CHECKPOINTS.md", "model/g2p/README.md"],
)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert not target.startswith("http"), f"{name} links outside: {target}"
        assert (ROOT / name).parent.joinpath(target).exists(), f"{name} -> {target}"
    for target in re.findall(r"`((?:model|export|runtime|benchmarks|tests|seq2engine|docs)/[\w./]+)`", text):
        assert (ROOT / target).exists(), f"{name} names {target}"
