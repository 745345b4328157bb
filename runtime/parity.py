"""Running for parity: a candidate beside PyTorch at its precision (the reference) and PyTorch in fp64 (the oracle).

    sources -> encoder           every tensor of the encoder, real positions only
            -> teacher forcing   the oracle's own outputs fed step by step: logits of each step, then the caches;
                                 then beams that change their parents, and rows that stand at different steps
            -> free decodes      greedy and beam, reference against candidate, token by token
            -> the hunt          where something is wrong: the first tensor inside the graphs that is, and why

Everything is run in batches of mixed lengths and compared at once, so memory does not grow with the sources.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import numpy as np

from seq2engine.progress import Progress, silent

from ..errors import ConfigError, RequestError
from ..export.bundle import Bundle, open_bundle
from ..export.contract import oracle_of
from ..model.config import ModelConfig
from ..model.tokenizers.base import Tokenizer
from .compare import DecodeResult, Divergence, ErrorTally, ParityResult, TensorResult
from .divergence import Judge, Parted, fork_of, traced
from .drives import compare_drives
from .forcing import ForcedRun, error_spread, forced_tokens
from .generate import generate, padded
from .next_token import NextToken, NextTokenTally
from .quality import Quality, References, quality_from_outputs
from .search import SearchOptions
from .session import Session, check_request, open_session

Outputs = dict[tuple[str, str], dict[int, tuple[int, ...]]]  # (who, search) -> source -> tokens

TENSOR_SOURCES = 64  # tensors are compared on that many sources, of all lengths: more would only say the same again
FEWEST_SOURCES = 16  # and never on fewer: a ratio of errors of one single row was measured at up to 17 in good exports
FEWEST_ROWS = 8  # for the same reason a step is judged by itself only while that many sources are not finished


def parity_of(
    bundle: Bundle | str | os.PathLike[str],
    backend: str = "onnxruntime",
    precision: str = "fp32",
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
    command: str = "seq2engine parity BUNDLE",
) -> ParityResult:
    """Holds a bundle's graphs on a backend against its reference weights, on given or `count` random sources.

    With `references` (texts and what should be said of them) their texts are the sources, and both sides' error rates
    are part of the result. `command` is how the same is run again, for what the hunt tells.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if references is not None:
        sources = sources_of(opened, references, count, seed)
    with (
        open_session(
            opened, backend, precision, threads, engine, deterministic=deterministic, provider=provider
        ) as candidate,
        open_session(opened, "torch", oracle_of(precision), threads) as oracle,
        open_session(opened, "torch", precision, threads) as reference,
    ):
        if sources is None:
            sources = sources_of(opened, None, count, seed, candidate.limits.source)
        outputs: Outputs = {}
        result = parity_of_sessions(oracle, reference, candidate, sources, beam, max_length, batch, progress, outputs)
    if references is not None:
        result = dataclasses.replace(result, quality=quality_of_outputs(outputs, references, opened.tokenizer()))
    if result or backend == "torch":
        return result
    progress("parity: hunt", 0.0)
    from .hunt import finding_of  # it needs torch and onnx

    finding = finding_of(opened, result, sources, beam, threads, command)
    progress("parity: hunt", 1.0)
    return dataclasses.replace(result, finding=finding)


def parity_of_sessions(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    beam: int = 4,
    max_length: int | None = None,
    batch: int = 32,
    progress: Progress = silent,
    outputs: Outputs | None = None,
) -> ParityResult:
    """The same over opened sessions. Decodes are cut at `max_length`, or at 64 tokens if the model can do as many.

    `outputs` is filled with what both sides said.
    """
    if batch < 1:
        raise ConfigError(f"batch {batch}, expected at least 1")
    limits = candidate.limits
    longest = longest_of(limits.target, max_length)
    searches = [SearchOptions(longest, width) for width in sorted({1, beam})]
    rows = [list(source) for source in sources]
    check_request(dataclasses.replace(limits, batch=None), candidate.config, rows, searches[-1])
    batch = min(batch, limits.batch or batch)
    shown = sample_of(rows, TENSOR_SOURCES)
    if len(shown) < FEWEST_SOURCES:
        shown += random_sources(candidate.config, FEWEST_SOURCES - len(shown), 0, limits.source)
    outputs = {} if outputs is None else outputs
    tensors, usual, next_token = compare_tensors(oracle, reference, candidate, shown, searches[0], batch, progress)
    tensors += compare_drives(oracle, reference, candidate, sample_of(shown, FEWEST_SOURCES), longest, beam, batch)
    decodes = [
        compare_decodes(oracle, reference, candidate, rows, search, batch, usual, progress, outputs)
        for search in searches
    ]
    return ParityResult(
        backend=candidate.backend,
        precision=candidate.precision,
        cache_form=candidate.cache_form,
        sources=len(rows),
        max_length=longest,
        tensors=tensors,
        decodes=tuple(decodes),
        next_token=next_token,
    )


