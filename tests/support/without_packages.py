"""Runs commands in an environment without some packages: python without_packages.py PACKAGE... [--stand-in]

Reads command lines as JSON from standard input; prints their exit codes, error outputs and outputs as JSON. All in one
process: a package that cannot be imported stays so. With --stand-in there is a GPU, the stand-in's.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

STAND_IN = "--stand-in"


def put_stand_in() -> None:
    """A machine with a GPU and TensorRT."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from seq2engine.runtime.trt import session
    from support.host_device import HostDevice
    from support.tensorrt_stand_in import tensorrt_stand_in

    session.CudaDevice, session.load_tensorrt = HostDevice, tensorrt_stand_in  # type: ignore[assignment, misc]


def main(packages: list[str]) -> None:
    sys.modules.update(dict.fromkeys(package for package in packages if package != STAND_IN))  # type: ignore[arg-type]
    if STAND_IN in packages:
        put_stand_in()
    from seq2engine.cli.main import main as run

    results = {}
    for name, words in json.load(sys.stdin).items():
        out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: object = run([*words, "--quiet"])
            except BaseException as error:  # all that gets past the command line is what the test looks for
                code = repr(error)
        out.flush()
        results[name] = (code, err.getvalue(), out.buffer.getvalue().decode())
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
