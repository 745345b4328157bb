"""Speculative decoding: the tokens and scores of the target precision, whatever drafts are worth; and fewer steps."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import rounding_from_session

from seq2engine.errors import SessionError
from seq2engine.export.ort_forms import draft_step, narrow_table
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.backends import QUANTISED
from seq2engine.runtime.generate import generate
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import binding, graphs
from seq2engine.runtime.ort.drafting import FIRST, LONGEST, DraftLength
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.ort.speculative import PATIENCE, SpeculativeSession
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=60, target_vocab=60, max_source=24, max_target=40)
POSITIONS = ["sinusoidal", "learned", "rotary"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("speculative")
    configs = {positions: dataclasses.replace(SMALL, positions=positions) for positions in POSITIONS}
    return {
        name: onnx_from_model(random_model(config, seed=3), root / name, ("fp32", "fp16", "w8a8"))
        for name, config in configs.items()
    }


@pytest.fixture(scope="module", params=["w8a8", QUANTISED])
def sessions(request, bundles):
    """Of every kind of positions a plain session, and one with drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_step, "LEAST", 1)  # small weights are packed, too
        pairs = {
            name: (open_session(bundle, threads=1), open_session(bundle, threads=1, draft=request.param))
            for name, bundle in bundles.items()
        }
        yield pairs
    for pair in pairs.values():
        for session in pair:
            session.close()


def sources_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, rng.integers(1, 24)).tolist() for _ in range(count)]


def scored(found):
    return [[(h.tokens, h.score, len(h.log_probs)) for h in nbest] for nbest in found]


def expected_of(session, sources, options):
    """The session's own output; scores up to the rounding of another order of sums."""
    near = rounding_from_session(session, sources, options.max_length, stretch=options.repetition_penalty)
    return [
        [(h.tokens, score, len(h.log_probs)) for h, score in zip(nbest, near.scores(nbest, options), strict=True)]
        for nbest in generate(session, sources, options)
    ]


OPTIONS = [
    SearchOptions(max_length=40),
    SearchOptions(max_length=40, min_length=40),
    SearchOptions(max_length=1),
    SearchOptions(max_length=33, beam_style="ctranslate2"),
    SearchOptions(max_length=20, banned=((7,), (9, 11)), no_repeat_ngram=2, repetition_penalty=1.3),
    SearchOptions(max_length=20, prefix=(5, 6, 7)),
    SearchOptions(max_length=20, shortlist=tuple(range(3, 60, 2))),
    SearchOptions(max_length=30, sample=True, seed=4, temperature=1.5),
    SearchOptions(max_length=12, alternatives=True, nbest=1),
]


@pytest.mark.each_value
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_outputs_are_those_of_the_target(sessions, positions, options):
    plain, speculative = sessions[positions]
    for source in sources_of(6):
        assert scored(generate(speculative, [source], options)) == expected_of(plain, [source], options)


@pytest.mark.parametrize(("count", "beam"), [(1, 4), (5, 1), (5, 3)])
def test_several_rows_go_without(sessions, count, beam):
    plain, speculative = sessions["rotary"]
    options, sources = SearchOptions(max_length=12, beam=beam, nbest=beam), sources_of(count)
    assert scored(generate(speculative, sources, options)) == expected_of(plain, sources, options)


@pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
@pytest.mark.parametrize(
    ("count", "beam", "ahead"), [(1, 1, False), (2, 1, True), (1, 3, True), (9, 1, True), (9, 3, True)]
)
@pytest.mark.parametrize("scores", [True, False])
def test_what_is_not_drafted_runs_many_steps_in_a_call(sessions, monkeypatch, count, beam, ahead, scores):
    plain, speculative = sessions["learned"]
    calls = []
    for name in ("choose_alone", "choose_beams"):
        called = getattr(speculative, name)
        monkeypatch.setattr(speculative, name, lambda *given, called=called: calls.append(1) or called(*given))
    options, sources = SearchOptions(max_length=30, beam=beam, scores=scores), sources_of(count)
    found, expected = (generate(session, sources, options) for session in (speculative, plain))
    assert [nbest[0].tokens for nbest in found] == [nbest[0].tokens for nbest in expected]
    assert bool(calls) == ahead


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 40), st.data())
def test_wrong_drafts_change_nothing(sessions, seed, length, data):
    """Whatever is drafted, the target's own tokens come out."""
    plain, speculative = sessions["learned"]
    rng = np.random.default_rng(seed)
    honest = speculative.draft.step
    wrong = data.draw(st.floats(0, 1))

    def lying(state, tokens, *rest):
        answer = honest(state, tokens, *rest)
        if rng.random() < wrong:
            answer.reduced.candidates.tokens[..., 0] = rng.integers(0, 60)
        return answer

    options, (source,) = SearchOptions(max_length=length, min_length=length), sources_of(1, seed)
    speculative.draft.step = lying
    try:
        found = generate(speculative, [source], options)
    finally:
        del speculative.draft.step
    assert scored(found) == expected_of(plain, [source], options)


