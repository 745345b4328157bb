"""Decodes that ask for tokens alone: the same tokens as with scores, by a shortcut where there is one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.fast_cases import named_rest_slow
from support.workers import workers_for_few_rows

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import form_from_options, generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.binding import RepeatedStep, candidates_of
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import NotFiniteError, Shortlist
from seq2engine.runtime.session import StepForm
from seq2engine.runtime.steps import tree_cache
from seq2engine.runtime.text.continuous_batching import translate_many

VOCAB = 32000  # small otherwise, but the table is worth a shortcut
CONFIG = dataclasses.replace(PRESETS["tiny"], source_vocab=VOCAB, target_vocab=VOCAB, tie_output=True)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("unscored")
    return {
        cache: onnx_from_model(random_model(CONFIG, seed=2), root / cache, ("fp32", "w8a8"), cache)
        for cache in ("static", "growing")
    }


def sources_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(1, 30)).tolist() for _ in range(count)]


def tokens_of(found):
    return [[h.tokens for h in nbest] for nbest in found]


def shortcut_of(session, options):
    """How many candidates a step outputs instead of logits; 0 where it has no shortcut."""
    state = session.encode(np.array([[5, 6, 7]]), np.ones((1, 3), dtype=bool))
    session.reserve(state, 8, form_from_options(options, session.config))
    return candidates_of(state)


def both(options):
    return options, dataclasses.replace(options, scores=False)


@pytest.mark.each_value
@pytest.mark.parametrize("cache", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_tokens_are_those_with_scores(bundles, cache, precision, count):
    sources = sources_of(count)
    scored, unscored = both(SearchOptions(max_length=24))
    with open_session(bundles[cache], precision=precision, threads=1) as session:
        assert shortcut_of(session, unscored), "there is a shortcut"
        expected, found = generate(session, sources, scored), generate(session, sources, unscored)
    assert tokens_of(found) == tokens_of(expected)
    assert all(math.isnan(nbest[0].score) and nbest[0].log_probs == () for nbest in found)
    assert all(math.isfinite(nbest[0].score) and nbest[0].log_probs for nbest in expected)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
@pytest.mark.parametrize("style", ["huggingface", "ctranslate2"])
def test_an_output_bias_decides_among_the_same_tokens(tmp_path, precision, style):
    """As in Marian models: biases as large as logits, and a token that is masked by its own."""
    model = random_model(dataclasses.replace(CONFIG, output_bias=True), seed=2)
    bias = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32)
    bias[-1] = -1e9
    model.output.bias.data.copy_(torch.from_numpy(bias))
    scored, unscored = both(SearchOptions(max_length=12, beam_style=style))
    with open_session(onnx_from_model(model, tmp_path / "b", (precision,)), precision=precision, threads=1) as session:
        assert shortcut_of(session, unscored) == 1
        for count in (1, 9):
            expected, found = (generate(session, sources_of(count, 5), options) for options in (scored, unscored))
            assert tokens_of(found) == tokens_of(expected)


def test_pytorch_decodes_the_same(bundles):
    sources = sources_of(12, seed=4)
    with open_session(bundles["static"], "torch") as reference, open_session(bundles["static"], threads=1) as ort:
        scored, unscored = both(SearchOptions(max_length=24))
        expected = generate(reference, sources, scored)
        assert tokens_of(generate(reference, sources, unscored)) == tokens_of(expected)
        assert tokens_of(generate(ort, sources, unscored)) == tokens_of(expected)


RULES = {
    "min_length": {"min_length": 12},
    "forced_bos": {"forced_bos": 7},
    "forced_eos": {"forced_eos": 2},
    "prefix": {"prefix": (5, 6)},
    "banned": {"banned": ((9,), (11, 12)), "no_repeat_ngram": 2},
    "repetition": {"repetition_penalty": 1.5},
    "shortlist": {"shortlist": tuple(range(3, 3000, 2))},
    "allowed": {"allowed": tuple(range(3, 300))},
    "first_banned": {"first_banned": (5, 9), "min_length": 3, "banned": ((7,),)},
    "many_banned": {"banned": tuple((token,) for token in range(3, 40))},
    "beam": {"beam": 3, "nbest": 3},
    "ctranslate2": {"beam_style": "ctranslate2"},
    "ctranslate2 unpenalised": {
        "beam_style": "ctranslate2",
        "length_penalty": 0.0,
        "shortlist": tuple(range(3, 300)),
    },
    "ctranslate2 ruled": {"beam_style": "ctranslate2", "min_length": 6, "banned": ((9,),), "repetition_penalty": 1.3},
    "sample": {"sample": True, "seed": 3, "nbest": 2},
    "alternatives": {"alternatives": True, "nbest": 3},
}


@pytest.mark.parametrize(
    "rules", named_rest_slow(RULES, ("prefix", "banned", "shortlist", "beam", "ctranslate2 ruled", "sample"))
)
def test_with_rules_and_other_searches_too(bundles, rules):
    sources = sources_of(5, seed=1)
    scored, unscored = both(SearchOptions(max_length=12, **rules))
    with open_session(bundles["static"], threads=1) as session:
        expected, found = generate(session, sources, scored), generate(session, sources, unscored)
    assert tokens_of(found) == tokens_of(expected)
    if not unscored.unscored:
        assert found == expected, "scores come with the search"


@pytest.mark.parametrize("name", ["banned", "first_banned", "min_length"])
def test_what_would_be_output_is_barred(bundles, name):
    """Rules that take the best candidates away."""
    sources = sources_of(8, seed=6)
    with open_session(bundles["static"], threads=1) as session:
        outputs = [nbest[0].tokens for nbest in generate(session, sources, SearchOptions(max_length=12))]
        often = sorted({token for tokens in outputs for token in tokens[:2]})[:12]
        rules = {
            "banned": {"banned": tuple((token,) for token in often)},
            "first_banned": {"first_banned": tuple({tokens[0] for tokens in outputs})},
            "min_length": {"min_length": 12},
        }
        scored, unscored = both(SearchOptions(max_length=12, **rules[name]))
        assert shortcut_of(session, unscored)
        if name == "min_length":  # an end token that is what they say: they have to say something else
            config = dataclasses.replace(session.config, end_id=outputs[0][3])
            session.config = config
        expected, found = generate(session, sources, scored), generate(session, sources, unscored)
        session.config = CONFIG
    assert tokens_of(found) == tokens_of(expected)
    assert [nbest[0].tokens for nbest in found] != outputs


@pytest.mark.slow
def test_prefixes_workers_continuous_batching_and_speculative_decoding(bundles, monkeypatch):
    workers_for_few_rows(monkeypatch)
    sources = sources_of(66, seed=2)
    scored, unscored = both(SearchOptions(max_length=10))
    with open_session(bundles["static"], threads=2) as session:
        assert len(workers_for(session, len(sources), len(sources))) == 2
        expected = generate(session, sources, scored)
        assert tokens_of(generate(session, sources, unscored)) == tokens_of(expected)
        fed = dict(translate_many(session, sources, unscored, batch=8))
        assert tokens_of([fed[number] for number in range(len(sources))]) == tokens_of(expected)
        prefixes = [[number + 3] for number in range(len(sources))]
        given = [generate(session, sources, options, prefixes=prefixes) for options in (scored, unscored)]
        assert tokens_of(given[0]) == tokens_of(given[1])
        fed = dict(translate_many(session, sources, unscored, batch=8, prefixes=prefixes))
        assert tokens_of([fed[number] for number in range(len(sources))]) == tokens_of(given[0])
    with open_session(bundles["static"], threads=1, draft="w8a8") as session:
        for source, wanted in zip(sources[:6], expected, strict=False):
            assert tokens_of(generate(session, [source], unscored)) == tokens_of([wanted])


def test_one_session_decodes_in_several_forms_at_once(bundles):
    """A form belongs to a state; the other states of the session stay as they are."""
    mask = np.zeros((1, 1, 8), dtype=bool)
    mask[..., 0] = True
    given = np.array([[1]]), np.array([0]), np.array([0]), mask
    shortlist = Shortlist((2, 7, 900, 31999), VOCAB)
    with open_session(bundles["static"], threads=1) as session:
        forms = (StepForm(), StepForm(candidates=2), StepForm(shortlist), StepForm(shortlist, 2))
        states = [session.encode(np.array([[5, 6, 7]]), np.ones((1, 3), dtype=bool)) for _ in forms]
        for state, form in zip(states, forms, strict=True):
            session.reserve(state, 8, form)
        whole, short, listed, both_ways = (session.step(state, *given) for state in states)
        assert whole.logits.shape == (1, 1, VOCAB)
        assert np.array_equal(short.candidates.tokens, whole.candidates.tokens)
        assert np.array_equal(short.logits, whole.logits), "the step again, as they are asked for"
        best = shortlist.tokens[whole.logits[0, 0, list(shortlist.tokens)].argmax()]
        assert listed.candidates.tokens[0, 0, 0] == both_ways.candidates.tokens[0, 0, 0] == best
        assert session.step(states[0], *given).logits.shape == (1, 1, VOCAB)


def test_where_every_bit_counts_there_is_no_shortcut(bundles):
    options = SearchOptions(max_length=4, scores=False)
    with open_session(bundles["static"], deterministic=True) as session:
        assert shortcut_of(session, options) == 0


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_logits_that_are_no_numbers_are_refused(tmp_path, precision):
    model = random_model(CONFIG, seed=2)
    norm = model.decoder[-1].feed_residual.norm
    norm.weight.data.fill_(0)
    norm.bias.data.fill_(3e38)
    bundle = onnx_from_model(model, tmp_path / "bundle", (precision,))
    with open_session(bundle, precision=precision, threads=1) as session, pytest.raises(NotFiniteError):
        generate(session, [[5, 6]], SearchOptions(max_length=4, scores=False))


def test_steps_without_kernels_have_no_logits_where_candidates_are_asked_for(bundles, without_kernels):
    mask = np.zeros((1, 1, 8), dtype=bool)
    mask[..., 0] = True
    with open_session(bundles["static"], threads=1) as session:
        state = session.encode(np.array([[5, 6, 7]]), np.ones((1, 3), dtype=bool))
        session.reserve(state, 8, StepForm(candidates=2))
        output = session.step(state, np.array([[1]]), np.array([0]), np.array([0]), mask)
        assert output.logits.size == 0, "nothing that could be taken for logits"


def test_workers_have_the_shortcut_where_it_takes_no_second_table(bundles, monkeypatch, without_kernels):
    workers_for_few_rows(monkeypatch)
    options = SearchOptions(max_length=4, scores=False)
    listed = dataclasses.replace(options, shortlist=tuple(range(3, 2000)))
    for precision, wanted in (("w8a8", 1), ("fp32", 0)):
        with open_session(bundles["static"], precision=precision, threads=2) as session:
            worker = workers_for(session, 64, 64)[0]
            assert (shortcut_of(worker, options), shortcut_of(worker, listed)) == (wanted, 0)
            assert shortcut_of(session, options) == 1


@pytest.fixture
def repeated(monkeypatch) -> list:
    """What is read of the logits of steps that are computed again for them."""
    found = []

    def logits_again(self, index):
        found.append(index)
        return self.all[index]

    monkeypatch.setattr(RepeatedStep, "__getitem__", logits_again)
    return found


def test_the_first_step_of_beams_that_are_alike_is_not_computed_again(bundles, monkeypatch, repeated):
    monkeypatch.setattr(tree_cache, "FIRST_STEP", 1)
    with open_session(bundles["static"], threads=1) as session:
        found = generate(session, sources_of(2), SearchOptions(max_length=9, beam=3))
    assert all(nbest[0].tokens for nbest in found)
    assert not repeated


@pytest.mark.parametrize("options", [{"min_length": 6}, {"banned": ((5,),)}], ids=str)
def test_no_step_is_computed_again_for_rules_that_candidates_suffice_for(options, bundles, repeated):
    with open_session(bundles["static"], threads=1) as session:
        found = generate(session, sources_of(2), SearchOptions(max_length=9, scores=False, **options))
    assert all(nbest[0].tokens for nbest in found)
    assert not repeated
