"""Every ONNX Runtime session takes its graphs by one chain: options that only add an output change nothing else."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest
from support.workers import workers_for_few_rows

from seq2engine.errors import SessionError
from seq2engine.export.ort_forms import interface
from seq2engine.export.to_onnx import graphs_from_model, onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.calibration import CalibrationSession
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many

CONFIG = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=1200, target_vocab=1200, max_source=16, max_target=10
)
PRECISIONS = ("fp32", "fp16", "w8a8", "int8")
LISTED = (*range(3, 40), *range(900, 1000), 1199)
SOURCES = [[5, 9, 900, 17], [31], [7, 1100, 8, 8, 30, 4, 11], [950, 1199], [3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Of a small model, whose decoder steps have the shortcut to the best candidates nevertheless."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "WORTH_IT", 1)
        yield onnx_from_model(random_model(CONFIG, 3), tmp_path_factory.mktemp("forms") / "bundle", PRECISIONS)


@pytest.fixture(scope="module")
def sessions(bundle):
    """Every kind of session, opened once."""

    @cache
    def opened(precision, attention, deterministic, draft):
        return open_session(
            bundle, precision=precision, threads=1, attention=attention, deterministic=deterministic, draft=draft
        )

    yield opened
    opened.cache_clear()


def tokens_of(session, options, sources=SOURCES):
    return [[one.tokens for one in nbest] for nbest in generate(session, sources, options)]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["", "shortlist"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_changes_no_token(sessions, precision, shortlist, beam, deterministic):
    plain, aligning = (sessions(precision, attention, deterministic, None) for attention in (False, True))
    for scores in (True, False):
        options = SearchOptions(10, beam, nbest=beam, shortlist=shortlist, scores=scores)
        aligned = dataclasses.replace(options, alignments=True)
        wanted = tokens_of(plain, options)
        assert tokens_of(aligning, options) == wanted
        assert tokens_of(aligning, aligned) == wanted
        for source, (best, *_) in zip(SOURCES, generate(aligning, SOURCES, aligned), strict=True):
            assert len(best.alignments) == len(best.tokens)
            assert all(0 <= place < len(source) for place in best.alignments)
        fed = dict(translate_many(aligning, SOURCES, aligned, batch=2))
        assert {row: found[0].tokens for row, found in fed.items()} == {r: n[0] for r, n in enumerate(wanted)}


@pytest.mark.each_value
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["", "shortlist"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_coverage_penalty_goes_with_everything(sessions, precision, shortlist, deterministic):
    session = sessions(precision, True, deterministic, None)
    for scores, alignments in itertools.product((True, False), repeat=2):
        options = SearchOptions(10, 4, coverage_penalty=0.4, shortlist=shortlist, scores=scores, alignments=alignments)
        found = tokens_of(session, options)
        assert found == [tokens_of(session, options, [source])[0] for source in SOURCES]
        if shortlist is not None:
            assert {token for (tokens, *_) in found for token in tokens} <= {*LISTED, CONFIG.end_id}


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["", "shortlist"])
def test_speculative_sessions_take_the_chain_too(sessions, shortlist, beam, scores):
    options = SearchOptions(10, beam, shortlist=shortlist, scores=scores)
    plain, drafted = sessions("fp32", False, False, None), sessions("fp32", False, False, "w8a8")
    for source in SOURCES:
        assert tokens_of(drafted, options, [source]) == tokens_of(plain, options, [source])


@pytest.mark.parametrize("wish", [{"attention": True}, {"deterministic": True}], ids=str)
def test_what_does_not_go_together_is_one_error(bundle, wish):
    with pytest.raises(SessionError, match="leave --draft out"):
        open_session(bundle, draft="w8a8", **wish)


@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["", "shortlist"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probabilities_are_the_same_bits(sessions, precision, shortlist):
    options = SearchOptions(10, 4, nbest=4, shortlist=shortlist)
    found = [
        [
            one.log_probs
            for nbest in generate(sessions(precision, attention, False, None), SOURCES, options)
            for one in nbest
        ]
        for attention in (False, True)
    ]
    np.testing.assert_equal(found[0], found[1])


def test_attention_is_that_of_pytorch_whatever_the_form(bundle, sessions):
    options = SearchOptions(10, alignments=True)
    with open_session(bundle, "torch", attention=True) as reference:
        wanted = [best.alignments for best, *_ in generate(reference, SOURCES, options)]
    for deterministic in (False, True):
        found = generate(sessions("fp32", True, deterministic, None), SOURCES, options)
        assert [best.alignments for best, *_ in found] == wanted


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_command_that_ended_in_a_key_error(cli, bundle, precision):
    line, shortlist = "5 9 900 17", " ".join(map(str, LISTED))
    flags = ("run", bundle.root, line, "--precision", precision, "--shortlist", shortlist, "--beam", 4)
    _, plain, _ = cli(*flags)
    code, out, err = cli(*flags, "--alignments")
    assert (code, out.split("\t")[0]) == (0, plain.rstrip("\n"))
    code, _, err = cli(*flags, "--alignments", "--draft", "w8a8" if precision != "w8a8" else "fp32")
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = cli(*flags[:-2], "--coverage-penalty", 0.3)
    assert code == 2
    assert "coverage penalty together with beam 1" in err


def test_workers_keep_their_attention(bundle, monkeypatch):
    """Several sources a thread, in a batch large enough for two threads to have a decode each."""
    rows = [[3 + (7 * i + j) % 90 for j in range(1 + i % 9)] for i in range(40)]
    workers_for_few_rows(monkeypatch)
    options = SearchOptions(6, alignments=True)
    with open_session(bundle, precision="w8a8", threads=2, attention=True) as session:
        assert len(workers_for(session, len(rows), len(rows))) == 2
        found = generate(session, rows, options)
        alone = [generate(session, [row], options)[0] for row in rows[:5]]
    assert [(n[0].tokens, n[0].alignments) for n in found[:5]] == [(n[0].tokens, n[0].alignments) for n in alone]


def test_a_session_without_graph_files_has_no_workers():
    with CalibrationSession(graphs_from_model(random_model(CONFIG, 3)), CONFIG, "static") as session:
        assert workers_for(session, 64, 10**9) == (session,)
