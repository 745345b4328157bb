"""Ctrl-C and SIGTERM become one KeyboardInterrupt that is never lost, wherever they arrive."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

AGAIN = 0.05  # seconds after which an interrupt that had to wait is tried again
IMPORTS = "<frozen importlib._bootstrap>"
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupts:
    """The signal that arrived, and whether its KeyboardInterrupt is still to be raised.

    An exception inside the import of a compiled module may come out as an ImportError, a SystemError or not at all, and
    one inside a finaliser is printed and forgotten. So an interrupt waits for the end of the imports that are under way
    (a second one does not), and one that a finaliser would lose is raised again.
    """

    def __init__(self) -> None:
        self.number = 0  # of the first signal that came; 0: none
        self.waits = False
        self.hook = sys.unraisablehook

    @property
    def exit_code(self) -> int:
        return 128 + self.number  # as shells count

    def arrived(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.raise_outside_imports(frame, patient=not self.waits)

    def due(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self.raise_outside_imports(frame, patient=True)

    def raise_outside_imports(self, frame: FrameType | None, patient: bool) -> None:
        if patient and importing(frame):
            self.try_again()
            return
        self.waits = False
        raise KeyboardInterrupt

    def try_again(self) -> None:
        self.waits = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN)

    def unraisable(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt) and self.number:
            self.try_again()
        else:
            self.hook(lost)


def importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def handled_interrupts() -> Iterator[Interrupts]:
    """Inside the block an interrupt raises KeyboardInterrupt; if code swallowed it, it is raised again at the end.

    A signal that is already handled or ignored, as by `nohup`, is left alone; so is everything outside the main
    thread, where Python handles no signals.
    """
    interrupts = Interrupts()
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number, usual in DEFAULTS.items() if main and signal.getsignal(number) == usual]
    if not ours:
        yield interrupts
        return
    alarm = signal.signal(signal.SIGALRM, interrupts.due)
    sys.unraisablehook = interrupts.unraisable
    for number in ours:
        signal.signal(number, interrupts.arrived)
    try:
        yield interrupts
    except Exception as error:  # an interrupt inside a compiled import may come out as anything; all else is raised on
        if interrupts.number:  # raised in place of an interrupt, by an import or by the program
            raise KeyboardInterrupt from error
        raise
    finally:
        interrupts.waits = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        for number in ours:
            signal.signal(number, DEFAULTS[number])
        sys.unraisablehook = interrupts.hook
