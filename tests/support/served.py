"""A `seq2engine serve` process, on a port of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOON = 120  # seconds


class Served:
    def __init__(self, bundle: Path, *flags: str, environment: dict[str, str] | None = None):
        command = [sys.executable, "-m", "seq2engine", "serve", str(bundle), "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is None:
            self.process.kill()
            raise RuntimeError(f"no address in {line!r}: {self.process.communicate()[1]}")
        self.address, self.port = found.group(), int(found.group(1))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ended(self) -> tuple[int, str]:
        """Exit code and error output, once it has ended."""
        error = self.process.communicate(timeout=SOON)[1]
        return self.process.returncode, error
