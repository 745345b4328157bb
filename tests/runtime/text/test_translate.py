"""Lines through a whole model: aligned, in order, as early as can be, and the same alone as in a batch."""

from __future__ import annotations

import threading
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import rounding_from_session
from support.text_bundle import CONFIG, LETTERS, TOKENIZER, text_bundle

from seq2engine.errors import RequestError
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.ids import IdsTokenizer
from seq2engine.model.tokenizers.symbols import END
from seq2engine.runtime.generate import generate
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.option_checks import problems_of
from seq2engine.runtime.search.option_fields import OptionFields
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Limits
from seq2engine.runtime.text import lines, translate
from seq2engine.runtime.text.batching import batches_by_length
from seq2engine.runtime.text.continuous_batching import first_then_longest, worth_it
from seq2engine.runtime.text.lines import Line
from seq2engine.runtime.text.translate import cut_source, translate_lines, translate_texts

OPTIONS = SearchOptions(max_length=12)
TEXTS = st.text(st.one_of(st.sampled_from(LETTERS), st.characters(blacklist_categories=["Cs"])), max_size=20)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with open_session(text_bundle(tmp_path_factory.mktemp("text")), threads=1) as opened:
        yield opened


def lines_of(*texts):
    return [Line(number, text) for number, text in enumerate(texts, start=1)]


def run(session, *texts, **how):
    return list(translate_lines(session, TOKENIZER, lines_of(*texts), **{"options": OPTIONS, **how}))


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(TEXTS, max_size=12), batch=st.integers(1, 5), beam=st.sampled_from([1, 3]), truncate=st.booleans()
)
def test_a_line_gets_what_it_gets_alone(session, texts, batch, beam, truncate):
    options = SearchOptions(max_length=8, beam=beam, nbest=beam)
    found = run(session, *texts, options=options, batch=batch, truncate=truncate)
    assert [one.line for one in found] == lines_of(*texts)
    for text, one in zip(texts, found, strict=True):
        ids = TOKENIZER.encode_source(text)
        if not text.strip():
            assert (one.outputs, one.error) == ((), None)
        elif len(ids) > CONFIG.max_source and not truncate:
            assert one.outputs == ()
            assert f"{len(ids)} tokens, at most 16 are supported; shorten it or add --truncate" == one.error
        else:
            ids = ids if len(ids) <= 16 else [*ids[:15], END]
            (alone,) = generate(session, [ids], options)
            assert one.source == tuple(ids)
            assert [output.tokens for output in one.outputs] == [best.tokens for best in alone]
            assert [output.text for output in one.outputs] == [TOKENIZER.decode_target(best.tokens) for best in alone]
            near = rounding_from_session(session, [ids], 8)
            assert [output.score for output in one.outputs] == near.scores(alone, options)


def test_results_do_not_wait_for_lines_that_have_not_come(session):
    more = threading.Event()

    def slow():
        yield from lines_of("abc", "d")
        assert more.wait(10)
        yield Line(3, "ef")

    found = translate_lines(session, TOKENIZER, slow(), OPTIONS)
    assert [next(found).line.number, next(found).line.number] == [1, 2]
    more.set()
    assert [one.line.number for one in found] == [3]


def test_the_first_line_is_decoded_first_and_only_with_its_batch(session, monkeypatch):
    monkeypatch.setattr(lines, "QUIET", 10.0)  # one window, however busy the machine is
    monkeypatch.setattr(lines, "PATIENCE", 10.0)
    decoded = []
    encode = session.encode
    monkeypatch.setattr(session, "encode", lambda ids, mask: decoded.append(mask.sum(1).tolist()) or encode(ids, mask))
    found = translate_lines(session, TOKENIZER, lines_of("abcdefg", "a", "abcdef", "ab", ""), OPTIONS, batch=2)
    assert next(found).line.number == 1
    assert decoded == [[7, 8]]  # with the end token
    assert len(list(found)) == 4
    assert decoded == [[7, 8], [2, 3]]


