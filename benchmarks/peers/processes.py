"""Peers as subprocesses: each in its own environment (`make peers`), with requests over a pipe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from seq2engine.errors import SessionError, UsageError
from seq2engine.runtime.encoder_inputs import FeatureSource

from ..cases import Sources

WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENTS = Path(".peers")  # where `make peers` puts them
FEATURES = "features.npy"
TRIALS = 3  # decodes with every setting of a peer, to find its best: the first also allocates and compiles
LONG = 2.0  # seconds: a decode that takes longer is tried once, as allocating is a small part of it


@dataclass(frozen=True)
class PeerKind:
    """A peer in a precision. All `settings` are tried; it is timed with the best."""

    worker: str
    environment: str
    precision: str
    beam_style: str  # its style of beam search
    settings: tuple[dict[str, Any], ...]


def peer_kinds(threads: int) -> dict[str, PeerKind]:
    """All peers by name, for that many threads."""
    alone = ({"threads": threads},)

    def ctranslate2(precision: str) -> PeerKind:
        ways = {(1, 1), (1, threads), (threads, 1)}  # on few cores its own threads can be slower than one
        settings = [
            {"precision": precision, "inter_threads": inter, "intra_threads": intra} for inter, intra in sorted(ways)
        ]
        return PeerKind("ctranslate2", "transformers", precision, "ctranslate2", tuple(settings))

    def openvino(precision: str) -> PeerKind:
        settings = ({"threads": threads, "precision": precision},)
        return PeerKind("openvino", "openvino", precision, "huggingface", settings)

    return {
        "ctranslate2 float32": ctranslate2("float32"),
        "ctranslate2 int8": ctranslate2("int8"),
        "transformers": PeerKind("hugging_face", "transformers", "float32", "huggingface", alone),
        "transformers compiled": PeerKind(
            "hugging_face", "transformers", "float32", "huggingface", ({"threads": threads, "compiled": True},)
        ),
        "optimum": PeerKind("optimum", "optimum", "float32", "huggingface", alone),
        "openvino float32": openvino("float32"),
        "openvino bf16": openvino("bf16"),
        "openvino int8": openvino("int8"),
    }


def peers_from_names(names: Sequence[str], threads: int, environments: Path = ENVIRONMENTS) -> dict[str, PeerKind]:
    """The peers asked for, all of them installed; all problems are in one error, before anything runs."""
    if problems := peer_problems(names, threads, environments):
        raise UsageError("; ".join(problems))
    known = peer_kinds(threads)
    return {name: known[name] for name in wanted_peers(names, known)}


def wanted_peers(names: Sequence[str], known: Mapping[str, PeerKind]) -> list[str]:
    return list(known) if list(names) == ["all"] else list(names)


def peer_problems(names: Sequence[str], threads: int, environments: Path = ENVIRONMENTS) -> list[str]:
    known = peer_kinds(threads)
    chosen = wanted_peers(names, known)
    found = []
    if unknown := [name for name in chosen if name not in known]:
        found.append(f"unknown peer {', '.join(unknown)}, expected all or some of {', '.join(known)}")
    kinds = [known[name] for name in chosen if name in known]
    if missing := sorted({kind.environment for kind in kinds if not python_of(environments, kind).exists()}):
        found.append(f"{environments} has no {', '.join(missing)}; install the peers with: make peers")
    return found


def python_of(environments: Path, kind: PeerKind) -> Path:
    return environments / kind.environment / "bin" / "python"


@dataclass
class Worker(AbstractContextManager["Worker"]):
    """One peer with one setting, loaded. Its process ends with the `with`."""

    name: str
    process: subprocess.Popen[str]
    complaints: Any  # the file its standard error goes to
    settings: dict[str, Any]
    folder: Path  # of the model
    load_seconds: float = 0.0
    version: str = ""
    bytes: int = 0  # of the files it loaded
    peak: int = 0  # bytes of memory, when last asked

    @property
    def setting(self) -> str:
        """Its settings as text."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items() if name != "precision")

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SessionError(f"{self.name} died: {self.last_complaint()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SessionError(f"{self.name} failed: {answer['error']}")
        return answer

    def last_complaint(self) -> str:
        self.complaints.seek(0)
        lines = [line for line in self.complaints.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.process.wait()}, and no error message"

    def prepare(self, sources: Sources, beam: int, length: int, forced: bool) -> None:
        """What `run` decodes from now on: exactly `length` tokens where forced, else at most."""
        given: Any = sources
        if isinstance(sources[0], FeatureSource):  # features go by a file
            given = FEATURES
            rows = np.stack([source.features for source in sources])
            np.save(self.folder / FEATURES, np.ascontiguousarray(rows))  # numpy would keep another order of one source
        self.ask(do="prepare", sources=given, beam=beam, length=length, forced=forced)

    def run(self) -> None:
        self.ask(do="run")

    def tokens(self) -> list[tuple[int, ...]]:
        return [tuple(row) for row in self.ask(do="tokens")["tokens"]]

    def peak_bytes(self) -> int:
        return int(self.ask(do="memory")["bytes"])

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.complaints.close()


def open_worker(
    name: str, kind: PeerKind, settings: dict[str, Any], model: Path, environments: Path = ENVIRONMENTS
) -> Worker:
    """Starts a peer's process and loads the model folder that `hugging_face_from_model` wrote."""
    complaints = TemporaryFile()  # noqa: SIM115 - the worker owns it
    process = subprocess.Popen(
        [python_of(environments, kind), WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
    )
    worker = Worker(name, process, complaints, settings, model)
    try:
        loaded = worker.ask(do="load", peer=kind.worker, folder=str(model), settings=settings)
    except BaseException:
        worker.__exit__()
        raise
    worker.load_seconds, worker.version, worker.bytes = loaded["seconds"], loaded["version"], loaded["bytes"]
    return worker


@dataclass
class Peer:
    """A peer with all its settings loaded."""

    kind: PeerKind
    workers: list[Worker] = field(default_factory=list)

    def best_for(self, seconds: Callable[[Callable[[], object]], float]) -> Worker:
        """The worker with the fastest prepared decode, which it has run; `seconds` times one call.

        Workers take turns: in a slow minute all are slow.
        """
        if len(self.workers) == 1:
            self.workers[0].run()
            return self.workers[0]
        least = [0.0] * len(self.workers)
        for trial in range(TRIALS):
            for number, worker in enumerate(self.workers):
                if least[number] < LONG:
                    taken = seconds(worker.run)
                    least[number] = min(least[number], taken) if trial else taken
        return self.workers[least.index(min(least))]
