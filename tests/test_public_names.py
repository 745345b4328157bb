"""The public names: they exist, for Python and for type checkers, and no signature has a type that is not public."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from support.text_bundle import text_bundle

import seq2engine

ROOT = Path(__file__).parent.parent
# What an annotation may name beside public names.
KNOWN = {
    *dir(builtins),
    *typing.__all__,
    *collections.abc.__all__,
    *("Path", "np", "os", "TracebackType"),
    "Unpack",  # of typing_extensions
}
# Classes that users make themselves, so that the types of their fields matter too.
MADE_BY_USERS = [
    name for name in seq2engine.PUBLIC if name.endswith("Options") or name in ("ShapeRanges", "Case", "Workload")
]
# Classes that users call, implement or read field by field. The parts of results (ParityResult, BenchResult) are
# typed, but not exported one by one.
INTERFACES = (
    "Translator",
    "Session",
    "Emitted",
    "Bundle",
    "Passport",
    "ShapePlan",
    "AttentionView",
    "Comparison",
    "Scheduler",
    "Request",
    "Ticket",
)


def test_every_name_exists():
    for name in seq2engine.PUBLIC:
        assert getattr(seq2engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        seq2engine.nonsense  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "seq2engine" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: (f"seq2engine.{module}", name) for name, module in seq2engine.PUBLIC.items()}


def names_in(annotation: object) -> set[str]:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {node.id for node in ast.walk(ast.parse(text or "None")) if isinstance(node, ast.Name)}


def annotations_of(name: str) -> set[str]:
    """Every name in the signature of a function or of the methods of an interface, or in its fields."""
    public = getattr(seq2engine, name)
    found: list[object] = []
    methods = [public] if inspect.isfunction(public) else []
    if name in INTERFACES:
        members = {key: one.fget if isinstance(one, property) else one for key, one in vars(public).items()}
        methods = [inspect.unwrap(one) for key, one in members.items() if inspect.isfunction(one) and key[0] != "_"]
    for method in methods:
        signature = inspect.signature(method)
        found += [one.annotation for one in signature.parameters.values() if one.annotation is not one.empty]
        found.append(signature.return_annotation)
    if name in MADE_BY_USERS or (name in INTERFACES and dataclasses.is_dataclass(public)):
        found += [field.type for field in dataclasses.fields(public)]
    return {each for annotation in found for each in names_in(annotation)}


@pytest.mark.parametrize("name", seq2engine.PUBLIC)
def test_what_a_function_takes_or_gives_is_public(name):
    hidden = annotations_of(name) - KNOWN - set(seq2engine.PUBLIC)
    assert not hidden, f"{name} names {sorted(hidden)}, which seq2engine does not export"


@pytest.mark.parametrize("name", seq2engine.PUBLIC)
def test_everything_public_is_documented(name):
    public = getattr(seq2engine, name)
    if inspect.isclass(public) or inspect.isfunction(public):
        assert inspect.getdoc(public)
    if name == "Translator":
        assert all(one.__doc__ for key, one in vars(public).items() if inspect.isfunction(one) and key[0] != "_")


USER = """
import seq2engine
from seq2engine import Hypothesis, SearchOptions, Session, Translator

model = seq2engine.load("out/opus", precision="w8a8")
reveal_type(model)
reveal_type(model.translate("text"))
reveal_type(model.translate(["text"], beam=4, target_language="fra_Latn"))
reveal_type(model.score(["a"], ["b"]))
reveal_type(model.attention("text"))
with model.stream("text") as pieces:
    reveal_type(pieces)
reveal_type(seq2engine.generate(model.session, [[5, 6]]))
"""
REVEALED = [
    "seq2engine.runtime.translator.Translator",
    "str",
    "list[str]",
    "list[seq2engine.runtime.text.scoring.TargetScore]",
    "seq2engine.runtime.attention.view.AttentionView",
    "typing.Iterator[str]",
    "list[list[seq2engine.runtime.search.step.Hypothesis]]",
]


@pytest.mark.slow
def test_a_user_s_script_is_type_checked(tmp_path):
    """By mypy, strictly, in a folder that holds nothing but the script and the package as it is installed."""
    package = tmp_path / "site" / "seq2engine"
    package.mkdir(parents=True)
    for path in (
        *(ROOT / "seq2engine").iterdir(),
        *(ROOT / name for name in ("model", "export", "runtime", "benchmarks")),
    ):
        (package / path.name).symlink_to(path)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text("import seq2engine\nseq2engine.load('out').translate('text', beams=4)\n")
    flags = [
        "--strict",
        "--no-incremental",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--no-error-summary",
    ]
    # What is revealed are types of ours; to read all of torch as well takes 45 s and 1.7 GB instead of 9 s and 0.4 GB.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,onnx.*,onnxruntime.*]\nfollow_imports = skip\n")
    mypy = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", *flags]
    env = {"MYPYPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run([*mypy, "user.py", "wrong.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found = [line.split('"')[1] for line in lines if line.startswith("user.py") and "Revealed type is" in line]
    assert found == REVEALED, done.stdout + done.stderr
    assert [line for line in lines if line.startswith("user.py") and "error" in line] == []
    assert [line for line in lines if line.startswith("wrong.py") and "beams" in line], done.stdout


def test_a_text_goes_through_the_front_door(tmp_path):
    with seq2engine.load(text_bundle(tmp_path).root, threads=1) as model:
        assert isinstance(model.translate("abc"), str)