def test_batches_fit_the_session(session, monkeypatch):
    sizes = []
    encode = session.encode
    monkeypatch.setattr(session, "encode", lambda ids, mask: sizes.append(len(ids)) or encode(ids, mask))
    monkeypatch.setattr(session, "limits", Limits(batch=3, beam=None, source=16, target=12))
    assert len(run(session, *"abcdefgh", batch=32)) == 8
    assert max(sizes) <= 3
    assert sum(sizes) == 8


def test_errors_stay_with_their_line(session):
    given_lines = [Line(1, "a"), Line(2, error="odd"), Line(3, "b" * 10_000), Line(4, " \u00a0"), Line(5, "c")]
    found = list(translate_lines(session, TOKENIZER, given_lines, OPTIONS))
    assert [one.error for one in found] == [
        None,
        "odd",
        "10,001 tokens, at most 16 are supported; shorten it or add --truncate",
        None,
        None,
    ]
    assert [len(one.outputs) for one in found] == [1, 0, 0, 0, 1]


def test_a_text_the_tokenizer_sees_nothing_in_is_an_empty_one(session):
    class Deaf(IdsTokenizer):
        def encode_source(self, text, language=None):
            return [END]

    (found,) = translate_lines(session, Deaf(), lines_of("hello"), OPTIONS)
    assert (found.outputs, found.error) == ((), None)


def test_ids_are_text_too(session):
    found = list(
        translate_lines(session, IdsTokenizer(), lines_of("5 6 7", "5 six", "5 -1", "5 99", "5 " + "9" * 5000), OPTIONS)
    )
    assert found[0].source == (5, 6, 7)
    assert found[0].outputs[0].text == " ".join(str(token) for token in found[0].outputs[0].tokens)
    assert found[1].error == "'six' is not a token id, expected a line such as: 17 4 250"
    assert found[2].error.startswith("'-1' is not a token id")
    assert found[3].error == f"token 99, but the vocabulary has 0 to {CONFIG.source_vocab - 1}"
    assert len(found[4].error) < 120


def test_what_no_line_could_be_decoded_with_is_refused_before_any_is_read(session):
    def unread():
        raise AssertionError("a line was read")
        yield

    for wrong, message in (
        ({"batch": 0}, "batch 0, expected at least 1"),
        ({"options": SearchOptions(max_length=99)}, "max length 99, at most 12"),
        ({"language": "fra"}, "'fra' asked for, but this model's tokenizer has no languages"),
    ):
        with pytest.raises(RequestError, match=message):
            translate_lines(session, TOKENIZER, unread(), **{"options": OPTIONS, **wrong})
    with pytest.raises(RequestError, match="token ids have none"):
        translate_lines(session, IdsTokenizer(), unread(), OPTIONS, language="fra")


def test_translate_texts_gives_texts(session):
    def translate(texts, options=OPTIONS, **how):
        return list(translate_texts(session, TOKENIZER, texts, options, **how))

    best = translate(["abc", "", "de"], SearchOptions(max_length=8))
    assert best[1] == ""
    assert best[0] == TOKENIZER.decode_target(generate(session, [[*TOKENIZER.encode_source("abc")]])[0][0].tokens[:8])
    assert translate([]) == []
    with pytest.raises(RequestError, match="text 2: 31 tokens, at most 16"):
        translate(["a", "b" * 30])
    assert len(translate(["a", "b" * 30], truncate=True)) == 2


def test_a_cut_keeps_what_closes_a_source():
    assert cut_source([7, 1, 2, 3, 8], [7, 8], 3) == [7, 1, 8]  # language first, end last
    assert cut_source([1, 2, 3, 8, 7], [8, 7], 3) == [1, 8, 7]  # both last
    assert cut_source([1, 2, 3, 4], [], 3) == [1, 2, 3]
    assert cut_source([1, 2, 3, 8, 7], [8, 7], 1) == [7]
    assert cut_source([1, 2, 8], [8], 3) == [1, 2, 8]


