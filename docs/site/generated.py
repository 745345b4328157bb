"""Writes what the docs say of the code: `make readme` calls it, and tests/test_docs.py fails when it was not called.

docs/CLI.md          from the parser
docs/BENCHMARK.md    the measured table, from benchmarks/results/base.json
CONTRIBUTING.md      the folders and their modules, from the tree and its docstrings
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from seq2engine.benchmarks.report import readme as benchmark_table
from seq2engine.cli.reference import reference_text

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("seq2engine", "model", "export", "runtime", "benchmarks")
BEGIN, END = "<!-- tree -->\n", "<!-- end of tree -->\n"


def tree_text() -> str:
    """Every folder of the sources: its sentence, then the names of its modules."""
    parts = []
    for top in FOLDERS:
        for folder in [ROOT / top, *sorted(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
            modules = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
            if not modules or "__pycache__" in folder.parts:
                continue
            names = textwrap.fill("  ".join(modules), 116, initial_indent="    ", subsequent_indent="    ")
            parts.append(f"**{folder.relative_to(ROOT)}/** {sentence_of(folder)}\n\n{names}\n")
    return "\n".join(parts)


def sentence_of(folder: Path) -> str:
    """What the folder's `__init__.py` says of it; the scripts of the GPU package are no Python package."""
    init = folder / "__init__.py"
    if not init.exists():
        return "Scripts that run on the GPU machine without seq2engine."
    return ast.get_docstring(ast.parse(init.read_text())) or ""


def with_tree(text: str) -> str:
    """CONTRIBUTING.md with the tree between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "CONTRIBUTING.md has lost the marks of its tree"
    return f"{before}{BEGIN}{tree_text()}{END}{after}"


def main() -> None:
    (ROOT / "docs" / "CLI.md").write_text(reference_text())
    benchmark_table.main()
    contributing = ROOT / "CONTRIBUTING.md"
    contributing.write_text(with_tree(contributing.read_text()))


if __name__ == "__main__":
    main()
