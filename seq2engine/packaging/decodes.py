"""The decoding options of a package's decode.py, and the fp64 greedy decodes that engines are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.profiles import ShapeRanges
from seq2engine.packaging.golden_samples import Recording
from seq2engine.runtime.generate import generate, start_of
from seq2engine.runtime.model_options import measured_options
from seq2engine.runtime.numerics.error_scale import least_logits
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.session import Session

SAMPLES, LONGEST = 4, 64  # decodes without texts, and tokens of each at most: they take a second or two
BATCH = 16  # decoded together: all logits of a step are kept in fp64
BEST = 8  # tokens of a step whose logits are recorded, to distinguish a tie from an error
NOT_DONE = ("phrases", "trie", "shortlist")  # fields of SearchOptions that decode.py refuses
OF_BEAMS = ("beam_style", "length_penalty", "early_stopping", "patience")  # fields that only beam search reads
DONE = (
    "min_length", "forced_eos", "first_banned", "allowed", "no_repeat_ngram", "source_no_repeat_ngram",
    "repetition_penalty", "banned", "max_length",
)  # fmt: skip


def greedy_options(session: Session, longest: int) -> SearchOptions:
    """The model's own options with one beam: recorded decodes are always greedy."""
    return dataclasses.replace(measured_options(session, 1, longest), beam_style="huggingface", patience=1.0)


def decode_values(session: Session, room: int, margin: float) -> dict[str, Any]:
    """package.json's "decode": the options of decode.py.

    `room` is the longest output that fits engines and cache; rounding could swap two tokens within `margin`.
    """
    options = greedy_options(session, room)
    own_beam = session.defaults.values.get("beam", 1)
    by_beam = measured_options(session, own_beam, room)
    return {
        **{name: getattr(by_beam, name) for name in OF_BEAMS},
        **{name: getattr(options, name) for name in DONE},
        "start": start_of(session.config, options),
        "end": session.config.end_id,
        "forced_start": options.forced_start,
        "refused": ", ".join(name for name in NOT_DONE if getattr(options, name)),
        "beam_refused": "a coverage penalty" if session.defaults.values.get("coverage_penalty") else "",
        "own_beam": own_beam,
        "room": room,
        "sample_length": min(LONGEST, options.max_length),
        "allowed_margin": margin,
    }


def usual_margin(recording: Recording) -> float:
    """The margin between two tokens that rounding could swap: the median over all steps."""
    return float(np.median(np.concatenate([arrays["allowed_margin"].ravel() for arrays in recording.batches])))


def room_of(ranges: ShapeRanges, cache_form: str, slots: int) -> int:
    """The longest greedy output in tokens. If an engine cannot run a single beam, its spare beams need slots, too."""
    return min(ranges.target.max, slots - ranges.beam.min + 1) if cache_form == "static" else ranges.target.max


def sample_sources(
    bundle: Bundle, texts: Sequence[str], random: Sequence[list[int]], ranges: ShapeRanges
) -> list[tuple[str | None, list[int]]]:
    """Texts and their ids; without texts, some random sources."""
    if not texts:
        return [(None, source) for source in random[:SAMPLES]]
    tokenizer = bundle.tokenizer()
    found: list[tuple[str | None, list[int]]] = []
    for number, text in enumerate(texts, 1):
        ids = tokenizer.encode_source(text)
        if not text.strip() or len(ids) > ranges.source.max:
            most = f"expected 1 to {ranges.source.max}, which the engines take"
            raise RequestError(f"text {number} has {len(ids) if text.strip() else 0} tokens, {most}")
        found.append((text, ids))
    return found


def recorded_decodes(
    oracle: Session,
    sources: Sequence[tuple[str | None, list[int]]],
    decode: dict[str, Any],
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """The greedy output of every source, with the likeliest tokens and their logits at each step."""
    if decode["refused"]:
        return []
    options = greedy_options(oracle, decode["sample_length"])
    found = []
    for first in range(0, len(sources), BATCH):
        progress("package: decode", first / len(sources))
        found += decodes_of(oracle, sources[first : first + BATCH], options)
    progress("package: decode", 1.0)
    return found


def decodes_of(
    oracle: Session, sources: Sequence[tuple[str | None, list[int]]], options: SearchOptions
) -> list[dict[str, Any]]:
    """Those of one batch."""
    best: list[list[tuple[list[int], list[float]]]] = [[] for _ in sources]

    def record(emitted: Emitted) -> None:
        logits = emitted.answer.logits[:, 0]  # [B, V]
        for source, token, row in zip(emitted.sources, emitted.tokens[:, 0], logits, strict=True):
            ids = np.union1d(np.argsort(-row, kind="stable")[:BEST], token)
            reached = np.maximum(row[ids].astype(float), least_logits(row[None].astype(float)))
            best[source].append((ids.tolist(), reached.tolist()))

    found = generate(oracle, [ids for _, ids in sources], options, on_step=record, logits=True)
    return [
        {"text": text, "source": ids, "tokens": list(nbest[0].tokens), "best": steps[: len(nbest[0].tokens)]}
        for (text, ids), nbest, steps in zip(sources, found, best, strict=True)
    ]
