"""Times a bundle's backends: the same decode on every arm, outputs compared first, calls interleaved.

encoder      session.encode: once per batch of sources
step         session.step as it is halfway through a decode: once per token
end_to_end   `generate` to exactly `target` tokens: what a user waits for, split into its pieces (timed_decode.py)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from seq2engine.common.progress import Progress, silent
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.runtime.encoder_inputs import encoder_inputs, listed_sources
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session

from .arms import Sessions, blaming, costs_of_arms, open_arms, quality_of_arms
from .cases import Case, Sources, sources_for
from .ceiling import ceiling_of
from .checks import check_bench
from .machine import busy_neighbours, environment, load_of_others
from .natural.result import Workload
from .options import BenchOptions, Plan, plan_from_options
from .peers.arms import PeerDecode, Peers, arm_of_peer, decode_with_peers, open_peers
from .result import PARTS, ArmResult, BenchResult, CaseResult, Measure
from .scenarios import run_scenarios
from .timed_decode import (
    PIECES,
    FixedDecode,
    Split,
    Tokens,
    best_tokens,
    case_options,
    fixed_decode,
    fixed_length,
    repeated_step,
    timed_decode,
)
from .timers.natural import NaturalTimer
from .timing import Samples, interleaved, ratio_interval

WARMUP = 2
LEAD = 0.02  # seconds of untimed calls: right after another arm, and after a rest, a call takes longer
REST = 0.05  # seconds of rest: ONNX Runtime's idle threads spin for some 40 ms and would slow down the next arm


def bench_bundle(
    bundle: Bundle | str | os.PathLike[str],
    options: BenchOptions | None = None,
    progress: Progress = silent,
    keep: Callable[[BenchResult], object] = lambda result: None,
) -> BenchResult:
    """Times what the options ask for. An arm that fails ends the run.

    `keep` gets the finished cases after each of them, as a result that is marked as interrupted: what is left of a run
    that does not come to its end.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    plan = plan_from_options(opened, options or BenchOptions())
    check_bench(plan)
    asked = plan.options
    if asked.references is not None:
        opened.tokenizer()  # raises where there is none
    result = empty_result(plan)
    with ExitStack() as stack:
        stack.enter_context(busy_neighbours(asked.neighbours))
        peers = stack.enter_context(open_peers(asked.peers, opened, plan.threads, progress, asked.environments))
        arms = open_arms(stack, plan, progress)
        # Without worker threads no thread spins, so there is nothing to wait for.
        rest = REST if plan.threads > 1 and len(arms.sessions) + len(peers.running) > 1 else 0.0
        timer = CaseTimer(plan, peers, rest, progress)
        natural = NaturalTimer(plan, arms, peers, rest, progress)
        steps: list[Case | Workload] = [*plan.cases, *asked.natural]
        for number, step in enumerate(steps, start=1):
            if isinstance(step, Workload):
                result = dataclasses.replace(result, natural=(*result.natural, natural.result_of(step)))
            else:
                done = (*result.cases, timer.result_of(step, arms.for_case(step)))
                result = dataclasses.replace(result, cases=done)
            timed = arms.about | {name: arm_of_peer(peers, name) for name in peers.timed}
            result = dataclasses.replace(result, arms=timed, failed=dict(peers.failed))
            keep(dataclasses.replace(result, interrupted=f"interrupted after {number} of {len(steps)} cases"))
        scenarios = run_scenarios(plan.scenarios, arms.sessions, plan.cases, arms.speculative, progress)
        quality = {} if asked.natural else quality_of_arms(plan, arms.sessions, progress)
    return dataclasses.replace(
        result,
        arms=result.arms | costs_of_arms(plan, arms, progress),
        quality=quality,
        scenarios=scenarios,
        environment=environment(plan.threads, result.environment.load_before, asked.neighbours),
        made_at=now_text(),
    )


