"""Running for parity: candidates beside PyTorch at their precision (the reference) and in fp64 (the oracle).

    the graphs               checker, contract, census
    sources -> encoder           every tensor of the encoder, real positions only
            -> teacher forcing   the oracle's own outputs fed step by step: logits of each step, then the caches;
                                 then beams that change their parents, rows that stand at different steps, and steps
                                 up to the maximum length, layer by layer
            -> free decodes      greedy and beam against a speaker (PyTorch in fp32, or another), token by token
            -> quality           where references are given
            -> cost              the same decodes beside those of fp32
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
from typing import Any

from seq2engine.common.about import about_rows
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import ConfigError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.profiles import Workload
from seq2engine.export.contract import oracle_of

from ..backends import with_defaults
from ..model_options import first_token, measured_options
from ..opening import open_session
from ..quality.intervals import check_metrics
from ..quality.metrics import References
from ..requests import check_request
from ..search.options import SearchOptions
from ..session import Session
from ..text.sources import (
    FEWEST_SOURCES,
    coder_of,
    compared_sources,
    sample_of,
    sources_of,
    tree_sources,
)
from .levels.baseline import Against, Speaker, speaker_of
from .levels.batch_invariance import companies_of
from .levels.corpus import Corpus
from .levels.cost import Baseline
from .levels.decodes import Arm, Outputs, compare_decodes, search_name
from .levels.divergence import Judge
from .levels.graphs import graphs_of
from .levels.reference_quality import with_quality
from .levels.result import ParityResult, Sampled
from .levels.sanity import decode_doubt
from .levels.step_patterns import compare_drives
from .levels.tensors import compare_tensors, usual_spread
from .locate.locate import finding_of
from .report.samples import samples_of


@dataclass(frozen=True)
class ParityOptions:
    """What is compared, and how. `sources` are ids; without them `count` random ones of `seed` are drawn.

    With `references` (texts and what should be said of them) their texts are the sources, and both sides' scores in
    these `metrics` are part of the result. Decodes are compared with PyTorch's in fp32, or with those of `against`.
    `command` is how the same is run again, for the hunt's finding.
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
    command_line: str = ""  # as it was given, for the report
    source_language: str | None = None  # of the references, as the model names it
    target_language: str | None = None  # first token of every decode (None: the model's own)


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
    by_torch = "PyTorch fp32" in groups
    baseline = Baseline(opened, backend, options.provider, by_torch)
    first = sorted(groups, key=lambda name: name != baseline.name)  # its decodes are then there for the others
    found = [
        result
        for name in first
        for result in group_parities(opened, backend, groups[name], options, baseline, progress)
    ]
    return sorted(found, key=lambda result: list(precisions).index(result.precision))


def group_parities(
    bundle: Bundle,
    backend: str,
    group: dict[str, Speaker],
    options: ParityOptions,
    baseline: Baseline,
    progress: Progress,
) -> list[ParityResult]:
    """Precisions that are held against one speaker."""
    speaker = next(iter(group.values()))
    found, corpus = compared_group(bundle, backend, group, options, progress)
    return [finished(result, corpus, options, speaker, baseline, progress) for result in found]


def compared_group(
    bundle: Bundle, backend: str, group: dict[str, Speaker], options: ParityOptions, progress: Progress
) -> tuple[list[ParityResult], Corpus]:
    """What needs the sessions of the comparison. They are gone, with their models, before others are opened."""
    sources, references, outputs = options.sources, options.references, Outputs()
    if references is not None:
        sources = sources_of(bundle, references, options.count, options.seed, language=options.source_language)
    with Sessions(bundle, backend, options) as sessions:
        compared = [sessions.compared(precision, speaker) for precision, speaker in group.items()]
        speaker = next(iter(group.values()))
        forced_bos = first_token(compared[0].candidate, coder_of(bundle), options.target_language)
        if sources is None:
            limit = compared[0].candidate.limits.source
            sources = sources_of(bundle, None, options.count, options.seed, limit)
        speaking = sessions.speaker(speaker)
        torch_threads = sessions.take_quickest_threads(compared[0], sources)
        found = parities_of_sessions(
            compared,
            speaking,
            sources,
            options.beam,
            options.max_length,
            options.batch,
            progress,
            outputs,
            speaker.name,
            forced_bos,
        )
        searches = searches_of(compared[0].candidate, found[0].max_length, options.beam, forced_bos)
    found = [dataclasses.replace(result, torch_threads=torch_threads) for result in found]
    corpus = Corpus(bundle, sources, searches, outputs, references, options.metrics, options.batch, options.threads)
    return found, corpus


def finished(
    result: ParityResult,
    corpus: Corpus,
    options: ParityOptions,
    speaker: Speaker,
    baseline: Baseline,
    progress: Progress,
) -> ParityResult:
    """With everything that needs no session of the comparison: quality, cost, graphs, the hunt, and words to read."""
    bundle, against = corpus.bundle, options.against is not None
    manifest, name = bundle.manifest, bundle.root.resolve().name
    about = about_rows(name, bundle.config.shape, manifest.checkpoint_sha256, options.command_line)
    result = dataclasses.replace(result, against=speaker.name if against else "", about=tuple(about))
    result = with_quality(result, corpus, against)
    if result.precision != "fp32" or result.speaker == baseline.name:
        cost = baseline.cost(result.candidate, result.finished_searches, corpus, progress)
        result = dataclasses.replace(result, cost=cost)
    result = dataclasses.replace(result, samples=samples_of(result, corpus, baseline))
    if result.backend != "torch":
        result = dataclasses.replace(result, graphs=graphs_of(bundle, result.precision))
        if result.to_hunt(other_weights=speaker.precision != result.precision):
            result = hunted(result, bundle, corpus.sources, options, speaker if against else None, progress)
    return with_names(result, bundle, corpus.sources)


