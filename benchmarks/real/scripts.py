"""Runs a module of the benchmark that is started by its name (`python -m ...`) and not by a command."""

from __future__ import annotations

import sys
from collections.abc import Callable

from seq2engine.errors import Seq2EngineError


def exit_code_of(work: Callable[[list[str]], None], usage: str, least: int = 1) -> int:
    """Calls `work` with the arguments: 2 if there are fewer than `least`, 1 for an error, which is one line."""
    arguments = sys.argv[1:]
    if len(arguments) < least or arguments[0].startswith("-"):
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    try:
        work(arguments)
    except Seq2EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
