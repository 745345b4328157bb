"""The library of operators, with each of its instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seq2engine.runtime.kernels.library import AVX2, AVX512, choose, library

WIDTHS = {AVX2: 8, AVX512: 16}


@pytest.fixture(scope="session")
def built() -> Path:
    """test_library.py fails where it should be there."""
    path = library()
    if path is None:
        pytest.skip("the kernel library is not built, or this processor has no AVX2")
    return path


@pytest.fixture(scope="module", params=[AVX2, AVX512], ids=["avx2", "avx512"])
def vectors(request: pytest.FixtureRequest, built: Path) -> Iterator[int]:
    """The numbers in a vector. The choice is the whole process's: sessions must open after it and close with it."""
    if choose(built, request.param) != WIDTHS[request.param]:
        choose(built, AVX512)
        pytest.skip("this processor has no AVX-512 with VNNI")
    yield WIDTHS[request.param]
    choose(built, AVX512)
