"""The precision of a command: --precision, else the most precise supported one, and a line that names it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle


def precision_from_args(args: argparse.Namespace, bundle: Bundle) -> str:
    """For commands with one precision, by `args.backend` and `args.engine`."""
    from seq2engine.export.artifact.default_precision import default_precision

    return args.precision or default_precision(bundle, args.backend, args.engine)


def precisions_from_args(args: argparse.Namespace, bundle: Bundle) -> list[str]:
    """For commands that take several; each occurs once."""
    from seq2engine.export.artifact.default_precision import default_precision

    return list(dict.fromkeys(args.precision or [default_precision(bundle, args.backend, args.engine)]))


def print_default_precision(args: argparse.Namespace, bundle: Bundle, chosen: str, serves: str) -> None:
    """One line if there was a choice: the bundle has several precisions and none was named."""
    if args.precision is None and len(bundle.precisions) > 1 and not args.quiet:
        held = ", ".join(bundle.precisions)
        print(f"precision {chosen}: the most precise of {held} that {serves}", file=sys.stderr)