class OfOneLength(DraftLength):
    """Times do not matter: as many tokens as before anything is measured."""

    def note_step(self, tokens, drafting, verifying):
        assert tokens <= self.most


class Counted:
    """How often a session's own steps were run, and with how many tokens; with drafts of one length."""

    def __init__(self, monkeypatch, speculative):
        self.steps: list[int] = []
        self.drafted = 0
        monkeypatch.setattr(speculative, "length", OfOneLength())
        honest = OrtSession.step

        def counting(session, state, tokens, *rest):
            if session is speculative.draft:
                self.drafted += 1
            else:
                self.steps.append(tokens.size)
            return honest(session, state, tokens, *rest)

        monkeypatch.setattr(OrtSession, "step", counting)


def test_right_drafts_save_steps(sessions, monkeypatch):
    """A draft that is always right: the session itself."""
    plain, speculative = sessions["sinusoidal"]
    counted = Counted(monkeypatch, speculative)
    monkeypatch.setattr(speculative.draft, "decoders", plain.decoders)
    generate(speculative, sources_of(1), SearchOptions(max_length=40, min_length=40))
    assert sum(counted.steps) >= 40
    assert len(counted.steps) <= 40 // FIRST + 4  # less where the cache ends before the drafts do
    assert max(counted.steps) == FIRST


def test_nothing_is_drafted_behind_an_end_token(sessions, monkeypatch):
    """Drafts would be of no use, unless the search goes on behind end tokens."""
    plain, speculative = sessions["sinusoidal"]
    counted = Counted(monkeypatch, speculative)
    honest, end = speculative.draft.step, speculative.config.end_id

    def ending(state, *given):
        answer = honest(state, *given)
        answer.reduced.candidates.tokens[..., 0] = end
        return answer

    monkeypatch.setattr(speculative.draft, "step", ending)
    generate(speculative, sources_of(1), SearchOptions(max_length=3, min_length=3))
    assert max(counted.steps) == 2
    options = SearchOptions(max_length=12, ignore_eos=True, allowed=(end,))
    assert scored(generate(speculative, sources_of(1), options)) == expected_of(plain, sources_of(1), options)
    assert max(counted.steps) > 2


def test_length_of_drafts_follows_what_was_measured(sessions):
    """A session learns from its steps; the tokens stay the same."""
    plain, speculative = sessions["rotary"]
    options = SearchOptions(max_length=40, min_length=40)
    for source in sources_of(3):
        assert scored(generate(speculative, [source], options)) == expected_of(plain, [source], options)
    assert speculative.length.steps
    assert 2 <= speculative.length.most <= LONGEST


def test_a_draft_that_is_never_right_is_given_up(sessions, monkeypatch):
    _, speculative = sessions["sinusoidal"]
    counted = Counted(monkeypatch, speculative)
    honest = speculative.draft.step

    def lying(state, *given):
        answer = honest(state, *given)
        answer.reduced.candidates.tokens[..., 0] = 7
        return answer

    monkeypatch.setattr(speculative.draft, "step", lying)
    generate(speculative, sources_of(1), SearchOptions(max_length=40, min_length=40, banned=((7,),)))
    assert len(counted.steps) == 40
    assert counted.drafted <= (PATIENCE + 1) * (FIRST - 1)


@pytest.fixture
def narrowed(tmp_path, monkeypatch):
    """A bundle whose table is narrowed however small it is, and the graphs that were tried for it."""
    monkeypatch.setattr(draft_step, "LEAST", 1)
    monkeypatch.setattr(draft_step, "WORTH_NARROWING", 1)
    tied = dataclasses.replace(SMALL, tie_output=True, share_embeddings=False)
    tried = []
    honest = graphs.narrow_graph
    monkeypatch.setattr(graphs, "narrow_graph", lambda *given: tried.append(honest(*given)) or tried[-1])
    return onnx_from_model(random_model(tied, seed=3), tmp_path / "bundle", ("fp32",)), tried


LONG = SearchOptions(max_length=40, min_length=40, scores=False)


def test_the_table_is_narrowed_by_what_was_drafted(narrowed, monkeypatch, tmp_path):
    """Once, after enough drafts, for all later sessions; outputs stay the target's."""
    monkeypatch.setattr(narrow_table, "FOUND", 0.0)  # any will do
    bundle, tried = narrowed
    with open_session(bundle, threads=1, draft=None) as plain:
        expected = [generate(plain, [source], LONG)[0][0].tokens for source in sources_of(16)]
    for number in range(2):
        with open_session(bundle, threads=1, draft=QUANTISED, cache=tmp_path / "kept") as session:
            assert session.draft.decoders.first.state_width == (0 if number else SMALL.d_model)
            found = [generate(session, [source], LONG)[0][0].tokens for source in sources_of(16)]
            assert session.draft.decoders.first.state_width == 0
            assert not session.states
        assert found == expected
    assert len(tried) == 1
    assert tried[0] is not None