def empty_result(plan: Plan) -> BenchResult:
    """A result without measurements: model, machine, ceiling."""
    load = load_of_others()
    return BenchResult(
        bundle=str(plan.bundle.root),
        checkpoint_sha256=plan.bundle.manifest.checkpoint_sha256,
        model=dataclasses.asdict(plan.bundle.config),
        cache_form=plan.bundle.cache_form,
        arms={},
        failed={},
        cases=(),
        quality={},
        ceiling=None if plan.options.quick else ceiling_of(plan.threads),
        scenarios=(),
        environment=environment(plan.threads, load, plan.options.neighbours),
        rounds=plan.options.rounds,
        warmup=WARMUP,
        seed=plan.options.seed,
        made_at=now_text(),
    )


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Outputs:
    """The outputs of every arm in a case: with free and with fixed length, and the agreement of peers."""

    usual: dict[str, Tokens]
    fixed: dict[str, FixedDecode]
    theirs: dict[str, PeerDecode]
    agreed: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class CaseTimer:
    """Decodes a case on every arm and compares, then times its parts, of which peers have only the whole."""

    plan: Plan
    peers: Peers
    rest: float  # seconds before every timed call
    progress: Progress

    def result_of(self, case: Case, sessions: Sessions) -> CaseResult:
        first = next(iter(sessions))
        sources = sources_for(case, self.plan.bundle.config, self.plan.options.seed)
        alone = not self.plan.options.peers
        options = case_options(sessions[first], case, alone, self.plan.forced_bos)
        outputs = self.outputs_of(case, sessions, sources, options)
        times, splits = self.times_of(case, sessions, sources, options, outputs)
        self.peers.take_memory(outputs.theirs)
        ours = {
            name: ArmResult(
                equal=count_equal(outputs.usual[name], outputs.usual[first]),
                equal_timed=count_equal(outputs.fixed[name].tokens, outputs.fixed[first].tokens),
                parts={part: measure(times[part], name, first, case, part) for part in PARTS},
                cache=outputs.fixed[name].counts,
                split={piece: Samples(tuple(split[piece] for split in splits[name])) for piece in PIECES},
            )
            for name in sessions
        }
        others = {
            name: ArmResult(
                *outputs.agreed[name],
                parts={"end_to_end": measure(times["end_to_end"], name, first, case, "end_to_end")},
                setting=decode.worker.setting,
            )
            for name, decode in outputs.theirs.items()
        }
        return CaseResult(case, ours | others)

    def outputs_of(self, case: Case, sessions: Sessions, sources: Sources, options: SearchOptions) -> Outputs:
        usual: dict[str, Tokens] = {}
        fixed: dict[str, FixedDecode] = {}
        stage = f"bench: {case.name}, outputs"
        for done, (name, session) in enumerate(sessions.items()):
            self.progress(stage, done / len(sessions))
            with blaming(name, f"case {case.name}"):
                usual[name] = best_tokens(generate(session, sources, options))
                fixed[name] = fixed_decode(session, sources, options)
        theirs = decode_with_peers(self.peers, case, sources)
        agreed = agreement(theirs, next(iter(sessions.values())), sources, options)
        self.progress(stage, 1.0)
        return Outputs(usual, fixed, theirs, agreed)

    def times_of(
        self,
        case: Case,
        sessions: Sessions,
        sources: Sources,
        options: SearchOptions,
        outputs: Outputs,
    ) -> tuple[dict[str, dict[str, Samples]], dict[str, list[Split]]]:
        """Samples by part and arm, and the split of every timed call end to end."""
        config = self.plan.bundle.config
        inputs = encoder_inputs(listed_sources(sources, config), config)
        trail = next(iter(outputs.fixed.values())).trail
        calls: dict[str, dict[str, Callable[[], object]]] = {part: {} for part in PARTS}
        splits: dict[str, list[Split]] = {name: [] for name in sessions}

        def keep_split(name: str, split: Split) -> None:
            if name in splits:  # peers have none
                splits[name].append(split)

        for name, session in sessions.items():
            with blaming(name, f"case {case.name}"):
                calls["encoder"][name] = partial(session.encode, *inputs)
                calls["step"][name] = repeated_step(session, *inputs, options, trail)
                calls["end_to_end"][name] = partial(timed_decode, session, sources, fixed_length(options))
        calls["end_to_end"] |= {name: each.worker.run for name, each in outputs.theirs.items()}
        rounds, times = self.plan.options.rounds, {}
        for part in PARTS:
            stage, after = f"bench: {case.name}, {part}", keep_split if part == "end_to_end" else None
            times[part] = interleaved(calls[part], rounds, WARMUP, self.progress, stage, LEAD, self.rest, after=after)
        return times, splits


def agreement(
    theirs: dict[str, PeerDecode], session: Session, sources: Sources, options: SearchOptions
) -> dict[str, tuple[int, int]]:
    """For how many sources each peer's output equals ours with its beam search: with free and with fixed length.

    No peer can ignore the end token; at a fixed length it is forbidden until the last position instead, and of audio
    at that one, too.
    """
    forced: dict[str, Any] = {"min_length": options.max_length}
    if session.config.takes_audio:
        forced = {"banned": ((session.config.end_id,),), "ignore_eos": True}
    ours: dict[tuple[str, bool], Tokens] = {}
    for style in dict.fromkeys(decode.beam_style for decode in theirs.values()):
        for fixed in (False, True):
            asked = dataclasses.replace(options, beam_style=style, **(forced if fixed else {}))
            ours[style, fixed] = best_tokens(generate(session, sources, asked))
    return {
        name: (
            count_equal(decode.usual, ours[decode.beam_style, False]),
            count_equal(decode.fixed, ours[decode.beam_style, True]),
        )
        for name, decode in theirs.items()
    }


def measure(times: dict[str, Samples], name: str, first: str, case: Case, part: str) -> Measure:
    tokens = {"encoder": case.batch * case.source, "step": case.batch, "end_to_end": case.batch * case.target}
    return Measure(times[name], tokens[part], ratio_interval(times[first], times[name]))


def count_equal(tokens: Tokens, wanted: Tokens) -> int:
    return sum(mine == theirs for mine, theirs in zip(tokens, wanted, strict=True))
