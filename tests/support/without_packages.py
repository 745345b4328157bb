"""Runs commands in an environment without some packages: python without_packages.py PACKAGE...

Reads command lines as JSON from standard input; prints their exit codes and error outputs as JSON. All in one process:
a package that cannot be imported stays so.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys


def main(packages: list[str]) -> None:
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    from seq2engine.cli.main import main as run

    results = {}
    for name, words in json.load(sys.stdin).items():
        out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: object = run([*words, "--quiet"])
            except BaseException as error:  # all that gets past the command line is what the test looks for
                code = repr(error)
        results[name] = (code, err.getvalue())
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