@dataclass(frozen=True)
class Compared:
    """A candidate with PyTorch in fp64 and at its precision; and a judge where it parts from the speaker, if another
    precision is to explain that. `excused`: what differs from the speaker may differ in the reference just as much.
    """

    oracle: Session
    reference: Session
    candidate: Session
    judges: tuple[Session, Session] | None = None
    excused: bool = False


class Sessions(ExitStack):
    """Opens every session once, and closes all of them."""

    def __init__(self, bundle: Bundle, backend: str, options: ParityOptions):
        super().__init__()
        self.bundle, self.backend, self.options = bundle, backend, options
        self.opened: dict[str, Session] = {}
        self.weights: dict[str, Any] = {}  # whose weights -> the one model that all PyTorch sessions with them share

    def torch(self, precision: str) -> Session:
        from ..torch_session import TorchSession, model_with_weights_of, weights_of

        if precision not in self.opened:
            whose = weights_of(precision)
            if whose not in self.weights:
                self.weights[whose] = model_with_weights_of(self.bundle, whose)
            session = TorchSession.from_bundle(self.bundle, precision, self.options.threads, model=self.weights[whose])
            self.opened[precision] = self.enter_context(with_defaults(session, self.bundle))
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
        excused = self.options.against is None and precision != "fp32"
        return Compared(self.torch(own[0]), self.torch(own[1]), candidate, judges, excused)

    def take_quickest_threads(self, compared: Compared, sources: Sequence[Sequence[int]]) -> int:
        """Has PyTorch compute with as many threads as were asked for, or as are quickest, as long as this is open."""
        import torch

        from ..torch_threads import take_quickest_threads

        if self.options.threads is not None:
            return self.options.threads
        self.callback(torch.set_num_threads, torch.get_num_threads())
        three = (compared.oracle, compared.reference, compared.candidate)
        most = min(FEWEST_SOURCES, self.options.batch, compared.candidate.limits.batch or FEWEST_SOURCES)
        return take_quickest_threads(three, sample_of([list(source) for source in sources], most))

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
    forced_bos: int | None = None,
) -> list[ParityResult]:
    """The same over opened sessions. Decodes are cut at `max_length`, or at 64 tokens if the model can do as many.

    `outputs` is filled with what all sides said.
    """
    if batch < 1:
        raise ConfigError(f"batch {batch}, expected at least 1")
    everyone = [*(one.candidate for one in compared), speaker]
    longest = longest_of(min(session.limits.target for session in everyone), max_length)
    searches = searches_of(compared[0].candidate, longest, beam, forced_bos)
    outputs = Outputs() if outputs is None else outputs
    rows = [list(source) for source in sources]
    for session in everyone:
        check_request(dataclasses.replace(session.limits, batch=None), session.config, rows, searches[-1])
        batch = min(batch, session.limits.batch or batch)
    config, limit = compared[0].candidate.config, min(session.limits.source for session in everyone)
    shown, lasting = compared_sources(rows, config, limit)
    fewer = [shown[row] for row in lasting]
    trees = min(len(fewer), tree_sources(config, beam))
    sampled = Sampled(len(shown), len(rows), len(fewer), longest, trees)
    found, arms = [], []
    for one in compared:
        three = (one.oracle, one.reference, one.candidate)
        level = compare_tensors(*three, shown, lasting, searches[0], longest, batch, progress)
        drives = compare_drives(*three, fewer, longest, beam, batch)
        usual = level.usual if one.judges is None else usual_spread(*one.judges, fewer, searches[0], batch)
        arms.append(Arm(one.candidate, Judge(*(one.judges or three[:2]), batch, usual)))
        found.append(
            ParityResult(
                backend=one.candidate.backend,
                precision=one.candidate.precision,
                cache_form=one.candidate.cache_form,
                sources=len(rows),
                max_length=longest,
                tensors=(*level.tensors, *drives, level.at_length),
                decodes=(),
                companies=companies_of(*three, fewer, longest, batch),
                drift=level.drift,
                next_token=level.next_token,
                speaker=name,
                sampled=sampled,
            )
        )
    for search in searches:
        said = outputs.setdefault((name, search_name(search)), {})
        decodes = compare_decodes(speaker, arms, rows, search, batch, name, progress, said)
        for i, (one, decode) in enumerate(zip(compared, decodes, strict=True)):
            excuse = one.reference if one.excused else None
            doubt = decode_doubt(decode, search, rows, said, excuse, batch) if decode else None
            found[i] = dataclasses.replace(
                found[i],
                decodes=(*found[i].decodes, decode),
                doubts=(*found[i].doubts, *([doubt] if doubt is not None else [])),
            )
    outputs.update({(arm.name, search): said for arm in arms for search, said in arm.said.items()})
    return found


def searches_of(session: Session, longest: int, beam: int, forced_bos: int | None = None) -> list[SearchOptions]:
    """Greedy and beam search as `run` does them, with the model's own defaults.

    The repetition penalty is left out: where two decodes part, they are judged by the model's own probabilities.
    """
    own = (measured_options(session, width, longest, forced_bos) for width in sorted({1, beam}))
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
