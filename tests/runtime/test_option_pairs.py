"""Search options x session kinds x precisions: every pair runs and changes no output, or is refused in one line.

In fp32 every session must find the tokens of PyTorch; in other precisions those of the plain ONNX Runtime session, or,
if it is PyTorch itself, those that it finds for every source alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.all_pairs import Case, all_pairs, pairs_of
from support.stand_in_engines import FOUR_BEAMS, put_engines, session_over
from support.workers import workers_for_few_rows

from seq2engine.errors import ConfigError, RequestError, Seq2EngineError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.ort_forms import interface
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.option_checks import BEAM_STYLES
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many

# The output table is the embedding, so that fp32 has the shortcut to its best candidates too.
CONFIG = dataclasses.replace(
    PRESETS["tiny"], norm="pre", positions="learned", tie_output=True, max_source=16, max_target=12
)
PRECISIONS = ("fp32", "fp16", "w8a8")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"threads": 1},
    "on device": {"threads": 1, "attention": True},  # ONNX Runtime's CPU, used like a GPU
    "torch": {"backend": "torch", "threads": 1, "attention": True},
    "attention": {"threads": 1, "attention": True},
    "deterministic": {"threads": 1, "deterministic": True},
    "deterministic attention": {"threads": 1, "deterministic": True, "attention": True},
    "speculative": {"threads": 1, "draft": "w8a8"},
    "quantised draft": {"threads": 1, "draft": "quantised"},
    "workers": {"threads": 2, "attention": True},
    "tensorrt": {"backend": "tensorrt"},
}
SOURCES = [[5, 17, 250, 9, 41], [77, 3], [12, 200, 31, 8, 99, 140, 6], [88]]
PREFIXES = [[9, 30], [], [61], [5]]
LISTED = tuple(range(3, 256, 2))
STUCK = "forbid every token of the vocabulary"
SEQUENCES = [[9, 31, 61], [9, 31], [11, 13, 15, 17], [5], [61, 9, 9, 9, 9]]

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # factor -> value -> fields of SearchOptions
    "search": {
        "greedy": {},
        "beam": {"beam": 4},
        "nbest": {"beam": 3, "nbest": 3, "length_penalty": 0.6, "early_stopping": True},
        "sample": {"sample": True, "nbest": 2, "seed": 5},
        "cool sample": {"sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 8},
        "alternatives": {"alternatives": True, "nbest": 3},
        "alternatives of beams": {"alternatives": True, "nbest": 2, "beam": 2},
    },
    "style": {name: {"beam_style": name} for name in BEAM_STYLES},
    "scores": {"scores": {}, "no scores": {"scores": False}},
    "attention": {"none": {}, "alignments": {"alignments": True}, "coverage": {"coverage_penalty": 0.4}},
    "vocabulary": {"whole": {}, "shortlist": {"shortlist": LISTED}, "allowed": {"allowed": LISTED}},
    "held to": {
        "nothing": {},
        "phrases": {"phrases": ((9, 31), (61,))},
        "trie": {"trie": trie_from_sequences(SEQUENCES)},
        "prefix": {"prefix": (9, 31)},
        "first": {"forced_bos": 9},
        "last": {"forced_eos": 11},
    },
    "barred": {
        "nothing": {},
        "tokens": {"banned": ((101,), (55,)), "first_banned": (103, 105)},
        "sequences": {"banned": ((101, 9), (55,))},
        "repeats": {"no_repeat_ngram": 2, "source_no_repeat_ngram": 3, "repetition_penalty": 1.2},
        "short outputs": {"min_length": 3},
    },
    "start": {"own": {}, "another": {"start": 7}},
    "end": {"own": {}, "ignored": {"ignore_eos": True}},
}
FACTORS = {
    "session": [f"{kind} {precision}" for kind in KINDS for precision in PRECISIONS],
    **{name: list(values) for name, values in OPTIONS.items()},
    "call": ["batch", "one source", "prefixes", "continuous batching"],
}


def options_of(case: Case, factors: dict[str, dict[str, dict[str, Any]]] = OPTIONS) -> SearchOptions:
    fields = [values[case[name]] for name, values in factors.items()]
    return SearchOptions(max_length=10, **{key: value for one in fields for key, value in one.items()})


def allowed(case: Case) -> bool:
    """Whether the options go together at all."""
    try:
        options_of(case)
    except ConfigError:
        return False
    return refusal_of(case) is None


def refusal_of(case: Case) -> str | None:
    """Why this case is refused where each of its options alone would not be."""
    options, (kind, precision) = options_of(case), case["session"].rsplit(" ", 1)
    if kind == "speculative" and precision != "fp32":
        return f"w8a8 cannot draft for {precision}"
    if kind == "quantised draft" and precision != "fp32":
        return f"weights of {precision} in fewer bits cannot draft"
    if kind == "tensorrt" and precision == "w8a8":
        return "no w8a8 engine in"
    if options.needs_attention and not KINDS[kind].get("attention"):
        return "but the session keeps no cross-attention weights; open it with attention=True"
    if kind == "tensorrt" and options.width > FOUR_BEAMS.beam.max:
        return f"{options.width}, at most {FOUR_BEAMS.beam.max}"
    if case["call"] == "prefixes" and case["held to"] in ("trie", "prefix", "first"):
        return "prefix"
    if case["call"] == "prefixes" and case["vocabulary"] != "whole":
        return "source 0: prefix has 30, which is not"
    return None


CASES, REFUSED = all_pairs(FACTORS, allowed)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("pairs") / "bundle"
    model = random_model(CONFIG, seed=12)
    with torch.no_grad():  # outputs that change from step to step, although a token is likeliest to follow itself
        model.get_parameter("target_embedding.positions").mul_(8)
    made = onnx_from_model(model, folder, PRECISIONS)
    for precision in ("fp32", "fp16"):
        put_engines(made, FOUR_BEAMS, precision, slots=48)
    return made


@pytest.fixture(scope="module")
def sessions(bundle: Bundle) -> Iterator[Any]:
    """Every session, opened when it is first asked for."""
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "WORTH_IT", 1)  # shortcuts and workers for a model that is too small for them
        workers_for_few_rows(patch)

        @cache
        def session(kind: str, precision: str) -> Session:
            if kind == "tensorrt" and precision != "w8a8":
                return opened.enter_context(session_over(Path(bundle.root, "engines", f"sm86-sm89-{precision}")))
            if kind == "on device":
                settings = OrtSettings(**KINDS[kind], on_device=True)
                return opened.enter_context(OrtSession(model_from_bundle(bundle, precision), settings))
            return opened.enter_context(open_session(bundle, precision=precision, **KINDS[kind]))

        yield session


def found_by(session: Session, case: Case, options: SearchOptions) -> list[list[Hypothesis]]:
    if case["call"] == "one source":
        return generate(session, SOURCES[:1], options)
    if case["call"] == "prefixes":
        return generate(session, SOURCES, options, prefixes=PREFIXES)
    if case["call"] == "continuous batching":
        found = dict(translate_many(session, SOURCES, options, batch=2))
        return [found[number] for number in range(len(SOURCES))]
    if session.workers is not None:
        session.workers.least_rows = 1
        assert len(workers_for(session, len(SOURCES), len(SOURCES))) == 2
    return generate(session, SOURCES, options)


def run(sessions: Any, case: Case) -> list[list[Hypothesis]]:
    options = options_of(case)
    return found_by(sessions(*case["session"].rsplit(" ", 1)), case, options)


def expected_by(sessions: Any, case: Case, options: SearchOptions) -> list[list[Hypothesis]] | None:
    """What another session finds; None where the rules leave no token at some step, which only a decode shows."""
    try:
        return found_by_another(sessions, case, options)
    except RequestError as error:
        if STUCK not in str(error):
            raise
        return None


def found_by_another(sessions: Any, case: Case, options: SearchOptions) -> list[list[Hypothesis]]:
    kind, precision = case["session"].rsplit(" ", 1)
    if precision != "fp32" and kind == "torch":
        sources = SOURCES[:1] if case["call"] == "one source" else SOURCES
        own = PREFIXES if case["call"] == "prefixes" else [None] * len(sources)
        asked = zip(sources, own, strict=True)
        session = sessions("torch", precision)
        return [
            generate(session, [source], options, prefixes=None if prefix is None else [prefix])[0]
            for source, prefix in asked
        ]
    reference = "torch" if precision == "fp32" else "attention" if options.needs_attention else "plain"
    plain = {**case, "call": "batch"} if case["call"] == "continuous batching" else case
    return found_by(sessions(reference, precision), plain, options)


def tokens_of(found: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[one.tokens for one in nbest] for nbest in found]


def name_of(case: Case) -> str:
    """The values of a case that are not the usual ones."""
    return ", ".join([case["session"], *(case[name] for name in FACTORS if case[name] != FACTORS[name][0])])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pair_of_options_changes_no_output(sessions: Any, case: Case) -> None:
    options = options_of(case)
    expected = expected_by(sessions, case, options)
    if expected is None:
        with pytest.raises(RequestError, match=STUCK):
            run(sessions, case)
        return
    found = run(sessions, case)
    if not (options.sample and case["session"] in ("torch fp16", "torch w8a8")):  # drawn by logits of another rounding
        assert tokens_of(found) == tokens_of(expected)
    for one in [one for nbest in found for one in nbest]:
        assert len(one.alignments) == (len(one.tokens) if options.alignments else 0)
        assert len(one.log_probs) == (0 if options.unscored else len(one.tokens))


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_a_refused_pair_is_one_line(bundle: Bundle, sessions: Any, case: Case) -> None:
    with pytest.raises(Seq2EngineError) as refused:
        run(sessions, case)
    assert isinstance(refused.value, ConfigError | RequestError | SessionError)
    assert "\n" not in str(refused.value)
    if not isinstance(refused.value, ConfigError):
        assert (refusal_of(case) or "no refusal") in str(refused.value)


def test_every_pair_is_run_or_refused() -> None:
    run = set().union(*map(pairs_of, CASES))
    count = sum(
        len(FACTORS[one]) * len(FACTORS[other]) for i, one in enumerate(FACTORS) for other in list(FACTORS)[i + 1 :]
    )
    assert len(run) + len(REFUSED) == count
    assert len(CASES) > 150


def test_decodes_are_worth_comparing(sessions: Any) -> None:
    """Outputs of several lengths and many tokens: decodes that repeat themselves prove little."""
    found = generate(sessions("torch", "fp32"), SOURCES, SearchOptions(max_length=10))
    assert len({token for nbest in found for token in nbest[0].tokens}) > 8
