"""Running for parity: candidates beside PyTorch at their precision (the reference) and in fp64 (the oracle).

    the graphs               checker, contract, census
    sources -> encoder           every tensor of the encoder, real positions only
            -> teacher forcing   the oracle's own outputs fed step by step: logits of each step, then the caches;
                                 then beams that change their parents, rows that stand at different steps, and steps
                                 up to the maximum length, layer by layer
            -> free decodes      greedy and beam against a speaker (PyTorch in fp32, or another), token by token
            -> quality           where references are given
            -> invariance        a sample alone, in other batches, with more padding
            -> the hunt          where something is wrong: the first tensor inside the graphs that is, and why

Everything is run in batches of mixed lengths and compared at once, so memory does not grow with the sources.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from seq2engine.progress import Progress, silent

from ..errors import ConfigError
from ..export.bundle import Bundle, open_bundle
from ..export.contract import oracle_of
from ..export.default_precision import default_precision
from ..export.profiles import Workload
from .against import Against, Speaker, speaker_of
from .bootstrap import Rate, check_metrics, rates_from_outputs
from .company import companies_of
from .defaults import measured_options
from .divergence import Judge
from .drift import drift_of
from .drives import compare_drives
from .free_decodes import Arm, Said, compare_decodes, search_name
from .graph_level import graphs_of
from .hunt import finding_of
from .parity_result import ParityResult
from .parity_sources import FEWEST_SOURCES, TENSOR_SOURCES, random_sources, sample_of, sources_of
from .quality import Quality, References, quality_from_outputs
from .search import SearchOptions
from .session import Session, check_request, open_session
from .tensor_level import compare_tensors, usual_spread


@dataclass(frozen=True)
class ParityOptions:
    """What is compared, and how. `sources` are ids; without them `count` random ones of `seed` are drawn.

    With `references` (texts and what should be said of them) their texts are the sources, and both sides' scores in
    these `metrics` are part of the result. Decodes are compared with PyTorch's in fp32, or with those of `against`.
    `command` is how the same is run again, for what the hunt tells.
    """

    sources: Sequence[Sequence[int]] | None = None
    count: int = 64
    seed: int = 0
    beam: int = 4
    max_length: int | None = None
    batch: int = 32
    threads: int | None = None
    engine: str | None = None
    references: References | None = None
    deterministic: bool = False
    provider: str | None = None
    command: str = "seq2engine parity BUNDLE"
    against: Against | None = None
    metrics: Sequence[str] = ("errors",)


def parity_of(
    bundle: Bundle | str | os.PathLike[str],
    backend: str = "onnxruntime",
    precision: str | None = None,
    sources: Sequence[Sequence[int]] | None = None,
    count: int = 64,
    seed: int = 0,
    beam: int = 4,
    max_length: int | None = None,
    batch: int = 32,
    threads: int | None = None,
    progress: Progress = silent,
    engine: str | None = None,
    references: References | None = None,
    deterministic: bool = False,
    provider: str | None = None,
) -> ParityResult:
    """Holds a bundle's graphs on a backend against its reference weights, on given or `count` random sources."""
    options = ParityOptions(
        sources, count, seed, beam, max_length, batch, threads, engine, references, deterministic, provider
    )
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    return parities_of(opened, [precision or default_precision(opened, backend, engine)], backend, options, progress)[0]


