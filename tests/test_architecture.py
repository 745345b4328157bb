"""The house rules that code can check: imports flow one way, heavy imports wait, the wheel cannot be shadowed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("model", "export", "runtime", "benchmarks")  # each may import those before it
# What runtime may take from the stages before it, so that a serving machine needs no exporter and no model code.
RUNTIME_MAY = {
    "export": {
        "contract",
        "bundle",
        "bundle_engines",
        "default_precision",
        "passport",
        "profiles",
        "trt_module",
        "attention_graph",
        "candidate_graph",
        "screened_graph",
        "turned_keys",
        "ort_forms",
        "islands",
        "quantise",
        "row_products",
        "audit",
        "census",
        "exposed_graph",
    },
    "model": {"config", "pairs", "tokenizers"},
}
TORCH_SESSION_MAY = {"checkpoint", "layers", "transformer"}
HEAVY = ("torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "numpy")


def imports_of(path: Path) -> set[tuple[str, str]]:
    """(stage, module) pairs of our own that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        parts = node.module.split(".")
        if node.level:  # relative: resolved against the file's own place
            inside = path.relative_to(ROOT).parent.parts
            parts = [*inside[: len(inside) - node.level + 1], *parts]
        elif parts[0] == "seq2engine":
            parts = parts[1:]
        else:
            continue
        if parts and parts[0] in STAGES:
            found.add((parts[0], parts[1] if len(parts) > 1 else ""))
    return found


@pytest.mark.parametrize(
    "path", [p for s in STAGES for p in sorted((ROOT / s).rglob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_flow_one_way(path):
    stage = path.relative_to(ROOT).parts[0]
    later = STAGES[STAGES.index(stage) + 1 :]
    imported = imports_of(path)
    assert not {pair for pair in imported if pair[0] in later}
    if stage == "runtime":
        for source, allowed in RUNTIME_MAY.items():
            torch_only = path.name in ("torch_session.py", "shared_weights.py")
            extra = TORCH_SESSION_MAY if torch_only and source == "model" else set()
            assert {module for s, module in imported if s == source} <= allowed | extra


def test_the_front_door_is_below_every_stage():
    """What all stages use may use none of them."""
    drawing = ("terminal", "progress", "tables", "page", "heat_map", "about", "reports", "reports_index")
    for name in ("errors", "folders", *drawing):
        assert not imports_of(ROOT / "seq2engine" / f"{name}.py")


def test_no_bare_import_of_our_folders():
    for path in [p for s in (*STAGES, "seq2engine", "tests") for p in (ROOT / s).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] in STAGES], f"{path} would import a user's own module"


def test_help_is_light():
    """`seq2engine --help` must answer at once, so it may import nothing heavy."""
    code = (
        "import sys; from seq2engine.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]; assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    import seq2engine

    for name in seq2engine.PUBLIC:
        assert getattr(seq2engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        seq2engine.nonsense  # noqa: B018


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
