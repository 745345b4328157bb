"""Times every arm on real sentences, each decoded to its end token: one call per batch, arms take turns.

A turn is some calls, a quarter of a second: sentences come to a model one after another, and find its weights and code
where the one before left them.

Sentences are in file order, so batches have mixed lengths. The quality of an arm is measured on the outputs of its
timed calls. If CTranslate2 is among the peers, our arms use its beam search: the same beams and the
same stopping rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from seq2engine.common.progress import Progress
from seq2engine.model.tokenizers.base import Tokenizer
from seq2engine.runtime.generate import generate
from seq2engine.runtime.quality.metrics import References
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session

from ..arms import Arms, blaming
from ..cases import Case
from ..natural.likeness import likeness_of
from ..natural.result import NaturalArm, NaturalResult, Workload, whole_ratio
from ..options import Plan
from ..peers.arms import Peers, seconds_of
from ..peers.processes import Worker
from ..timed_decode import Tokens, best_tokens, case_options
from ..timing import interleaved

TURN = 0.25  # seconds of the fastest arm
LONGEST = 256  # output tokens, CTranslate2's own maximum; real sentences end long before it
PEERS_STYLE = "ctranslate2"
Group = list[list[int]]


class Run(Protocol):
    """An arm that decodes one group after another."""

    @property
    def setting(self) -> str: ...

    def prepare(self, group: Group) -> None: ...

    def run(self) -> object: ...

    def tokens(self) -> Tokens: ...


@dataclass
class OwnRun:
    session: Session
    options: SearchOptions
    setting: str = ""
    group: Group = field(default_factory=list)
    output: Tokens = field(default_factory=list)

    def prepare(self, group: Group) -> None:
        self.group = group

    def run(self) -> None:
        self.output = best_tokens(generate(self.session, self.group, self.options))

    def tokens(self) -> Tokens:
        return self.output


@dataclass
class PeerRun:
    worker: Worker
    options: SearchOptions

    @property
    def setting(self) -> str:
        return self.worker.setting

    def prepare(self, group: Group) -> None:
        self.worker.prepare(group, self.options.beam, self.options.max_length, forced=False)

    def run(self) -> None:
        self.worker.run()

    def tokens(self) -> Tokens:
        return self.worker.tokens()


@dataclass(frozen=True)
class NaturalTimer:
    """Runs workloads over the references of a plan."""

    plan: Plan
    arms: Arms
    peers: Peers
    rest: float  # seconds before every timed call
    progress: Progress

    def result_of(self, workload: Workload) -> NaturalResult:
        references, tokenizer = self.plan.options.references, self.plan.bundle.tokenizer()
        assert references is not None
        groups = groups_of(references, workload, tokenizer, self.plan)
        runs = {**self.own_runs(workload), **self.peer_runs(workload, groups)}
        outputs: dict[str, Tokens] = {name: [] for name in runs}

        def before(name: str, number: int) -> None:
            if number:
                outputs[name] += runs[name].tokens()
            runs[name].prepare(groups[number])

        stage = f"bench: {workload}, to their ends"
        calls = {name: run.run for name, run in runs.items()}
        times = interleaved(calls, len(groups), 1, self.progress, stage, rest=self.rest, turn=TURN, before=before)
        for name, run in runs.items():
            outputs[name] += run.tokens()
        self.take_memory(runs)
        right = list(references.values())[: len(groups) * workload.batch]
        texts = {name: [tokenizer.decode_target(row) for row in rows] for name, rows in outputs.items()}
        first = next(iter(runs))
        return NaturalResult(
            workload,
            {
                name: NaturalArm(
                    times[name],
                    sum(map(len, outputs[name])),
                    likeness_of(texts[name], texts[first], right),
                    whole_ratio(times[first], times[name]),
                    run.setting,
                )
                for name, run in runs.items()
            },
        )

    def options(self, session: Session, workload: Workload) -> SearchOptions:
        config = session.config
        case = Case(str(workload), workload.batch, workload.beam, config.max_source, min(LONGEST, config.max_target))
        options = case_options(session, case, not self.plan.options.peers, self.plan.forced_bos)
        theirs = any(peer.kind.beam_style == PEERS_STYLE for peer in self.peers.running.values())
        return dataclasses.replace(options, beam_style=PEERS_STYLE) if theirs else options

    def own_runs(self, workload: Workload) -> Mapping[str, Run]:
        rows = Case(str(workload), workload.batch, workload.beam, 1, 1)
        sessions = self.arms.for_case(rows)
        return {name: OwnRun(session, self.options(session, workload)) for name, session in sessions.items()}

    def peer_runs(self, workload: Workload, groups: Sequence[Group]) -> dict[str, Run]:
        """Every peer with its best setting for the workload, by trial on the first group."""
        options = self.options(next(iter(self.arms.sessions.values())), workload)
        found: dict[str, Run] = {}
        for name, peer in list(self.peers.running.items()):
            with blaming(name, str(workload)):
                for worker in peer.workers:
                    PeerRun(worker, options).prepare(groups[0])
                best = peer.best_for(seconds_of)
            found[name] = PeerRun(best, options)
            timed = self.peers.timed.setdefault(name, [])
            timed += [] if best in timed else [best]
        return found

    def take_memory(self, runs: Mapping[str, Run]) -> None:
        for run in runs.values():
            if isinstance(run, PeerRun):
                run.worker.peak = run.worker.peak_bytes()


def groups_of(references: References, workload: Workload, tokenizer: Tokenizer, plan: Plan) -> list[Group]:
    """The sentences of every call, as ids."""
    texts = list(references)[: workload.calls(len(references)) * workload.batch]
    ids = [tokenizer.encode_source(text, plan.options.source_language) for text in texts]
    return [ids[first : first + workload.batch] for first in range(0, len(ids), workload.batch)]
