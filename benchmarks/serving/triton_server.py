"""Starts the tritonserver of nvidia-pytriton on a model repository; made with: make .peers/triton/installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..peers.processes import ENVIRONMENTS

HOME = ENVIRONMENTS.absolute() / "triton"
PYTHON = HOME / "bin" / "python"
MISSING = f"no tritonserver in {HOME}; make it with: make .peers/triton/installed"
READY = 300  # seconds
PORTS = 3


def packages() -> Path:
    return next((HOME / "lib").glob("python3*/site-packages"))


def present() -> bool:
    return PYTHON.exists() and (HOME / "lib").is_dir() and (packages() / "pytriton" / "tritonserver").is_dir()


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM raises SystemExit, so that a `finally` ends the server, which has its own session."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TritonServer:
    """A server process; `log` is what it has written so far."""

    def __init__(self, repository: Path, work: Path, *models: str):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        home = packages() / "pytriton" / "tritonserver"
        backends = work / "backends"
        if not backends.exists():
            shutil.copytree(home / "backends", backends)
            shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
        self.http, self.grpc, self.metrics = free_ports(PORTS)
        self.path = work / f"triton-{self.http}.log"
        libraries = f"{sysconfig.get_config_var('LIBDIR')}:{packages() / 'nvidia_pytriton.libs'}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "PATH": path}
        command = [
            str(home / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in models),
            *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
            *(f"--{name}-port={getattr(self, name)}" for name in ("http", "grpc", "metrics")),
            "--allow-gpu-metrics=false",
            "--exit-timeout-secs=120",
        ]
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def get(self, path: str, port: int | None = None) -> str:
        address = f"http://127.0.0.1:{port or self.http}/{path}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())

    def wait(self) -> TritonServer:
        """Until it is ready; one that ends before is an error with its log."""
        for _ in range(READY * 10):
            if self.process.poll() is not None:
                raise RuntimeError(f"tritonserver ended with {self.process.returncode}\n{self.log[-4000:]}")
            try:
                self.get("v2/health/ready")
                self.get("metrics", self.metrics)  # whose port opens a little later
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            else:
                return self
        raise RuntimeError(f"tritonserver is not ready after {READY} s\n{self.log[-4000:]}")

    def cpu_seconds(self) -> float:
        """Of the server and of its models' processes so far, all of them in one session. Linux only."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(fields[3]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def ended(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def kill(self) -> None:
        """The server and its stub processes, by their group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait(20)