def parities_of(
    bundle: Bundle | str | os.PathLike[str],
    precisions: Sequence[str],
    backend: str = "onnxruntime",
    options: ParityOptions | None = None,
    progress: Progress = silent,
) -> list[ParityResult]:
    """Several precisions of a bundle: those that are held against the same decodes share them."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    options = options or ParityOptions()
    check_metrics(options.metrics)
    groups: dict[str, dict[str, Speaker]] = {}
    for precision in precisions:
        speaker = speaker_of(opened, backend, precision, options.against)
        groups.setdefault(speaker.name, {})[precision] = speaker
    found = [
        result for group in groups.values() for result in group_parities(opened, backend, group, options, progress)
    ]
    return sorted(found, key=lambda result: list(precisions).index(result.precision))


def group_parities(
    bundle: Bundle, backend: str, group: dict[str, Speaker], options: ParityOptions, progress: Progress
) -> list[ParityResult]:
    """Precisions that are held against one speaker."""
    sources, references = options.sources, options.references
    if references is not None:
        sources = sources_of(bundle, references, options.count, options.seed)
    outputs: Outputs | None = None if references is None else {}
    with Sessions(bundle, backend, options) as sessions:
        compared = [sessions.compared(precision, speaker) for precision, speaker in group.items()]
        speaker = next(iter(group.values()))
        if sources is None:
            limit = compared[0].candidate.limits.source
            sources = sources_of(bundle, None, options.count, options.seed, limit)
        found = parities_of_sessions(
            compared,
            sessions.speaker(speaker),
            sources,
            options.beam,
            options.max_length,
            options.batch,
            progress,
            outputs,
            speaker.name,
        )
    finished = []
    for result in found:
        if outputs is not None and references is not None:
            result = with_quality(result, outputs, references, bundle, options.metrics)
        if backend != "torch":
            result = dataclasses.replace(result, graphs=graphs_of(bundle, result.precision))
        if not result and backend != "torch":
            result = hunted(result, bundle, sources, options, speaker if options.against else None, progress)
        finished.append(with_names(result, bundle, sources))
    return finished


Outputs = dict[tuple[str, str], Said]  # (who, search) -> source -> tokens


@dataclass(frozen=True)
class Compared:
    """A candidate with PyTorch in fp64 and at its precision; and a judge where it parts from the speaker, if another
    precision is to explain that.
    """

    oracle: Session
    reference: Session
    candidate: Session
    judges: tuple[Session, Session] | None = None


class Sessions(ExitStack):
    """Opens every session once, and closes all of them."""

    def __init__(self, bundle: Bundle, backend: str, options: ParityOptions):
        super().__init__()
        self.bundle, self.backend, self.options = bundle, backend, options
        self.opened: dict[str, Session] = {}

    def torch(self, precision: str) -> Session:
        if precision not in self.opened:
            self.opened[precision] = self.enter_context(
                open_session(self.bundle, "torch", precision, self.options.threads)
            )
        return self.opened[precision]

    def compared(self, precision: str, speaker: Speaker) -> Compared:
        candidate = self.enter_context(
            open_session(
                self.bundle,
                self.backend,
                precision,
                self.options.threads,
                self.options.engine,
                deterministic=self.options.deterministic,
                provider=self.options.provider,
                workload=Workload(beam=self.options.beam, target=self.options.max_length),
            )
        )
        own = (oracle_of(precision), precision)
        judges = None if speaker.judges == own else (self.torch(speaker.judges[0]), self.torch(speaker.judges[1]))
        return Compared(self.torch(own[0]), self.torch(own[1]), candidate, judges)

    def speaker(self, speaker: Speaker) -> Session:
        if speaker.backend == "torch" and speaker.bundle is self.bundle:
            return self.torch(speaker.precision)
        return self.enter_context(
            open_session(speaker.bundle, speaker.backend, speaker.precision, self.options.threads)
        )


def parity_of_sessions(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    beam: int = 4,
    max_length: int | None = None,
    batch: int = 32,
    progress: Progress = silent,
) -> ParityResult:
    """One candidate over opened sessions, its decodes against the reference's."""
    compared = [Compared(oracle, reference, candidate)]
    return parities_of_sessions(compared, reference, sources, beam, max_length, batch, progress)[0]


