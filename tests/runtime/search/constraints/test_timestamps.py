"""The timestamp rules are those of Hugging Face's processor, which are those of openai-whisper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import of_written_logits
from support.scripted_step import ScriptedStep, from_seed, run
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from seq2engine.errors import RequestError
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.constraints.timestamps import TimestampConstraint, Timestamps
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.sampling import sampling_search
from seq2engine.runtime.search.step import Special

START, END, NONE, FIRST, VOCAB = 0, 10, 13, 14, 24  # text below the end token, special tokens between it and times
SPECIAL = Special(START, END)


def processor(latest: int | None) -> WhisperTimeStampLogitsProcessor:
    config = GenerationConfig(eos_token_id=END, bos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NONE, latest
    return WhisperTimeStampLogitsProcessor(config, begin_index=1)


def fed(sequences: np.ndarray, latest: int | None) -> TimestampConstraint:
    """The rule after these tokens [K,T] of the beams of one source, none of which ever switched."""
    rule = TimestampConstraint(Timestamps(FIRST, latest), END)
    beams, length = sequences.shape
    parents = np.arange(beams)[None]
    rule.follow(np.full((1, beams), START), parents, 1)
    for place in range(length):
        rule.follow(sequences[None, :, place], parents, place + 2)
    return rule


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 6).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(1, VOCAB - 1), min_size=length, max_size=length), min_size=1, max_size=3
        )
    ),
    st.sampled_from([None, 0, 3]),
    st.integers(0, 2**31),
)
def test_the_same_tokens_are_left(sequences, latest, seed):
    tokens = np.array(sequences, dtype=np.int64).reshape(len(sequences), -1)
    beams = len(tokens)
    # Numbers of few digits, so that sums of their exponentials are never nearly equal to one of them.
    logits = np.random.default_rng(seed).integers(-8, 8, (1, beams, VOCAB)).astype(np.float32)
    left = fed(tokens, latest).limit(logits.copy(), tokens.shape[1] + 1)
    given_ids = torch.from_numpy(np.hstack([np.full((beams, 1), START), tokens]))
    expected = processor(latest)(given_ids, torch.from_numpy(logits[0]))
    np.testing.assert_array_equal(left[0], expected.numpy())


def test_a_beam_inherits_the_state_of_its_parent():
    rule = fed(np.array([[FIRST, 3], [FIRST + 2, FIRST + 2]]), None)
    rule.follow(np.array([[FIRST + 5, 4]]), np.array([[1, 0]]), 4)
    assert rule.is_time.tolist() == [[True, False]]
    assert rule.was_time.tolist() == [[True, False]]
    assert rule.time.tolist() == [[FIRST + 5, FIRST]]
    rule.keep(np.array([], dtype=np.int64))
    assert rule.time.shape == (0, 2)


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_outputs_keep_the_rules(search):
    fields = {"greedy": {}, "beam": {"beam": 3, "nbest": 3}, "sample": {"sample": True, "nbest": 3, "seed": 1}}[search]
    options = SearchOptions(max_length=12, timestamps=Timestamps(FIRST, 3), first_banned=(4,), **fields)
    searching = {"greedy": greedy_search, "beam": beam_search, "sample": sampling_search}[search]
    scripts = [from_seed(seed, VOCAB) for seed in range(6)]
    found, _ = run(searching(ScriptedStep(scripts, START), 6, SPECIAL, options, [[seed] for seed in range(6)]))
    for nbest in found:
        for one in nbest:
            times = [token for token in one.tokens if token >= FIRST]
            assert times == sorted(times)
            assert FIRST <= one.tokens[0] <= FIRST + 3
            assert NONE not in one.tokens
            for before, token, after in zip(one.tokens, one.tokens[1:], one.tokens[2:], strict=False):
                assert not before >= FIRST > token or not token < FIRST <= after or before < after


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_log_probs_among_allowed_tokens(search):
    """By hand: the log-softmax of the logits that the rules leave, of every token of the output."""
    fields = {"greedy": {}, "beam": {"beam": 3}, "sample": {"sample": True, "seed": 1}}[search]
    options = SearchOptions(
        max_length=8, timestamps=Timestamps(FIRST, 3), banned=((5,),), allowed_log_probs=True, **fields
    )
    searching = {"greedy": greedy_search, "beam": beam_search, "sample": sampling_search}[search]
    script = from_seed(3, VOCAB)
    found, _ = run(searching(ScriptedStep([script], START), 1, SPECIAL, options, [[7]]))
    (best,) = found[0]
    near = of_written_logits(VOCAB, 12.0)
    for place, (token, log_prob) in enumerate(zip(best.tokens, best.log_probs, strict=True)):
        before = np.array(best.tokens[:place], dtype=np.int64)[None]
        logits = script(best.tokens[:place]).copy()
        logits[5] = -np.inf
        left = fed(before, 3).limit(logits[None, None], place + 1)[0, 0].astype(np.float64)
        expected = left[token] - np.log(np.exp(left).sum())
        assert log_prob == pytest.approx(expected, rel=0, abs=near.score(1))


def test_rules_that_forbid_all_are_named():
    options = SearchOptions(
        max_length=4, timestamps=Timestamps(FIRST, 0), banned=tuple((token,) for token in range(FIRST, VOCAB))
    )
    with pytest.raises(RequestError, match="forbid every token"):
        run(greedy_search(ScriptedStep([from_seed(1, VOCAB)], START), 1, SPECIAL, options))