def test_a_table_that_cannot_be_narrowed_is_tried_once(narrowed, monkeypatch):
    monkeypatch.setattr(narrow_table, "FOUND", 2.0)  # none does
    bundle, tried = narrowed
    with open_session(bundle, threads=1, draft=QUANTISED) as session:
        for source in sources_of(32):
            generate(session, [source], LONG)
        assert session.draft.decoders.first.state_width == SMALL.d_model
    assert tried == [None]


def test_a_draft_session_has_its_encoder_beside_a_kept_narrow_table(narrowed, monkeypatch, tmp_path):
    """Graphs are kept by name: the narrow step is not taken for the encoder."""
    monkeypatch.setattr(narrow_table, "FOUND", 0.0)
    bundle, tried = narrowed
    with open_session(bundle, threads=1, draft=QUANTISED, cache=tmp_path / "kept") as session:
        for source in sources_of(16):
            generate(session, [source], LONG)
        model = session.target.model
    assert tried
    with OrtSession(model, OrtSettings(1, drafts=True)) as alone:
        assert alone.encode(np.array([[5, 6]]), np.ones((1, 2), dtype=bool))["encoder_states"].shape[1] == 2


def test_threads_rest_while_the_other_works(bundles):
    """Threads that wait in a busy loop would take a core from the graph that comes next."""
    with open_session(bundles["rotary"], threads=2, draft="w8a8") as session:
        generate(session, sources_of(1), SearchOptions(max_length=40, min_length=40))
        spent = []
        for _ in range(5):
            generate(session, sources_of(1), SearchOptions(max_length=4))
            started = time.process_time()
            time.sleep(0.03)
            spent.append(time.process_time() - started)
    assert min(spent) < 0.01


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"draft": "fp16"}, "fp16 cannot draft for fp32, expected another precision with the same cache"),
        ({"draft": "fp32"}, "fp32 cannot draft for fp32"),
        ({"draft": "int8"}, "int8"),
        (
            {"draft": QUANTISED, "precision": "fp16"},
            "weights of fp16 in fewer bits cannot draft, expected",
        ),
        ({"draft": QUANTISED, "deterministic": True}, "speculative decoding is for onnxruntime on the CPU"),
        ({"draft": "w8a8", "backend": "torch"}, "speculative decoding is for onnxruntime on the CPU"),
        ({"draft": "w8a8", "attention": True}, "speculative decoding is for onnxruntime on the CPU"),
        ({"draft": "w8a8", "deterministic": True}, "speculative decoding is for onnxruntime on the CPU"),
    ],
)
def test_what_cannot_be_drafted(bundles, given, reason):
    with pytest.raises(Exception, match=reason) as caught:
        open_session(bundles["rotary"], **given)
    assert "seq2engine" in type(caught.value).__module__


def test_a_growing_cache_is_refused(tmp_path):
    bundle = onnx_from_model(random_model(SMALL), tmp_path / "b", ("fp32", "w8a8"), "growing")
    with pytest.raises(SessionError, match="speculative decoding with a growing cache, expected a static one"):
        SpeculativeSession.from_bundle(bundle, "fp32", "w8a8")
    with pytest.raises(SessionError, match="speculative decoding with a growing cache, expected a static one"):
        SpeculativeSession.from_bundle(bundle, "fp32", QUANTISED)


@pytest.mark.parametrize("batch", [1, 3])
def test_continuous_batching_with_speculative_decoding(sessions, batch):
    """A source that joins is encoded in a state that has nothing drafted yet."""
    plain, speculative = sessions["sinusoidal"]
    sources, options = sources_of(7, seed=5), SearchOptions(max_length=12, scores=False)
    expected = [nbest[0].tokens for nbest in generate(plain, sources, options)]
    found = dict(translate_many(speculative, sources, options, batch))
    assert [found[row][0].tokens for row in range(len(sources))] == expected


@pytest.mark.parametrize("scores", [True, False])
def test_a_verifying_step_is_not_computed_again_for_logits_that_nobody_reads(bundles, monkeypatch, scores):
    repeated = []

    class Watched(binding.RepeatedStep):
        def __getitem__(self, index):
            repeated.append(index)
            return super().__getitem__(index)

    monkeypatch.setattr(binding, "RepeatedStep", Watched)
    with open_session(bundles["sinusoidal"], threads=1, draft=QUANTISED) as session:
        assert isinstance(session, SpeculativeSession)
        if not session.target.form.kernels:
            pytest.skip("the kernel library is not built: without it a step outputs logits")
        for source in sources_of(3):  # one by one: several rows are not drafted
            generate(session, [source], SearchOptions(max_length=30, min_length=20, scores=scores))
        assert session.length.steps, "drafts were verified"
        assert not repeated
