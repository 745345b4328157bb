"""Parity of a bundle: candidates against PyTorch at their precision (the reference) and in fp64 (the oracle).

weights                      every stored number and node, traced to the reference; nothing is run
graphs                       ONNX checker, contract, census
sources -> encoder           every tensor of the encoder, real positions only
        -> teacher forcing   the oracle's own outputs fed step by step: logits of each step, KV caches; beams that
                             switch, rows at different positions, and steps up to the maximum length, by layer
        -> free decodes      greedy and beam against a baseline (PyTorch in fp32, or another), token by token
        -> quality           scores of both sides, where references are given
        -> cost              the same decodes against those of fp32
        -> batch invariance  a sample alone, in other batches, with more padding
        -> locate            after a failure: the first wrong tensor inside the graphs, and why
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from seq2engine.common.about import about_rows
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import GraphError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.profiles import Workload

from ..defaults import defaults_of
from ..model_options import first_token
from ..ort.session import OrtSettings
from ..quality.intervals import check_metrics
from ..text.sources import coder_of, sources_of
from .compare import longest_of, parities_of_sessions, searches_of, stopped_by
from .levels.baseline import Baseline, baseline_of
from .levels.corpus import Corpus
from .levels.cost import Fp32Outputs
from .levels.decodes import Outputs
from .levels.graphs import graphs_of
from .levels.result import ParityResult
from .locate.debug_engine import debug_engines
from .locate.locate import finding_of
from .options import ParityOptions, beam_of
from .reference_quality import with_quality
from .report.samples import samples_of
from .sessions import Compared, Sessions
from .weights.level import weights_of


def parity_of(
    bundle: Bundle | str | os.PathLike[str],
    backend: str = "onnxruntime",
    precision: str | None = None,
    options: ParityOptions | None = None,
    progress: Progress = silent,
) -> ParityResult:
    """Compares a bundle's graphs on a backend with its reference weights; `precision` None: the most precise."""
    options = options or ParityOptions()
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    chosen = precision or default_precision(opened, backend, options.engine)
    return parities_of(opened, [chosen], backend, options, progress)[0]


def parities_of(
    bundle: Bundle | str | os.PathLike[str],
    precisions: Sequence[str],
    backend: str = "onnxruntime",
    options: ParityOptions | None = None,
    progress: Progress = silent,
) -> list[ParityResult]:
    """Several precisions of a bundle: those with the same baseline share its decodes."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    options = options or ParityOptions()
    check_metrics(options.metrics)
    groups: dict[str, dict[str, Baseline]] = {}
    for precision in precisions:
        baseline = baseline_of(opened, backend, precision, options.against)
        groups.setdefault(baseline.name, {})[precision] = baseline
    weights = {}
    if backend != "torch":
        settings = OrtSettings(provider=options.provider or "cpu", deterministic=options.deterministic)
        weights = {
            precision: weights_of(opened, precision, progress, backend, settings, options.engine)
            for precision in precisions
        }
    fp32 = Fp32Outputs(opened, backend, options.provider, by_torch="PyTorch fp32" in groups)
    order = sorted(groups, key=lambda name: name != fp32.name)  # fp32 first: the others need its decodes
    found = []
    for name in order:
        results, corpus = compared_group(opened, backend, groups[name], options, progress)
        baseline = next(iter(groups[name].values()))
        results = [dataclasses.replace(result, weights=weights.get(result.precision, ())) for result in results]
        found += [finished(result, corpus, options, baseline, fp32, progress) for result in results]
    return sorted(found, key=lambda result: list(precisions).index(result.precision))


def compared_group(
    bundle: Bundle, backend: str, group: dict[str, Baseline], options: ParityOptions, progress: Progress
) -> tuple[list[ParityResult], Corpus]:
    """Everything that needs the sessions of one baseline's precisions. They are closed before others are opened."""
    sources, references = options.sources, options.references
    if references is not None:
        sources = sources_of(bundle, references, options.count, options.seed, language=options.source_language)
    found: list[ParityResult] = []
    outputs, searches = Outputs(), []
    baseline = next(iter(group.values()))
    with Sessions(bundle, backend, options) as sessions:
        compared, stopped = opened_candidates(sessions, group, options)
        if sources is None:
            limit = compared[0].candidate.limits.source if compared else None
            sources = sources_of(bundle, None, options.count, options.seed, limit)
        if compared:
            first = first_token(compared[0].candidate, coder_of(bundle), options.target_language)
            session = sessions.baseline(baseline)
            threads = sessions.take_quickest_threads(compared[0], sources)
            found, outputs = parities_of_sessions(compared, session, baseline.name, sources, options, progress, first)
            beam = beam_of(options.beam, defaults_of(bundle))
            searches = searches_of(compared[0].candidate, found[0].max_length, beam, first)
            found = [dataclasses.replace(result, torch_threads=threads) for result in found]
    found += [dataclasses.replace(result, sources=len(sources), baseline=baseline.name) for result in stopped]
    corpus = Corpus(bundle, sources, searches, outputs, references, options.metrics, options.batch, options.threads)
    return found, corpus


