"""How a command ends: its exit code and, where something went wrong, one line to the error output.

0 is success, 1 an error or a failed verdict, 2 wrong usage, 130 an interrupt (143 a SIGTERM), 141 a closed pipe. Any
other exception is a bug and stays a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from seq2engine.cli.interrupts import handled_interrupts
from seq2engine.errors import Seq2EngineError, UsageError

FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs a command, flushes its output and returns the exit code."""
    if sys.stdout is None:  # closed by the caller: output is discarded instead of failing at some print
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        with handled_interrupts() as interrupts:
            code = flushed(command)
        if interrupts.number and code != INTERRUPTED:
            return interrupted(interrupts.exit_code)
        return interrupts.exit_code if interrupts.number else code
    except KeyboardInterrupt:
        return interrupted(interrupts.exit_code if interrupts.number else INTERRUPTED)
    except UsageError as error:
        return failed(str(error), USAGE)
    except Seq2EngineError as error:
        return failed(str(error))
    except MemoryError as error:
        why = str(error) or "out of memory"
        return failed(f"{why}; ask for less at once, such as a smaller --batch, --beam or --max-length")
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        silence_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.strerror is None:  # raised by our own code, not by the system
            raise
        return failed(text_of(error))


def flushed(command: Callable[[], int]) -> int:
    """Flushes the output now, so that a write error is reported by us and not by the interpreter at its exit."""
    try:
        code = command()
    except SystemExit:  # after --help or wrong usage
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def failed(message: str, code: int = FAILED) -> int:
    tell(f"error: {' '.join(message.split())}")
    return code


def interrupted(code: int) -> int:
    tell("interrupted; nothing half-written was left")
    return code


def tell(line: str) -> None:
    from seq2engine.common.terminal import fresh_line  # late: interrupts are handled before anything larger is imported

    with suppress(OSError):  # where not even this can be written, the exit code is all that is left
        print(f"{fresh_line(sys.stderr)}{line}", file=sys.stderr)


def text_of(error: OSError) -> str:
    """The system's error and the file it is about; an error without a file name is about printed output."""
    advice = "; make room there and run it again" if error.errno in FULL else ""
    if error.filename is None:
        silence_output()
        return f"cannot write the output: {error.strerror}{advice}"
    names = " to ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {error.strerror}{advice}"


def silence_output() -> None:
    """Discards further output, so that the interpreter does not fail at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