# One option of each kind of search; every pair of them that goes together is decoded both ways.
WISHES = [
    {"beam": 3, "nbest": 2},
    {"sample": True, "nbest": 2, "seed": 7},
    {"alternatives": True, "nbest": 2},
    {"no_repeat_ngram": 1},
    {"shortlist": (4, 5, 6, 7, 8, 9)},
    {"prefix": (6, 8)},
    {"phrases": ((9, 4),)},
    {"scores": False},
]
PAIRS = [one | other for one, other in combinations(WISHES, 2) if not problems_of(OptionFields(12, **(one | other)))]


@pytest.mark.parametrize("wishes", PAIRS, ids=str)
def test_continuous_batching_changes_no_output_and_no_order(session, monkeypatch, wishes):
    """Every line gets the same outputs and errors as in batches by length, whichever is chosen."""
    texts = ["abc", "", "hij", "decade", "b" * 30, "fig", "chief", "a", "jade", "bead", "egg"]
    options = SearchOptions(max_length=12, **wishes)
    found = {}
    for chosen in (False, True):
        monkeypatch.setattr(translate, "worth_it", lambda *asked, chosen=chosen: chosen)
        found[chosen] = run(session, *texts, options=options, batch=3)
    assert [one.line.number for one in found[True]] == list(range(1, 12))
    assert [one.error for one in found[True]] == [one.error for one in found[False]]
    tokens = [[[output.tokens for output in one.outputs] for one in each] for each in found.values()]
    assert tokens[0] == tokens[1]


def test_own_prefixes_go_with_their_lines_by_continuous_batching(session, monkeypatch):
    texts, prefixes = ["abc", "decade", "a", "jade", "egg"], [(6,), (), (7, 8), (9,), (4,)]
    monkeypatch.setattr(translate, "worth_it", lambda *asked: True)
    found = run(session, *texts, batch=2, prefixes=prefixes)
    for one, prefix in zip(found, prefixes, strict=True):
        assert one.outputs[0].tokens[: len(prefix)] == prefix


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 6))
def test_the_first_line_s_batch_begins_then_the_longest(lengths, rows):
    order = first_then_longest(lengths, rows)
    assert sorted(order) == list(range(len(lengths)))
    assert 0 in order[:rows]
    rest = order[min(rows, len(batch_of(lengths, rows))) :]
    assert [lengths[place] for place in rest] == sorted((lengths[place] for place in rest), reverse=True)


def batch_of(lengths, rows):
    """The batch by length that the first source is in."""
    return next(batch for batch in batches_by_length(lengths, rows) if 0 in batch)


def test_continuous_batching_is_chosen_where_it_pays(session, monkeypatch):
    assert not worth_it(session, 100, 32, 1)  # a tiny model: the loop around a step is most of it
    large = PRESETS["base"]
    monkeypatch.setattr(session, "config", large)
    assert worth_it(session, 100, 32, 1)
    assert not worth_it(session, 100, 32, 1, ahead=True)
    assert not worth_it(session, 32, 32, 1)  # one batch: no row gets a new source
    assert not worth_it(session, 100, 32, 4)
    monkeypatch.setattr(session, "backend", "tensorrt")
    assert worth_it(session, 100, 32, 4)


@pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
@pytest.mark.parametrize("beam", [1, 3])
def test_batches_by_length_are_decoded_in_calls_of_many_steps(session, monkeypatch, beam):
    """Continuous batching makes every step in a call of its own, and is for options that need that."""
    monkeypatch.setattr(translate, "worth_it", lambda *given: not given[-1])
    asked = {
        "ahead": SearchOptions(max_length=8, beam=beam),
        "each step": SearchOptions(max_length=8, beam=beam, no_repeat_ngram=2),
    }
    texts = [text * 2 for text in LETTERS[:6]]
    calls = []
    for name in ("choose_alone", "choose_beams", "step"):
        called = getattr(session, name)
        monkeypatch.setattr(
            session, name, lambda *given, name=name, called=called: calls.append(name) or called(*given)
        )
    for name, options in asked.items():
        calls.clear()
        assert len(run(session, *texts, options=options, batch=2)) == len(texts)
        assert ("step" in calls) == (name == "each step")
        assert len(calls) == 3 or name == "each step"
