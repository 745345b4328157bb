"""Compares opened sessions: tensors of the encoder and of teacher-forced steps, free decodes, batch invariance.

Everything is run in batches of mixed lengths and compared at once, so memory does not grow with the sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import ConfigError, GraphError

from ..encoder_inputs import listed_sources
from ..model_options import measured_options, options_left_out
from ..numerics.budgets import TensorResult
from ..requests import check_request
from ..search.options import SearchOptions
from ..session import Session
from ..text.sources import compared_sources, tree_sources
from .coverage.branches import branch_results
from .coverage.lookups import lookup_results
from .levels.batch_invariance import invariance_of
from .levels.decodes import Arm, Outputs, compare_decodes, search_name
from .levels.divergence import Judge
from .levels.result import ParityResult, Sampled, Stopped
from .levels.sanity import decode_doubt
from .levels.step_patterns import compare_step_patterns
from .levels.tensors import compare_tensors, usual_spread
from .options import ParityOptions, beam_of
from .sessions import Compared


@dataclass(frozen=True)
class Plan:
    """The inputs of a comparison. Decodes use all `sources`, tensors a `sample`. The `lasting` ones, given by their
    indices in the sample, are run up to the last step.
    """

    sources: list[list[int]]
    sample: list[list[int]]
    lasting: list[int]
    searches: list[SearchOptions]
    longest: int
    beam: int
    batch: int

    @property
    def few(self) -> list[list[int]]:
        return [self.sample[place] for place in self.lasting]

    def sampled(self, session: Session) -> Sampled:
        trees = min(len(self.lasting), tree_sources(session.config, self.beam))
        return Sampled(len(self.sample), len(self.sources), len(self.lasting), self.longest, trees)


def plan_of(
    compared: Sequence[Compared],
    baseline: Session,
    sources: Sequence[Sequence[int]],
    options: ParityOptions,
    forced_bos: int | None = None,
) -> Plan:
    """Checks the request for all sessions; batches are no larger than any of them takes."""
    if options.batch < 1:
        raise ConfigError(f"batch {options.batch}, expected at least 1")
    candidate = compared[0].candidate
    everyone = [*(one.candidate for one in compared), baseline]
    most = min(session.limits.target for session in everyone) - len(candidate.defaults.prompt)
    longest = longest_of(most, options.max_length)
    beam = beam_of(options.beam, candidate.defaults)
    searches = searches_of(candidate, longest, beam, forced_bos)
    rows, batch = listed_sources(sources, candidate.config), options.batch
    for session in everyone:
        check_request(dataclasses.replace(session.limits, batch=None), session.config, rows, searches[-1])
        batch = min(batch, session.limits.batch or batch)
    limit = min(session.limits.source for session in everyone)
    sample, lasting = compared_sources(rows, candidate.config, limit)
    return Plan(rows, sample, lasting, searches, longest, beam, batch)


def parity_of_sessions(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    options: ParityOptions | None = None,
) -> ParityResult:
    """One candidate, its decodes against the reference's."""
    compared = [Compared(oracle, reference, candidate)]
    return parities_of_sessions(compared, reference, "PyTorch", sources, options or ParityOptions())[0][0]


def parities_of_sessions(
    compared: Sequence[Compared],
    baseline: Session,
    name: str,
    sources: Sequence[Sequence[int]],
    options: ParityOptions,
    progress: Progress = silent,
    forced_bos: int | None = None,
) -> tuple[list[ParityResult], Outputs]:
    """Candidates against one baseline of this name: their results, and the outputs of all sides.

    Of the options, `beam`, `max_length` and `batch` apply. `forced_bos` begins every decode (None: the model's own).
    """
    plan = plan_of(compared, baseline, sources, options, forced_bos)
    pairs = [compared_or_stopped(one, plan, name, progress) for one in compared]
    results, arms = [result for result, _ in pairs], [arm for _, arm in pairs if arm is not None]
    running = [i for i, (_, arm) in enumerate(pairs) if arm is not None]
    outputs = Outputs()
    for search in plan.searches if arms else ():
        decodes, expected = compare_decodes(baseline, name, arms, plan.sources, search, plan.batch, progress)
        outputs[name, search_name(search)] = expected
        for i, decode in zip(running, decodes, strict=True):
            excuse = compared[i].reference if compared[i].excused else None
            doubt = decode_doubt(decode, search, plan.sources, expected, excuse, plan.batch) if decode else None
            doubts = (*results[i].doubts, *(() if doubt is None else (doubt,)))
            results[i] = dataclasses.replace(results[i], decodes=(*results[i].decodes, decode), doubts=doubts)
    outputs.update({(arm.name, search): found for arm in arms for search, found in arm.outputs.items()})
    return results, outputs


def compared_or_stopped(one: Compared, plan: Plan, name: str, progress: Progress) -> tuple[ParityResult, Arm | None]:
    """A candidate that cannot run a step gets a result with the error."""
    try:
        return compared_tensors(one, plan, name, progress)
    except GraphError as error:
        candidate = one.candidate
        level = "encoder" if error.graph == "encoder" else "steps"
        return (
            ParityResult(
                candidate.backend,
                candidate.precision,
                candidate.cache_form,
                len(plan.sources),
                plan.longest,
                (),
                (),
                baseline=name,
                stopped=stopped_by(error, level),
            ),
            None,
        )


def stopped_by(error: GraphError, level: str) -> Stopped:
    return Stopped(level, f"{error.graph or 'the session'} stopped: {error}", error.graph, error.node)


def compared_tensors(one: Compared, plan: Plan, name: str, progress: Progress) -> tuple[ParityResult, Arm]:
    """A result without decodes, and the arm that will decode."""
    greedy = plan.searches[0]
    stopped: Stopped | None = None
    covered: tuple[TensorResult, ...] = ()
    try:
        covered = (*lookup_results(*one.three), *branch_results(*one.three, plan.few))
    except GraphError as error:
        stopped = stopped_by(error, "coverage")
    level = compare_tensors(*one.three, plan.sample, plan.lasting, greedy, plan.longest, plan.batch, progress)
    patterns = compare_step_patterns(*one.three, plan.few, plan.longest, plan.beam, plan.batch)
    usual = level.usual if one.judges is None else usual_spread(*one.judges, plan.few, greedy, plan.batch)
    result = ParityResult(
        backend=one.candidate.backend,
        precision=one.candidate.precision,
        cache_form=one.candidate.cache_form,
        sources=len(plan.sources),
        max_length=plan.longest,
        tensors=(*covered, *level.tensors, *patterns, level.at_length),
        decodes=(),
        invariance=invariance_of(*one.three, plan.few, plan.longest, plan.batch),
        error_growth=level.error_growth,
        next_token=level.next_token,
        baseline=name,
        sampled=plan.sampled(one.candidate),
        stopped=stopped,
        left_out=options_left_out(one.candidate),
    )
    return result, Arm(one.candidate, Judge(*(one.judges or one.three[:2]), plan.batch, usual))


def searches_of(session: Session, longest: int, beam: int, forced_bos: int | None = None) -> list[SearchOptions]:
    """Greedy and beam search as `run` does them, with the model's own defaults."""
    return [measured_options(session, width, longest, forced_bos) for width in sorted({1, beam})]


def longest_of(most: int, max_length: int | None) -> int:
    """How many tokens are decoded: as many as asked for, or 64 if the model can decode as many."""
    return min(most, SearchOptions.max_length) if max_length is None else max_length
