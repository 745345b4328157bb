"""Environments for peers, without an hour of installing them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make peers` makes, but with the libraries of this environment behind it."""
    folder = tmp_path_factory.mktemp("environments")
    python = folder / "transformers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder
