"""The library is there where it can be: its operators' tests skip without it, this one does not."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from seq2engine.runtime.kernels.library import AVX2, AVX512, choose, library

CPU = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPU.exists(), reason="the library is for x86, and read here by Linux"
)
def test_is_built_where_there_is_a_compiler():
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler, so the package has no kernels")
    flags = next(line for line in CPU.read_text().splitlines() if line.startswith("flags")).split()
    if not {"avx2", "fma"} <= set(flags):
        pytest.skip("this processor has no AVX2")
    assert library() is not None, "the kernels are not built; build them with: pip install -e ."


def test_all_sources_are_built_with_the_package():
    """A build without one of them ends in a library that does not load, or lacks operators."""
    root = Path(__file__).parents[3]
    written = (root / "pyproject.toml").read_text()
    files = [path.relative_to(root).as_posix() for path in (root / "runtime/kernels").glob("*.[ch]")]
    assert not [name for name in files if f'"{name}"' not in written]


def test_is_no_older_than_its_sources(built):
    """Else all that follows tests code of yesterday."""
    sources = list(Path(__file__).parents[3].joinpath("runtime/kernels").glob("*.[ch]"))
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if built.resolve().parent != newest.resolve().parent:
        pytest.skip("an installed library, whose sources are elsewhere")
    assert built.stat().st_mtime >= newest.stat().st_mtime, f"{newest.name} is newer; build with: pip install -e ."


def test_uses_no_more_than_it_is_told_to(built):
    best = choose(built, AVX512)
    assert best in (8, 16)
    assert choose(built, AVX2) == 8
    assert choose(built, AVX512) == best