def parities_of_sessions(
    compared: Sequence[Compared],
    speaker: Session,
    sources: Sequence[Sequence[int]],
    beam: int = 4,
    max_length: int | None = None,
    batch: int = 32,
    progress: Progress = silent,
    outputs: Outputs | None = None,
    name: str = "PyTorch",
) -> list[ParityResult]:
    """The same over opened sessions. Decodes are cut at `max_length`, or at 64 tokens if the model can do as many.

    `outputs` is filled with what all sides said.
    """
    if batch < 1:
        raise ConfigError(f"batch {batch}, expected at least 1")
    everyone = [*(one.candidate for one in compared), speaker]
    longest = longest_of(min(session.limits.target for session in everyone), max_length)
    searches = searches_of(compared[0].candidate, longest, beam)
    rows = [list(source) for source in sources]
    for session in everyone:
        check_request(dataclasses.replace(session.limits, batch=None), session.config, rows, searches[-1])
        batch = min(batch, session.limits.batch or batch)
    shown = sample_of(rows, TENSOR_SOURCES)
    if len(shown) < FEWEST_SOURCES:
        limit = min(session.limits.source for session in everyone)
        shown += random_sources(compared[0].candidate.config, FEWEST_SOURCES - len(shown), 0, limit)
    fewer = sample_of(shown, FEWEST_SOURCES)
    found, arms = [], []
    for one in compared:
        three = (one.oracle, one.reference, one.candidate)
        tensors, usual, next_token = compare_tensors(*three, shown, searches[0], batch, progress)
        drift, at_length = drift_of(*three, fewer, longest, batch)
        tensors += (*compare_drives(*three, fewer, longest, beam, batch), at_length)
        if one.judges is not None:
            usual = usual_spread(*one.judges, fewer, searches[0], batch)
        arms.append(Arm(one.candidate, Judge(*(one.judges or three[:2]), batch, usual)))
        found.append(
            ParityResult(
                backend=one.candidate.backend,
                precision=one.candidate.precision,
                cache_form=one.candidate.cache_form,
                sources=len(rows),
                max_length=longest,
                tensors=tensors,
                decodes=(),
                companies=companies_of(*three, fewer, longest, batch),
                drift=drift,
                next_token=next_token,
                speaker=name,
            )
        )
    for search in searches:
        said: Said | None = None if outputs is None else outputs.setdefault((name, search_name(search)), {})
        decodes = compare_decodes(speaker, arms, rows, search, batch, name, progress, said)
        found = [
            dataclasses.replace(result, decodes=(*result.decodes, decode))
            for result, decode in zip(found, decodes, strict=True)
        ]
    if outputs is not None:
        outputs.update({(arm.name, search): said for arm in arms for search, said in arm.said.items()})
    return found


def searches_of(session: Session, longest: int, beam: int) -> list[SearchOptions]:
    """Greedy and beam search as `run` does them, with the model's own defaults.

    The repetition penalty is left out: where two decodes part, they are judged by the model's own probabilities.
    """
    own = (measured_options(session, width, longest) for width in sorted({1, beam}))
    return [dataclasses.replace(options, repetition_penalty=1.0) for options in own]


def hunted(
    result: ParityResult,
    bundle: Bundle,
    sources: Sequence[Sequence[int]],
    options: ParityOptions,
    speaker: Speaker | None,
    progress: Progress,
) -> ParityResult:
    progress("parity: hunt", 0.0)
    finding = finding_of(bundle, result, sources, options.beam, options.threads, options.command, speaker)
    progress("parity: hunt", 1.0)
    return dataclasses.replace(result, finding=finding)


def longest_of(most: int, max_length: int | None) -> int:
    """How many tokens are decoded: what was asked for, or the usual limit where the model can do as many."""
    return min(most, SearchOptions.max_length) if max_length is None else max_length


def with_quality(
    result: ParityResult, outputs: Outputs, references: References, bundle: Bundle, metrics: Sequence[str]
) -> ParityResult:
    """With the scores of both sides, in every search that came to its end."""
    tokenizer = bundle.tokenizer()
    names = (result.speaker, result.candidate)
    searches = [decode.search for decode in result.decodes if not decode.failure]
    quality: dict[str, tuple[Quality, ...]] = {}
    rates: tuple[Rate, ...] = ()
    for search in searches:
        texts = [
            {text: tokenizer.decode_target(outputs[name, search][row]) for row, text in enumerate(references)}
            for name in names
        ]
        for name, side in zip(names, texts, strict=True):
            quality[name] = (*quality.get(name, ()), quality_from_outputs(search, side, references))
        rates += rates_from_outputs(search, texts[0], texts[1], references, metrics)
    return dataclasses.replace(result, quality=quality, rates=rates)


def with_names(result: ParityResult, bundle: Bundle, sources: Sequence[Sequence[int]]) -> ParityResult:
    """With the texts of what parts, where the bundle takes text, so that a report can be read."""
    parted = [divergence for decode in result.decodes for divergence in decode.divergences]
    if not parted or not bundle.takes_text:
        return result
    tokenizer = bundle.tokenizer()
    ids = sorted({token for divergence in parted for token in (*divergence.reference, *divergence.candidate)})
    rows = sorted({divergence.source for divergence in parted})
    return dataclasses.replace(
        result,
        words=dict(zip(ids, tokenizer.target_tokens(ids), strict=True)),
        texts={row: " ".join(tokenizer.source_tokens(sources[row])) for row in rows},
    )
