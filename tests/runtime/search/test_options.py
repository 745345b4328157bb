"""Search options: every problem in one error, before anything runs; and a decode that its caller stops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from seq2engine.errors import ConfigError, RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.option_checks import problems_with_model
from seq2engine.runtime.search.options import SearchOptions, options_from_values
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.session import Limits, Session

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
END = SMALL.end_id
TRIE = trie_from_sequences([(3, 4), (3, 5, 6)])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_length": 0}, "max length 0, expected at least 1"),
        ({"beam": 0}, "beam 0, expected at least 1"),
        ({"beam": 2, "nbest": 3}, "nbest 3, expected 1 to the beam size 2"),
        ({"sample": True, "nbest": 0}, "nbest 0, expected at least 1 sample"),
        ({"early_stopping": "soon"}, "early stopping 'soon', expected true, false or never"),
        ({"min_length": 9, "max_length": 8}, "min length 9, expected 0 to the max length 8"),
        ({"no_repeat_ngram": -1}, "no repeat ngram -1, expected 0 (none) or more"),
        ({"repetition_penalty": 0}, "repetition penalty 0, expected more than 0"),
        ({"repetition_penalty": float("inf")}, "repetition penalty inf, expected more than 0"),
        ({"length_penalty": float("nan")}, "length penalty nan, expected a number"),
        ({"length_penalty": float("-inf")}, "length penalty -inf, expected a number"),
        ({"sample": True, "temperature": 0.0}, "temperature 0.0, expected more than 0"),
        ({"sample": True, "temperature": float("nan")}, "temperature nan, expected more than 0"),
        ({"sample": True, "top_k": -1}, "top k -1, expected 0 (none) or more"),
        ({"sample": True, "top_p": 0.0}, "top p 0.0, expected more than 0 and at most 1"),
        ({"sample": True, "top_p": 1.5}, "top p 1.5, expected more than 0 and at most 1"),
        ({"sample": True, "seed": -1}, "seed -1, expected 0 or more"),
        ({"sample": True, "beam": 4}, "beam 4 together with sample, expected beam 1 (nbest counts samples)"),
        ({"top_p": 0.5, "seed": 0}, "top p, seed without sample, expected it with sample only"),
        ({"banned": ((),)}, "a banned sequence is empty, expected at least one token"),
        ({"allowed": ()}, "no token is allowed, expected one at least that is not banned"),
        ({"allowed": (3,), "banned": ((3,),)}, "no token is allowed, expected one at least that is not banned"),
        ({"prefix": (3,) * 5, "max_length": 4}, "a prefix of 5 tokens, expected at most the max length 4"),
        (
            {"prefix": (3,) * 4, "max_length": 4, "forced_eos": 2},
            "a prefix of 4 tokens leaves no room for forced eos, expected fewer",
        ),
        (
            {"prefix": (3, 4), "forced_bos": 5},
            "prefix begins with 3, but forced bos is 5; begin the prefix with it",
        ),
        ({"prefix": (3, 4, 5), "banned": ((6,), (4, 5))}, "prefix has 4 5, which is banned"),
        ({"forced_bos": 4, "banned": ((4,),)}, "forced bos has 4, which is banned"),
        ({"forced_bos": 4, "allowed": (5,)}, "forced bos has 4, which is not allowed"),
        ({"prefix": (4, 5, 6), "allowed": (5,)}, "prefix has 4 6, which is not allowed"),
        ({"beam": 2, "coverage_penalty": -1.0}, "coverage penalty -1.0, expected 0 (none) or more"),
        ({"coverage_penalty": 0.2}, "coverage penalty together with beam 1, expected a beam of 2 or more"),
        (
            {"coverage_penalty": 0.2, "sample": True},
            "coverage penalty together with sample, expected a beam of 2 or more",
        ),
        (
            {"coverage_penalty": 0.2, "beam": 2, "alternatives": True},
            "coverage penalty together with alternatives, expected one of them",
        ),
        ({"alternatives": True, "nbest": 0}, "nbest 0, expected at least 1 alternative"),
        ({"alternatives": True, "sample": True}, "alternatives together with sample, expected one of them"),
        (
            {"alternatives": True, "min_alternative_expansion_prob": 1.5},
            "min alternative expansion prob 1.5, expected 0 to 1",
        ),
        (
            {"min_alternative_expansion_prob": 0.5},
            "min alternative expansion prob without alternatives, expected it with alternatives only",
        ),
        (
            {"alternatives": True, "prefix": (3, 4), "max_length": 2},
            "a prefix of 2 tokens leaves no room for alternatives, expected fewer",
        ),
        ({"phrases": ((3,), ())}, "a phrase is empty, expected at least one token"),
        ({"phrases": tuple((i,) for i in range(63))}, "63 phrases, expected at most 62"),
        ({"phrases": ((3, 4),), "banned": ((4,),)}, "phrase 3 4 has 4, which is banned"),
        ({"phrases": ((3, 4, 5),), "banned": ((4, 5),)}, "phrase 3 4 5 has 4 5, which is banned"),
        ({"phrases": ((3, 4),), "allowed": (3,)}, "phrase 3 4 has 4, which is not allowed"),
        ({"phrases": ((3,),), "sample": True}, "phrases together with sample, expected greedy or beam search"),
        ({"phrases": ((3,),), "trie": TRIE}, "phrases together with a trie, expected one of them"),
        (
            {"phrases": ((3, 4), (5, 6)), "max_length": 3},
            "phrases of 4 tokens, but the max length leaves room for 3; raise it",
        ),
        (
            {"phrases": ((3, 4), (5, 6)), "max_length": 6, "prefix": (7, 7, 3), "forced_eos": 9},
            "phrases of 3 tokens, but the max length leaves room for 2; raise it",
        ),
        ({"trie": trie_from_sequences([])}, "the trie is empty, expected at least one sequence"),
        (
            {"trie": TRIE, "max_length": 1},
            "the trie needs 2 tokens at least, but the max length leaves room for 1; raise it",
        ),
        (
            {"trie": TRIE, "banned": ((4,), (5,))},
            "every sequence of the trie that there is room for has a token that is banned or not allowed",
        ),
        (
            {"trie": TRIE, "prefix": (4,)},
            "prefix leaves the trie, expected the beginning of one of its sequences",
        ),
        ({"trie": TRIE, "min_length": 5}, "min length 5, but the longest sequence of the trie has 3 tokens"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SearchOptions(**options)
    assert str(raised.value) == f"search options: {problem}"


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as raised:
        SearchOptions(beam=0, nbest=2, top_k=-1, top_p=2.0, temperature=-1.0, forced_bos=3, banned=((3,),), allowed=())
    assert str(raised.value) == (
        "search options: beam 0, expected at least 1; nbest 2, expected 1 to the beam size 0; "
        "top k -1, expected 0 (none) or more; temperature -1.0, expected more than 0; "
        "top p 2.0, expected more than 0 and at most 1; "
        "temperature, top k, top p without sample, expected it with sample only; "
        "no token is allowed, expected one at least that is not banned; "
        "forced bos has 3, which is banned; forced bos has 3, which is not allowed"
    )


def test_every_contradiction_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as raised:
        SearchOptions(
            max_length=2,
            sample=True,
            coverage_penalty=0.2,
            alternatives=True,
            phrases=((3, 9), (4, 4)),
            trie=TRIE,
            prefix=(7,),
            banned=((9,),),
        )
    assert str(raised.value) == (
        "search options: coverage penalty together with sample, expected a beam of 2 or more; "
        "coverage penalty together with alternatives, expected one of them; "
        "alternatives together with sample, expected one of them; "
        "phrases together with sample, expected greedy or beam search; "
        "phrases together with a trie, expected one of them; phrase 3 9 has 9, which is banned; "
        "phrases of 4 tokens, but the max length leaves room for 1; raise it; "
        "prefix leaves the trie, expected the beginning of one of its sequences"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"prefix": (3, 4), "forced_bos": 3, "allowed": (3, 4), "banned": ((4, 3),), "max_length": 2},
        {"sample": True, "nbest": 9, "temperature": 0.1, "top_k": 5, "top_p": 1.0, "seed": 0},
        {"trie": TRIE, "prefix": (3,), "banned": ((4,),), "max_length": 3, "sample": True, "nbest": 2},
        {"trie": TRIE, "prefix": (9, 3), "forced_bos": 9, "beam": 2, "alternatives": True, "nbest": 7},
        {"phrases": ((3, 4), (4,), (4, 5)), "max_length": 4, "beam": 2, "coverage_penalty": 0.5, "alignments": True},
        {"phrases": ((3, 4),), "prefix": (7, 3), "max_length": 3, "alternatives": True, "nbest": 1},
        {"allowed": (4,), "forced_eos": END, "banned": ((END,),), "first_banned": (END, 4)},
    ],
)
def test_what_goes_together(options: dict[str, Any]) -> None:
    assert problems_with_model(SearchOptions(**options), 40, END) == []


def test_a_model_s_own_beams_give_way_to_sampling() -> None:
    own = {"beam": 4, "nbest": 2, "banned": [[3]], "first_banned": [2], "allowed": [5, 6], "prefix": [5]}
    assert options_from_values({"semantics": "ctranslate2"}, 9, "generation.json").beam_style == "ctranslate2"
    listed = options_from_values({"phrases": [[5, 6]], "coverage_penalty": 0.5, "beam": 2}, 9, "generation.json")
    assert (listed.phrases, listed.coverage_penalty) == (((5, 6),), 0.5)
    found = options_from_values({"trie": [[5, 6]]}, 9, "generation.json").trie
    assert found is not None
    assert found.walked((5, 6)) == 2
    options = options_from_values(own, 9, "generation.json", sample=True, seed=3)
    assert (options.beam, options.nbest, options.width, options.seed) == (1, 2, 2, 3)
    assert (options.prefix, options.first_banned, options.allowed) == ((5,), (2,), (5, 6))
    assert options_from_values(own, 9, "generation.json").beam == 4
    with pytest.raises(ConfigError, match="beam 4 together with sample"):
        options_from_values(own, 9, "generation.json", sample=True, beam=4)


def test_values_are_held_against_who_will_run_them_in_the_same_error() -> None:
    def also(options: SearchOptions) -> list[str]:
        return problems_with_model(options, 40, END)

    with pytest.raises(ConfigError) as raised:
        options_from_values({"banned": [[77]]}, 9, "generation.json", also, beam=0, prefix=(END,))
    assert str(raised.value) == (
        "search options: beam 0, expected at least 1; token 77 asked for, but the vocabulary has 0 to 39; "
        f"the prefix has the end token {END}, expected it nowhere in a prefix"
    )
    assert options_from_values({}, 9, "generation.json", also, beam=2, prefix=(3,)).prefix == (3,)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("options") / "b", ("fp32",))


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Session]:
    with open_session(bundle, request.param, threads=1) as opened:
        yield opened


def test_what_the_model_cannot_do_is_one_error_before_anything_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "limits", Limits(batch=2, beam=3, source=20, target=24))
    monkeypatch.setattr(session, "encode", lambda *given: pytest.fail("something ran"))
    options = SearchOptions(
        max_length=25,
        beam=4,
        prefix=(5, END),
        forced_eos=7,
        banned=((7,), (40, 99)),
        first_banned=(41,),
        allowed=(5, END, 43),
        start=44,
        coverage_penalty=0.5,
    )
    with pytest.raises(RequestError) as raised:
        generate(session, [[3], [], [4] * 21], options)
    assert str(raised.value) == (
        "token 40, 41, 43, 44, 99 asked for, but the vocabulary has 0 to 39; "
        f"the prefix has the end token {END}, expected it nowhere in a prefix; "
        "forced eos is 7, which is banned; forced eos is 7, which is not allowed; beam 4, at most 3; "
        "coverage penalty asked for, but the session keeps no cross-attention weights; open it with attention=True; "
        "max length 25, at most 24; 3 sources in a batch, at most 2; "
        "source 1 is empty; source 2 has 21 tokens, at most 20"
    )
    with pytest.raises(RequestError, match="nbest 4, at most 3"):
        generate(session, [[3]], SearchOptions(max_length=4, sample=True, nbest=4))
    with pytest.raises(RequestError) as raised:
        generate(session, [[3]], SearchOptions(4, 2, alternatives=True, nbest=2, phrases=((40, END),), alignments=True))
    assert str(raised.value) == (
        f"token 40 asked for, but the vocabulary has 0 to 39; a phrase has the end token {END}, expected it nowhere in "
        "a phrase; nbest times beam 4, at most 3; alignments asked for, but the session keeps no cross-attention "
        "weights; open it with attention=True"
    )
    with pytest.raises(RequestError) as raised:
        generate(session, [[3]], SearchOptions(max_length=4, trie=trie_from_sequences([(3, END), (77,)])))
    assert str(raised.value) == (
        f"token 77 asked for, but the vocabulary has 0 to 39; the trie has the end token {END}, expected sequences "
        "without it"
    )


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sample": True, "nbest": 3, "seed": 1}])
def test_a_callback_stops_the_decode_and_the_session_goes_on(session: Session, options: dict[str, Any]) -> None:
    class Enough(Exception):
        pass

    seen: list[int] = []

    def stop_at_the_third(emitted: Emitted) -> None:
        seen.append(emitted.step)
        if emitted.step == 2:
            raise Enough

    search = SearchOptions(max_length=12, min_length=8, **options)
    expected = generate(session, [[5, 6, 7], [8]], search)
    with pytest.raises(Enough):
        generate(session, [[5, 6, 7], [8]], search, stop_at_the_third)
    assert seen == [0, 1, 2]
    assert generate(session, [[5, 6, 7], [8]], search) == expected


def test_candidates_do_not_suffice_where_probabilities_are_among_what_rules_leave() -> None:
    assert SearchOptions(banned=((5,),)).best > 0
    assert SearchOptions(banned=((5,),), allowed_log_probs=True).best == 0
    assert SearchOptions(allowed_log_probs=True).best > 0  # all are left
