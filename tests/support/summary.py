"""The closing table of `make test`, from the results file that pytest wrote."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from seq2engine.common.tables import text_table


def summary_of(results: Path) -> str:
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    rows = [
        ("lint (ruff)", "clean", "pyproject.toml"),
        ("types (mypy)", "clean", "pyproject.toml"),
        (
            "tests (pytest)",
            f"{passed} of {counts['tests']} passed in {float(suite.get('time', '0')):.0f} s",
            str(results),
        ),
    ]
    return text_table(("done", "result", "where"), rows)


if __name__ == "__main__":
    print(summary_of(Path(sys.argv[1])))
