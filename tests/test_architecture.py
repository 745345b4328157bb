"""The house rules that code can check: imports flow one way, heavy imports wait, the wheel cannot be shadowed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from zipfile import ZipFile

import pytest
import tomllib

ROOT = Path(__file__).parent.parent
STAGES = ("model", "export", "runtime", "benchmarks")
# From the bottom to the top: a folder or module may import what stands before it in this list, and its own.
LAYERS = (
    "errors",
    "common",
    "model",
    "export",
    "runtime",
    "exporting",
    "benchmarks",
    "inspection",
    "packaging",
    "serving",
    "triton",
    "flags",
    "commands",
    "cli",
    "__main__",
)
MOST_MODULES = 16  # in one folder, its __init__.py counted
# A machine that only serves a model needs no exporter and no PyTorch model, so what serves takes only these of export:
# the contract, the files of a bundle (manifest, passports, graphs), and what a session makes when it is opened: forms
# of the bundle's graphs, and small graphs without weights that move its state on a device. Engines are built of the
# latter as well, so they cannot be in runtime.
SERVING_MAY = {"contract", "artifact", "forms", "ort_form", "kernel_forms", "ort_forms", "device_graphs"}
# And these of model, none of which imports torch.
SERVING_MODEL = ("model.config", "model.images", "model.pairs", "model.speech", "model.tokenizers")
# The rooms that hold a model against its PyTorch reference, or run it.
REFERENCE = ("runtime.torch_session", "runtime.ort.calibration", "runtime.parity.")
HEAVY = ("jinja2", "torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "numpy")


def source_files() -> dict[str, Path]:
    """Module name, as in `seq2engine.NAME`, -> its file. The scripts of the GPU package are no modules of ours."""
    found = {}
    for folder in (*STAGES, "seq2engine"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "gpu_package" in parts:
                continue
            parts = parts[1:] if folder == "seq2engine" else parts
            found[".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)] = path
    return found


FILES = source_files()


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(FILES[name].read_text())))


def imports_of(name: str) -> set[str]:
    """Modules of ours that a module imports, wherever in the file, for type checking as well."""
    path = FILES[name]
    inside = path.relative_to(ROOT).parent.parts
    inside = inside[1:] if inside[0] == "seq2engine" else inside
    found = set()
    for node in nodes_of(name):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = node.module.split(".") if node.module else []
        if node.level:
            parts = [*inside[: len(inside) - node.level + 1], *parts]
        elif parts[:1] == ["seq2engine"]:
            parts = parts[1:]
        else:
            continue
        for alias in node.names:
            named = [".".join([*parts, alias.name]), ".".join(parts)]
            found.add(next((one for one in named if one in FILES), named[-1]))
    return found - {""}


@cache
def imports() -> dict[str, set[str]]:
    return {name: imports_of(name) for name in FILES}


def room_of(name: str) -> str:
    """The folder of a module; a module that stands at the top of a stage, or of seq2engine, is a room of its own."""
    folder = name.rpartition(".")[0]
    return name if folder in ("", *STAGES) or FILES[name].name == "__init__.py" else folder


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of one cycle; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_on_the_way():
    assert not cycle_in(imports())


def test_imports_between_folders_go_one_way():
    rooms: dict[str, set[str]] = {}
    for name, imported in imports().items():
        rooms.setdefault(room_of(name), set()).update({room_of(other) for other in imported} - {room_of(name)})
    assert not cycle_in(rooms)


@pytest.mark.parametrize("name", [name for name in FILES if name])
def test_stages_import_only_what_is_below_them(name):
    level = LAYERS.index(name.split(".")[0])
    assert not {other for other in imports()[name] if LAYERS.index(other.split(".")[0]) > level}


def test_serving_needs_no_exporter():
    for name in FILES:
        if not name.startswith("runtime") or name.startswith(REFERENCE):
            continue
        exported = {other.split(".")[1] for other in imports()[name] if other.startswith("export.")}
        assert exported <= SERVING_MAY, name
        modelled = {other for other in imports()[name] if other.startswith("model.")}
        assert all(other.startswith(SERVING_MODEL) for other in modelled), name


def test_bundles_are_exported_with_calibration():
    """`export.to_onnx` has the same two functions without it; only `seq2engine.exporting`, which adds it, may."""
    for name in FILES:
        if name == "exporting":
            continue
        for node in nodes_of(name):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("to_onnx"):
                taken = {alias.name for alias in node.names} & {"onnx_from_model", "add_precisions"}
                assert not taken, f"{name} exports without calibration; take {taken} from seq2engine.exporting"


def test_a_folder_is_small():
    folders = Counter(path.parent for stage in (*STAGES, "seq2engine") for path in (ROOT / stage).rglob("*.py"))
    assert not {str(path.relative_to(ROOT)): count for path, count in folders.items() if count > MOST_MODULES}


def test_a_folder_has_a_docstring_of_one_sentence():
    for name, path in FILES.items():
        if path.name != "__init__.py":
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert re.fullmatch(r"[^\n]+\.", docstring), f"seq2engine.{name} does not say in a sentence what it holds"


def test_one_function_reads_onnx_files():
    """It holds the limits on what a file may claim; what we have made ourselves in memory needs none."""
    for name in FILES:
        if name == "export.artifact.graph_files" or not re.search("load|ParseFromString", FILES[name].read_text()):
            continue
        for node in nodes_of(name):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not re.search(r"(^onnx\.load(_model)?|\.ParseFromString)$", called), name


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(filter(None, ("seq2engine", name))) for name, path in FILES.items() if path.name == "__init__.py"
    }
    assert set(listed) == folders
    assert all((path.parent / "__init__.py").is_file() for path in FILES.values())


def test_no_bare_import_of_our_folders():
    suspect = re.compile(rf"^\s*(from|import) ({'|'.join(STAGES)})\b", re.MULTILINE)
    for path in [p for s in (*STAGES, "seq2engine", "tests") for p in (ROOT / s).rglob("*.py")]:
        if not suspect.search(text := path.read_text()):
            continue  # to parse every file takes seconds
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] in STAGES], f"{path} would import a user's own module"


@pytest.mark.slow
def test_wheel_runs_beside_a_decoy(tmp_path):
    """A user's own model.py, export.py, ... in the working directory must not be taken for ours."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (*STAGES, "seq2engine", "pyproject.toml", "README.md", "LICENSE"):  # a copy: builds write beside it
        os.symlink(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    templates = {path.name for stage in (*STAGES, "seq2engine") for path in (ROOT / stage).glob("**/templates/*")}
    assert {Path(name).name for name in ZipFile(built).namelist() if "/templates/" in name} == templates
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(built)], check=True, capture_output=True)
    user = tmp_path / "user"
    user.mkdir()
    for name in STAGES:
        (user / f"{name}.py").write_text("raise RuntimeError('the decoy was imported')\n")
    code = (
        "import seq2engine; from seq2engine import random_model, onnx_from_model, open_session, generate\n"
        "bundle = onnx_from_model(random_model('tiny'), 'bundle')\n"
        "with open_session(bundle) as session: print(seq2engine.__file__, len(generate(session, [[5, 6, 7]])[0]))"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=user, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, count = done.stdout.split()
    assert path.startswith(str(site))
    assert count == "1"