def longest_of(most: int, max_length: int | None) -> int:
    """How many tokens are decoded: what was asked for, or the usual limit where the model can do as many."""
    return min(most, SearchOptions.max_length) if max_length is None else max_length


def quality_of_outputs(
    outputs: Outputs, references: References, tokenizer: Tokenizer
) -> dict[str, tuple[Quality, ...]]:
    """The error rates of everyone who spoke, in every search that came to its end."""
    found: dict[str, tuple[Quality, ...]] = {}
    for (who, search), said in outputs.items():
        if len(said) == len(references):
            texts = {text: tokenizer.decode_target(said[row]) for row, text in enumerate(references)}
            found[who] = (*found.get(who, ()), quality_from_outputs(search, texts, references))
    return found


def sources_of(
    bundle: Bundle, references: References | None, count: int, seed: int, longest: int | None = None
) -> list[list[int]]:
    """The texts of the references in ids; without references, random sources."""
    if references is not None:
        tokenizer = bundle.tokenizer()
        return [tokenizer.encode_source(text) for text in references]
    if count < 1:
        raise ConfigError(f"{count} random sources, expected at least 1")
    return random_sources(bundle.config, count, seed, longest)


def random_sources(config: ModelConfig, count: int, seed: int = 0, longest: int | None = None) -> list[list[int]]:
    """Ragged random sources, the extremes first: one token, the longest there may be, one token over and over.

    Lengths are drawn evenly on a logarithmic scale: many short ones beside a few long ones find a mask that leaks.
    """
    if seed < 0:
        raise RequestError(f"seed {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    limit = min(config.max_source, longest or config.max_source)
    tokens = np.array([token for token in range(config.source_vocab) if token != config.pad_id] or [config.pad_id])
    drawn = np.exp(rng.uniform(0.0, np.log(limit + 1), size=count)).astype(int)
    lengths = [1, limit, *drawn.clip(1, limit).tolist()][:count]
    sources = [rng.choice(tokens, size=length).tolist() for length in lengths]
    if count > 2:
        sources[2] = [sources[2][0]] * max(len(sources[2]), limit // 2)
    return sources


def sample_of(sources: list[list[int]], count: int) -> list[list[int]]:
    """At most that many of the sources, evenly over their lengths, shortest and longest included, in their order."""
    if len(sources) <= count:
        return list(sources)
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    chosen = np.linspace(0, len(sources) - 1, count).round().astype(int)
    return [sources[i] for i in sorted(by_length[place] for place in chosen)]


def mixed_batches(count: int, batch: int) -> list[list[int]]:
    """Indices in batches that reach over the whole list: sources sorted by length still meet in ragged batches."""
    batches = -(-count // batch)
    return [list(range(first, count, batches)) for first in range(batches)]


def compare_tensors(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int,
    progress: Progress = silent,
) -> tuple[tuple[TensorResult, ...], float, dict[str, NextToken]]:
    """The encoder's tensors and those of teacher-forced steps, in the order in which one error would cause the next;
    the spread of the errors that PyTorch usually makes in the logits of a step; and both sides' next tokens.
    """
    layers = [f"{part}.{i}" for i in range(oracle.config.decoder_layers) for part in "kv"]
    encoder = {name: ErrorTally() for name in ("encoder_states", *(f"cross_{layer}" for layer in layers))}
    caches = {f"self_{layer}": ErrorTally() for layer in layers}
    logits = ErrorTally()
    by_step = [ErrorTally() for _ in range(options.max_length)]
    spreads: list[np.ndarray] = []
    speakers = {f"{who} {candidate.precision}": NextTokenTally() for who in ("PyTorch", candidate.backend)}

    batches = mixed_batches(len(sources), batch)
    for done, rows in enumerate(batches):
        progress("parity: tensors", done / len(batches))
        chosen = [sources[row] for row in rows]
        targets = [found[0].tokens for found in generate(oracle, chosen, options)]
        fed, counts = forced_tokens(targets, oracle.config)
        runs = [ForcedRun(session, chosen, fed.shape[1]) for session in (oracle, reference, candidate)]
        _, real = padded(chosen, oracle.config.pad_id)
        for name, tally in encoder.items():
            tally.add(*(positions_of(run.tensor(name))[real] for run in runs))
        for step in range(fed.shape[1]):
            answers = [run.step(fed[:, step])[counts[:, step]] for run in runs]
            logits.add(*answers)
            by_step[step].add(*answers)
            spreads.append(error_spread(answers[0], answers[1]))
            for next_token, answer in zip(speakers.values(), answers[1:], strict=True):
                next_token.add(answers[0], answer)
        for name, tally in caches.items():
            # Slots are written in the order of the steps, and one beam leaves none dead; the rest was never written.
            tally.add(*(positions_of(run.tensor(name))[:, : fed.shape[1]][counts] for run in runs))
    progress("parity: tensors", 1.0)

    def results(level: str, tallies: dict[str, ErrorTally]) -> Iterator[TensorResult]:
        return (tally.result(level, name, candidate.precision) for name, tally in tallies.items())

    steps = enumerate(by_step)
    found = (
        *results("encoder", encoder),
        *results("steps", {**caches, "logits": logits}),
        *(t.result("steps", "logits", candidate.precision, step) for step, t in steps if t.rows >= FEWEST_ROWS),
    )
    said = {who: next_token.result() for who, next_token in speakers.items()}
    return found, float(np.median(np.concatenate(spreads))), said


def positions_of(tensor: np.ndarray) -> np.ndarray:
    """Position by position: [B,H,S,E] -> [B,S,H,E]; encoder states [B,S,D] are so already."""
    return tensor.swapaxes(1, 2) if tensor.ndim == 4 else tensor


def compare_decodes(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int,
    usual: float = 0.0,
    progress: Progress = silent,
    outputs: Outputs | None = None,
) -> DecodeResult:
    """Both decode every source freely; where they part, the oracle says by how much.

    `usual` is the spread of the errors that PyTorch usually makes: what a step's budget rests on where PyTorch happens
    to be luckier than that.
    """
    judge = Judge(oracle, reference, batch, usual)
    search = "greedy" if options.beam == 1 else f"beam {options.beam}"
    divergences: list[Divergence] = []
    batches = mixed_batches(len(sources), batch)
    for done, rows in enumerate(batches):
        progress(f"parity: {search}", done / len(batches))
        chosen = [sources[row] for row in rows]
        try:
            who = "PyTorch"
            wanted = traced(reference, chosen, options)
            who = candidate.backend
            given = traced(candidate, chosen, options)
        except RequestError as error:  # the request was checked before, so it is the model's answer that is wrong
            return DecodeResult(search, len(sources), failure=f"{who} stopped in batch {done}: {error}")
        if outputs is not None:
            for name, said in (("PyTorch", wanted), (candidate.backend, given)):
                kept = outputs.setdefault((f"{name} {candidate.precision}", search), {})
                kept.update(zip(rows, said.tokens, strict=True))
        parted = [
            Parted(row, source, wanted.tokens[i], given.tokens[i], fork_of(wanted, given, i, oracle.config.end_id))
            for i, (row, source) in enumerate(zip(rows, chosen, strict=True))
            if wanted.tokens[i] != given.tokens[i]
        ]
        divergences += judge.greedy(parted) if options.beam == 1 else judge.beams(parted, options.length_penalty)
    progress(f"parity: {search}", 1.0)
    return DecodeResult(search, len(sources), tuple(sorted(divergences, key=lambda d: d.source)))
