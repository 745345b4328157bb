"""The rules of a search: each by itself, and all of them as the library has them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hugging_face_models import END, PAD, library_outputs, small_model, sources
from support.scripted_step import ScriptedStep, from_seed, from_table, run
from transformers import GenerationConfig

from seq2engine.errors import RequestError
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.rules import Rules, next_tokens
from seq2engine.runtime.search.step import Special
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.torch_session import TorchSession

SPECIAL = Special(start=0, end=1)
VOCAB = 20  # of the library's model: so few tokens that it says pairs of the source
FLAT = np.zeros((1, 1, 6), dtype=np.float32)


def forbidden(options: SearchOptions, output: list[int], source: tuple[int, ...] = (3,)) -> set[int]:
    """The tokens of a vocabulary of six that may not follow the output so far."""
    rules = Rules(options, SPECIAL, [source])
    for length, token in enumerate([SPECIAL.start, *output], start=1):
        allowed = rules.allowed(FLAT, np.array([[token]]), np.array([[0]]), length)
    return set(np.flatnonzero(allowed[0, 0] == -np.inf).tolist())


@pytest.mark.parametrize(
    ("options", "output", "expected"),
    [
        (SearchOptions(forced_bos=4), [], {0, 1, 2, 3, 5}),
        (SearchOptions(forced_bos=4), [4], set()),
        (SearchOptions(max_length=3, forced_eos=1), [2, 2], {0, 2, 3, 4, 5}),
        (SearchOptions(max_length=3, forced_eos=1), [2], set()),
        (SearchOptions(max_length=1, forced_eos=1), [], {0, 2, 3, 4, 5}),
        (SearchOptions(max_length=1, forced_bos=4, forced_eos=1), [], {0, 2, 3, 4, 5}),  # the end is forced last
        (SearchOptions(min_length=3), [2], {1}),
        (SearchOptions(min_length=3), [2, 2], set()),
        (SearchOptions(banned=((3,), (5,))), [2], {3, 5}),
        (SearchOptions(banned=((1,), (5,))), [2], {5}),  # the end token is always allowed
        (SearchOptions(banned=((2, 3),)), [4, 2], {3}),
        (SearchOptions(banned=((2, 3),)), [2, 4], set()),
        (SearchOptions(banned=((0, 3),)), [], {3}),  # after the start token
        (SearchOptions(banned=((2, 1),)), [2], {1}),
        (SearchOptions(banned=((4, 2, 3),)), [2], set()),
        (SearchOptions(no_repeat_ngram=1), [2, 4], {0, 2, 4}),
        (SearchOptions(no_repeat_ngram=2), [2, 4, 2], {4}),
        (SearchOptions(no_repeat_ngram=3), [2, 4, 2], set()),
        (SearchOptions(no_repeat_ngram=3), [2, 4, 5, 2, 4], {5}),
        (SearchOptions(source_no_repeat_ngram=1), [2], {3, 4, 5}),
        (SearchOptions(source_no_repeat_ngram=2), [3], {4}),
        (SearchOptions(source_no_repeat_ngram=3), [3, 4], {5}),
        (SearchOptions(source_no_repeat_ngram=4), [3, 4, 5], set()),
        (SearchOptions(prefix=(4, 2)), [], {0, 1, 2, 3, 5}),
        (SearchOptions(prefix=(4, 2)), [4], {0, 1, 3, 4, 5}),
        (SearchOptions(prefix=(4, 2)), [4, 2], set()),
        (SearchOptions(prefix=(4, 2), forced_bos=4), [4], {0, 1, 3, 4, 5}),
        (SearchOptions(prefix=(4, 4), no_repeat_ngram=1), [4], {0, 1, 2, 3, 5}),  # a prefix may break rules,
        (SearchOptions(prefix=(4, 4), no_repeat_ngram=1), [4, 4], {0, 4}),  # what follows may not
        (SearchOptions(first_banned=(1, 3)), [], {1, 3}),
        (SearchOptions(first_banned=(1, 3)), [2], set()),
        (SearchOptions(first_banned=(3,), forced_bos=4), [4], {3}),  # first is the first that is not forced
        (SearchOptions(first_banned=(3,), prefix=(4, 2)), [4], {0, 1, 3, 4, 5}),
        (SearchOptions(first_banned=(3,), prefix=(4, 2)), [4, 2], {3}),
        (SearchOptions(allowed=(2, 5)), [2], {0, 3, 4}),  # and the end token
        (SearchOptions(allowed=(2, 5), banned=((5,),), min_length=3), [2], {0, 1, 3, 4, 5}),
    ],
)
def test_what_may_not_be_output(options: SearchOptions, output: list[int], expected: set[int]) -> None:
    assert forbidden(options, output, source=(3, 4, 5)) == expected


def test_without_rules_the_logits_are_not_even_copied() -> None:
    rules = Rules(SearchOptions(min_length=1), SPECIAL, [])
    answer = StepOutput(FLAT)
    assert rules.answer(answer, np.array([[0]]), np.array([[0]]), 1) is answer


def test_a_repeated_token_is_penalised_once_whatever_its_sign() -> None:
    logits = np.array([[[1.0, -1.0, 2.0, -2.0]]], dtype=np.float32)
    rules = Rules(SearchOptions(repetition_penalty=2.0), SPECIAL, [])
    for length, token in enumerate([2, 2, 3], start=1):
        answer = rules.allowed(logits, np.array([[token]]), np.array([[0]]), length)
    assert answer.tolist() == [[[1.0, -1.0, 1.0, -4.0]]]
    # Beam search shows the rules log-probabilities, which are never positive.
    normaliser = np.array([[3.0]])
    answer = rules.allowed(logits, np.array([[2]]), np.array([[0]]), 4, normaliser)
    assert answer[0, 0].tolist() == pytest.approx([1.0, -1.0, 2 * (2 - 3) + 3, 2 * (-2 - 3) + 3])


def test_rules_follow_the_beams_and_the_sources_that_stay() -> None:
    rules = Rules(SearchOptions(no_repeat_ngram=1), SPECIAL, [(3,), (4,)])
    flat = np.zeros((2, 2, 6), dtype=np.float32)
    rules.allowed(flat, np.zeros((2, 2), int), np.zeros((2, 2), int), 1)
    rules.allowed(flat, np.array([[2, 3], [4, 5]]), np.array([[0, 1], [0, 1]]), 2)
    rules.keep(np.array([1]))
    answer = rules.allowed(flat[:1], np.array([[2, 3]]), np.array([[1, 1]]), 3)
    assert [set(np.flatnonzero(row == -np.inf).tolist()) for row in answer[0]] == [{0, 5, 2}, {0, 5, 3}]


def test_rules_that_forbid_every_token_are_refused() -> None:
    options = SearchOptions(max_length=8, min_length=8, no_repeat_ngram=1)
    with pytest.raises(RequestError, match="forbid every token of the vocabulary; allow some"):
        run(greedy_search(ScriptedStep([from_seed(0, vocab=4)]), 1, SPECIAL, options))


@given(
    output=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    size=st.integers(1, 4),
)
def test_next_tokens_complete_an_n_gram_of_the_text(output: list[int], text: list[int], size: int) -> None:
    ending = tuple(output[len(output) - size + 1 :]) if len(output) >= size - 1 else None
    grams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    rows, words = next_tokens(np.array([output]), np.array([text]), size)
    assert set(words.tolist()) == {gram[-1] for gram in grams if gram[:-1] == ending}
    assert set(rows.tolist()) <= {0}


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), beam=st.sampled_from([1, 3]), minimum=st.integers(0, 6))
def test_outputs_keep_the_rules(seed: int, beam: int, minimum: int) -> None:
    options = SearchOptions(
        max_length=8, beam=beam, min_length=minimum, no_repeat_ngram=2, forced_bos=3, banned=((4,), (2, 5))
    )
    search = greedy_search if beam == 1 else beam_search
    ((best, *_),), _ = run(search(ScriptedStep([from_seed(seed, vocab=8)]), 1, SPECIAL, options))
    pairs = list(zip((SPECIAL.start, *best.tokens), best.tokens, strict=False))
    assert best.tokens[0] == 3
    assert 4 not in best.tokens
    assert (2, 5) not in pairs
    assert len(set(pairs)) == len(pairs)
    assert len(best.tokens) >= minimum or best.tokens[-1] != SPECIAL.end
    assert math.isfinite(best.score)


# name -> fields of the library's generation config, and ours
LIBRARY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forced first token": ({"forced_bos_token_id": 9}, {"forced_bos": 9}),
    "forced end": ({"forced_eos_token_id": END}, {"forced_eos": END}),
    "forced end that is no end": ({"forced_eos_token_id": 9}, {"forced_eos": 9}),
    "minimum": ({"min_length": 8}, {"min_length": 8}),
    "minimum of new tokens": ({"min_new_tokens": 7}, {"min_length": 8}),
    "no repeated pairs": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram": 2}),
    "no repeated token": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram": 1}),
    "no token of the source": ({"encoder_no_repeat_ngram_size": 1}, {"source_no_repeat_ngram": 1}),
    "no pair of the source": ({"encoder_no_repeat_ngram_size": 2}, {"source_no_repeat_ngram": 2}),
    "suppressed": ({"suppress_tokens": [9, 10, 11, 12]}, {"banned": ((9,), (10,), (11,), (12,))}),
    "suppressed at the beginning": (
        {"begin_suppress_tokens": [END, *range(8, 14)]},
        {"first_banned": (END, *range(8, 14))},
    ),
    "suppressed after the forced token": (
        {"forced_bos_token_id": 9, "begin_suppress_tokens": [END, *range(8, 14)]},
        {"forced_bos": 9, "first_banned": (END, *range(8, 14))},
    ),
    "penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "reward": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "all": (
        {
            "forced_bos_token_id": 9,
            "forced_eos_token_id": END,
            "min_length": 6,
            "no_repeat_ngram_size": 2,
            "encoder_no_repeat_ngram_size": 2,
            "repetition_penalty": 1.2,
        },
        {
            "forced_bos": 9,
            "forced_eos": END,
            "min_length": 6,
            "no_repeat_ngram": 2,
            "source_no_repeat_ngram": 2,
            "repetition_penalty": 1.2,
        },
    ),
}


@cache
def library_model() -> Any:
    return small_model("blenderbot", seed=2, biased=True, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> TorchSession:
    folder: Path = tmp_path_factory.mktemp("model")
    library_model().save_pretrained(folder)
    return TorchSession(checkpoint_from_hugging_face(folder).model)


def ruled_outputs(beam: int, functions: dict[str, Any] | None = None, **rules: Any) -> list[list[int]]:
    model = library_model()
    config = model.config
    tokens = {name: getattr(config, name) for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(num_beams=beam, max_length=13, bad_words_ids=None, **tokens)
    model.generation_config.update(**rules)
    return library_outputs(model, sources(VOCAB), **(functions or {}))


def we_say(session: TorchSession, beam: int, **rules: Any) -> list[list[int]]:
    options = SearchOptions(max_length=12, beam=beam, **rules)
    return [list(best.tokens) for best, *_ in generate(session, sources(VOCAB), options)]


@pytest.mark.each_value
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", LIBRARY)
def test_a_rule_means_what_it_means_in_generate(name: str, beam: int, session: TorchSession) -> None:
    theirs, ours = LIBRARY[name]
    expected = ruled_outputs(beam, **theirs)
    assert we_say(session, beam, **ours) == expected
    assert expected != ruled_outputs(beam)  # or the rule would not have been tried


@pytest.mark.parametrize("beam", [1, 4])
def test_banned_words_are_those_of_generate(beam: int, session: TorchSession) -> None:
    """Tokens and phrases that it would have output, the start of the output and its end among them."""
    start = library_model().config.decoder_start_token_id
    free = ruled_outputs(beam)
    long = max(free, key=len)
    banned = [[long[1]], long[2:4], long[3:6], [start, free[0][0]], [END], [PAD], [VOCAB - 1, END]]
    expected = ruled_outputs(beam, bad_words_ids=banned)
    assert we_say(session, beam, banned=tuple(map(tuple, banned))) == expected
    assert all(
        ours != theirs for ours, theirs in zip([long, free[0]], [expected[free.index(long)], expected[0]], strict=True)
    )


@pytest.mark.parametrize("beam", [1, 4])
def test_a_shortlist_is_that_of_generate(beam: int, session: TorchSession) -> None:
    allowed = list(range(8, 16))
    expected = ruled_outputs(beam, functions={"prefix_allowed_tokens_fn": lambda row, output: [*allowed, END]})
    assert we_say(session, beam, allowed=tuple(allowed)) == expected
    assert expected != ruled_outputs(beam)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_trie_is_that_of_generate(beam: int, session: TorchSession) -> None:
    """As entities are retrieved: after each prefix what the tree goes on with, the end token where one ends."""
    random = np.random.default_rng(3)
    sequences = [tuple(random.integers(8, 14, random.integers(1, 7)).tolist()) for _ in range(200)]

    def goes_on(row: int, output: torch.Tensor) -> list[int]:
        before = tuple(output.tolist()[1:])
        after = {words[len(before)] for words in sequences if words[: len(before)] == before and words != before}
        return sorted(after) + [END] * (before in sequences or not after)

    expected = ruled_outputs(beam, functions={"prefix_allowed_tokens_fn": goes_on})
    assert we_say(session, beam, trie=trie_from_sequences(sequences)) == expected
    assert len(set(map(tuple, expected))) > 1


@pytest.mark.parametrize("beam", [1, 4])
def test_a_prefix_is_what_the_library_s_decoder_was_fed(beam: int, session: TorchSession) -> None:
    """With beams for one length penalty only: ours counts the prefix among an output's tokens, the library does not."""
    prefix = (9, 12, 9)
    rules = {"no_repeat_ngram": 2, "first_banned": tuple(range(8, 12)), "length_penalty": 0.0}
    fed = torch.tensor([[library_model().config.decoder_start_token_id, *prefix]]).expand(len(sources(VOCAB)), -1)
    theirs = {"no_repeat_ngram_size": 2, "begin_suppress_tokens": list(range(8, 12)), "length_penalty": 0.0}
    expected = ruled_outputs(beam, functions={"decoder_input_ids": fed}, **theirs)
    assert we_say(session, beam, prefix=prefix, **rules) == expected
    assert all(tuple(tokens[:3]) == prefix for tokens in expected)
    assert len(set(map(tuple, expected))) > 1


def test_a_source_that_has_ended_is_not_asked_to_go_on() -> None:
    """Its neighbours still run, and it has no allowed token left: that is not an error of theirs."""
    script = from_table({(): [0, 0.1, 0.9, 0], (2,): [0, 0.1, 0, 0.9]}, otherwise=[0, 1, 0, 0])
    options = SearchOptions(max_length=4, no_repeat_ngram=1, source_no_repeat_ngram=1, allowed=(2, 3))
    texts = [[2, 3], *[[0]] * 8]  # of nine sources one that has ended does not leave yet
    hypotheses, _ = run(greedy_search(ScriptedStep([script] * 9), 9, SPECIAL, options, texts))
    assert [best.tokens for best, *_ in hypotheses] == [(1,), *[(2, 3, 1)] * 8]
