"""What parity spends: each step of the oracle once, fewer sources where a vocabulary is large, the quickest threads."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from support.parity_cases import SMALL, bundle_of

from seq2engine.runtime.generate import generate, search_over
from seq2engine.runtime.numerics.teacher_forcing import ForcedRun, ForcedRuns, forced_tokens
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity import torch_threads
from seq2engine.runtime.parity.levels.tensors import compare_tensors, endless
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.report.page import parity_html, parity_table
from seq2engine.runtime.parity.run import parities_of, parity_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import FEWEST_SOURCES, STEP_LOGITS, random_sources, tree_sources
from seq2engine.runtime.torch_session import TorchSession

ENDING = dataclasses.replace(SMALL, norm="pre", positions="learned")  # some of its outputs end, at different steps


@pytest.fixture(scope="module", params=["static", "growing"])
def bundle(request, tmp_path_factory):
    return bundle_of(ENDING, tmp_path_factory.mktemp("effort"), request.param)


@pytest.fixture(scope="module")
def three(bundle):
    with (
        open_session(bundle, "torch", "fp64") as oracle,
        open_session(bundle, "torch", "fp32") as reference,
        open_session(bundle, threads=1) as candidate,
    ):
        yield oracle, reference, candidate


@pytest.fixture
def threads():
    """Gives back what a test changes."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


class TestForcedRuns:
    def test_feed_all_with_the_tokens_of_the_first(self, three):
        sources, steps = random_sources(ENDING, 6), 10
        options = SearchOptions(steps, min_length=steps)
        runs = ForcedRuns(three, sources, steps)
        together = [
            [logits.copy() for logits in runs.answers] for _ in search_over(runs, sources, three[0].config, options)
        ]
        fed, _ = forced_tokens([nbest[0].tokens for nbest in generate(three[0], sources, options)], ENDING)
        for which, session in enumerate(three):
            alone = ForcedRun(session, sources, steps)
            for step in range(steps):
                np.testing.assert_array_equal(together[step][which], alone.step(fed[:, step]))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            SearchOptions(20),
            SearchOptions(20, min_length=6),
            SearchOptions(12, forced_bos=9),
            SearchOptions(20, banned=((7,),), no_repeat_ngram=2),
            SearchOptions(20, shortlist=tuple(range(3, 30))),
            SearchOptions(20, forced_eos=ENDING.end_id, beam_style="ctranslate2"),
        ],
    )
    def test_count_each_output_up_to_its_own_end(self, three, options):
        """Though none ends: the oracle's own outputs count."""
        sources = random_sources(ENDING, 24)
        lengths = [len(nbest[0].tokens) for nbest in generate(three[0], sources, options)]
        level = compare_tensors(*three, sources, range(0, 24, 3), options, 24, 10)
        counted = next(iter(level.next_token.values())).rows
        assert counted == sum(lengths)
        cache = next(tensor for tensor in level.tensors if tensor.tensor == "self_k.0")
        assert cache.elements == sum(lengths) * ENDING.d_model
        assert level.at_length.elements == 8 * 24 * ENDING.target_vocab
        assert level.error_growth.steps == 24

    def test_the_oracle_computes_every_step_once(self, three, monkeypatch):
        calls = []
        step = TorchSession.step

        def counted(session, *rest):
            calls.append(session.precision)
            return step(session, *rest)

        monkeypatch.setattr(TorchSession, "step", counted)
        compare_tensors(*three, random_sources(ENDING, 8), range(8), SearchOptions(24), 24, 8)
        assert calls.count("fp64") == calls.count("fp32") == 24

    def test_a_trie_and_phrases_end_nothing_early(self):
        options = endless(SearchOptions(20, phrases=((5, 6),)), 30)
        assert (options.phrases, options.min_length, options.max_length) == ((), 30, 30)


class TestSampling:
    @pytest.mark.parametrize(
        ("vocab", "beam", "expected"),
        [(40, 4, FEWEST_SOURCES), (STEP_LOGITS // 32, 4, 8), (65001, 4, 4), (65001, 1, 16)],
    )
    def test_trees_have_as_many_rows_as_sources_are_the_fewest(self, vocab, beam, expected):
        config = dataclasses.replace(SMALL, target_vocab=vocab, share_embeddings=False)
        assert tree_sources(config, beam) == expected

    def test_a_report_states_its_sample_sizes(self, bundle):
        result = parity_of(bundle, options=ParityOptions(count=70, max_length=6, threads=1))
        shown = "tensors were compared on 64 of 70 sources, on 16 of them up to step 6, on 16 with beams"
        assert f"{shown}; PyTorch computed with 1 thread\n" in parity_table(result)
        assert shown[1:] in parity_html(result)
        sampled = json.loads(result.to_json())["sampled"]
        assert sampled == {"tensors": 64, "sources": 70, "lasting": 16, "steps": 6, "trees": 16}
        assert json.loads(result.to_json())["torch_threads"] == 1

    def test_random_sources_are_distinguished_from_given_ones(self, bundle):
        result = parity_of(bundle, options=ParityOptions(sources=[[5, 6, 7]], max_length=6, threads=1))
        assert "on 1 sources and 15 random ones" in result.effort


class TestThreads:
    @pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
    def test_doubled_up_to_the_most(self, most, counts):
        assert torch_threads.thread_counts(most) == counts

    @pytest.mark.each_value
    @pytest.mark.parametrize("quick", [1, 2])
    def test_the_quickest_are_taken(self, three, threads, monkeypatch, quick):
        """By a clock that goes on while PyTorch has another number of threads."""
        now = [0.0]

        def clock():
            now[0] += 0.0 if torch.get_num_threads() == quick else 1.0
            return now[0]

        torch.set_num_threads(2)
        monkeypatch.setattr(torch_threads.time, "perf_counter", clock)
        assert torch_threads.take_quickest_threads(three, random_sources(ENDING, 4)) == quick
        assert torch.get_num_threads() == quick

    @pytest.mark.each_value
    @pytest.mark.parametrize(("asked", "used"), [(None, {1, 2}), (1, {1})])
    def test_parity_takes_them_and_gives_them_back(self, bundle, threads, asked, used):
        torch.set_num_threads(2)
        (result,) = parities_of(bundle, ["fp32"], options=ParityOptions(count=4, max_length=4, threads=asked))
        assert result, result.reason
        assert result.torch_threads in used
        assert torch.get_num_threads() == 2
