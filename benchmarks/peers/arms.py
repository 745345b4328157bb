"""Peers as arms of a benchmark: loaded with our weights, each with its best setting for every case."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle

from ..cases import Case, Sources
from ..result import Arm
from .processes import ENVIRONMENTS, Peer, PeerKind, Worker, open_worker, peers_from_names

Found = TypeVar("Found")
Tokens = list[tuple[int, ...]]
WIDTHS = {"float32": "fp32", "bf16": "bf16", "int8": "int8"}  # peers' names of precisions -> ours


@dataclass
class Peers:
    """The peers that run, and those that do not, with the reason.

    With "all", a peer that fails is listed as failed; one that was named ends the run.
    """

    tolerant: bool = False
    kinds: dict[str, PeerKind] = field(default_factory=dict)
    running: dict[str, Peer] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    timed: dict[str, list[Worker]] = field(default_factory=dict)  # the workers that were some case's best

    def attempt(self, name: str, do: Callable[[], Found]) -> Found | None:
        """What `do` gives, or None if the peer has failed."""
        try:
            return do()
        except SessionError as error:
            if not self.tolerant:
                raise
            self.failed[name] = str(error)
            self.running.pop(name, None)
            return None

    def take_memory(self, decodes: dict[str, PeerDecode]) -> None:
        """Notes the peak memory of the workers that were just timed: a peer may die before the end of the run."""
        for decode in decodes.values():
            decode.worker.peak = decode.worker.peak_bytes()


@dataclass(frozen=True)
class PeerDecode:
    """A peer's outputs in a case, and its best worker, ready to decode it again."""

    worker: Worker
    beam_style: str
    usual: Tokens
    fixed: Tokens


@contextmanager
def open_peers(
    names: Sequence[str],
    bundle: Bundle,
    threads: int,
    progress: Progress = silent,
    environments: Path = ENVIRONMENTS,
) -> Iterator[Peers]:
    """Loads the bundle's reference weights into every peer, with every setting worth trying."""
    peers = Peers(tolerant=list(names) == ["all"])
    if not names:
        yield peers
        return
    from seq2engine.model.checkpoint import load_checkpoint

    from .hugging_face_from_model import hugging_face_from_model

    kinds = peers.kinds = peers_from_names(names, threads, environments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bundle.reference_path()  # checks the hash
        hugging_face_from_model(load_checkpoint(bundle.root), folder)
        for done, (name, kind) in enumerate(kinds.items()):
            progress("bench: load peers", done / len(kinds))
            loaded = peers.attempt(name, lambda name=name, kind=kind: loaded_peer(name, kind, folder, environments))  # type: ignore[misc]
            if loaded is not None:
                for worker in loaded.workers:
                    stack.enter_context(worker)
                peers.running[name] = loaded
        progress("bench: load peers", 1.0)
        yield peers


def loaded_peer(name: str, kind: PeerKind, folder: Path, environments: Path) -> Peer:
    """The first process converts the model if needed and ends, because its memory is not that of decoding."""
    open_worker(name, kind, kind.settings[0], folder, environments).__exit__()
    workers: list[Worker] = []
    try:
        for settings in kind.settings:
            workers.append(open_worker(name, kind, settings, folder, environments))
    except SessionError:
        for worker in workers:
            worker.__exit__()
        raise
    return Peer(kind, workers)


def decode_with_peers(peers: Peers, case: Case, sources: Sources) -> dict[str, PeerDecode]:
    """Every peer's outputs in a case, after its best setting for it was found by trial."""
    found = {}
    for name, peer in list(peers.running.items()):
        decode = peers.attempt(name, lambda peer=peer: decode_with_peer(peer, case, sources))  # type: ignore[misc]
        if decode is not None:
            found[name] = decode
            timed = peers.timed.setdefault(name, [])
            if decode.worker not in timed:
                timed.append(decode.worker)
    return found


def decode_with_peer(peer: Peer, case: Case, sources: Sources) -> PeerDecode:
    first = peer.workers[0]
    first.prepare(sources, case.beam, case.target, forced=False)
    first.run()
    usual = first.tokens()
    for worker in peer.workers:
        worker.prepare(sources, case.beam, case.target, forced=True)
    best = peer.best_for(seconds_of)
    return PeerDecode(best, peer.kind.beam_style, usual, best.tokens())


def arm_of_peer(peers: Peers, name: str) -> Arm:
    """A peer's arm from those of its processes that were timed."""
    workers = peers.timed[name]
    return Arm(
        backend=name,
        precision=WIDTHS[peers.kinds[name].precision],
        bytes=max(worker.bytes for worker in workers),
        load_ms=1000 * max(worker.load_seconds for worker in workers),
        version=workers[0].version,
        peer=True,
        peak_bytes=max(worker.peak for worker in workers),
    )


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