def opened_candidates(
    sessions: Sessions, group: dict[str, Baseline], options: ParityOptions
) -> tuple[list[Compared], list[ParityResult]]:
    """The candidates of a group that can be opened, and results of those that cannot."""
    compared, stopped = [], []
    longest = longest_of(sessions.bundle.config.max_target, options.max_length)
    for precision, baseline in group.items():
        try:
            compared.append(sessions.compared(precision, baseline))
        except GraphError as error:
            why = stopped_by(error, "graphs")
            form = sessions.bundle.cache_form
            stopped.append(ParityResult(sessions.backend, precision, form, 0, longest, (), (), stopped=why))
    return compared, stopped


def finished(
    result: ParityResult,
    corpus: Corpus,
    options: ParityOptions,
    baseline: Baseline,
    fp32: Fp32Outputs,
    progress: Progress,
) -> ParityResult:
    """Adds all that needs no session of the comparison: quality, cost, samples, graphs, and the located fault."""
    bundle, against = corpus.bundle, options.against is not None
    manifest, name = bundle.manifest, bundle.root.resolve().name
    about = about_rows(name, bundle.config.shape, manifest.checkpoint_sha256, options.command_line)
    result = dataclasses.replace(result, against=baseline.name if against else "", about=tuple(about))
    result = with_quality(result, corpus, against)
    if result.decodes and (result.precision != "fp32" or result.baseline == fp32.name):
        cost = fp32.cost(result.candidate, result.finished_searches, corpus, progress)
        result = dataclasses.replace(result, cost=cost)
    result = dataclasses.replace(result, samples=samples_of(result, corpus, fp32))
    if result.backend != "torch":
        result = dataclasses.replace(result, graphs=graphs_of(bundle, result.precision))
        if result.needs_locating(other_weights=baseline.precision != result.precision):
            result = with_finding(result, corpus, options, baseline if against else None, progress)
    return with_texts(result, bundle, corpus.sources)


def with_finding(
    result: ParityResult, corpus: Corpus, options: ParityOptions, baseline: Baseline | None, progress: Progress
) -> ParityResult:
    """`baseline` is the one that `--against` names."""
    progress("parity: locating the fault", 0.0)
    bundle = corpus.bundle
    beam = beam_of(options.beam, defaults_of(bundle))
    workload = Workload(beam=beam, target=options.max_length)
    with debug_engines(bundle, result.backend, result.precision, options.engine, workload) as engines:
        finding = finding_of(bundle, result, corpus.sources, beam, options.threads, options.command, baseline, engines)
    progress("parity: locating the fault", 1.0)
    return dataclasses.replace(result, finding=finding)


def with_texts(result: ParityResult, bundle: Bundle, sources: Sequence[Sequence[int]]) -> ParityResult:
    """Adds the texts of divergent decodes, if the bundle has a tokenizer."""
    diverged = [divergence for decode in result.decodes for divergence in decode.divergences]
    if not diverged or not bundle.takes_text:
        return result
    tokenizer, features = bundle.tokenizer(), bundle.config.takes_features
    ids = sorted({token for divergence in diverged for token in (*divergence.reference, *divergence.candidate)})
    rows = sorted({divergence.source for divergence in diverged})
    return dataclasses.replace(
        result,
        words=dict(zip(ids, tokenizer.target_tokens(ids), strict=True)),
        texts={} if features else {row: " ".join(tokenizer.source_tokens(sources[row])) for row in rows},
    )
