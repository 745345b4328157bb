"""How much cache a long decode needs, and what keeping it small costs: counted in slots, so that no clock is asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from seq2engine.benchmarks.cases import Case, sources_for
from seq2engine.benchmarks.timed_decode import fixed_decode
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.steps.tree_cache import COMPACTION_CALLS, LEAST_NUMBERS, slack
from seq2engine.runtime.torch_session import TorchSession

LENGTH, BATCH, MANY = 256, 4, 32  # of many sources the calls of a compaction take no time beside its copies
SMALL = dataclasses.replace(
    PRESETS["tiny"],
    encoder_layers=1,
    decoder_layers=1,
    d_model=32,
    d_ff=48,
    source_vocab=1000,
    target_vocab=1000,
    norm="pre",
    max_target=512,
)


class SureSession(TorchSession):
    """Keeps how likely its best tokens were."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.likeliest = []

    def step(self, *given):
        answer = super().step(*given)
        self.likeliest.append(torch.from_numpy(answer.logits).softmax(-1).amax(-1).mean().item())
        return answer


def sharp_session(positions, cache_form="static"):
    """A random model whose logits are spread until it is as sure of its tokens as a trained one."""
    model = random_model(dataclasses.replace(SMALL, positions=positions), seed=0)
    with torch.no_grad():
        model.output.weight.mul_(4)
    return SureSession(model, cache_form=cache_form)


def counts(session, beam, length, batch=BATCH):
    sources = sources_for(Case("long", batch, beam, 16, length), SMALL)
    return fixed_decode(session, sources, SearchOptions(max_length=length, beam=beam)).counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "cache_form"), [("learned", "static"), ("rotary", "static"), ("learned", "growing")]
)
def test_four_beams_hold_at_most_1_6_times_the_cache_of_one(positions, cache_form):
    session = sharp_session(positions, cache_form)
    greedy, beams = (counts(session, beam, LENGTH) for beam in (1, 4))
    assert 0.6 < np.mean(session.likeliest) < 0.95
    assert greedy.most_slots == LENGTH
    assert beams.most_slots <= 1.6 * LENGTH, beams


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 4])
def test_work_beside_attention_grows_with_the_length_and_no_faster(beam):
    """What compaction copies in a step, and what attention reads beside the living slots, hardly grow."""
    session = sharp_session("learned")
    found = {length: counts(session, beam, length, MANY) for length in (64, 512)}
    calls = COMPACTION_CALLS // (MANY * LEAST_NUMBERS)
    for length, each in found.items():
        assert each.steps == length
        assert each.moved <= 0.15 * each.read  # a copy costs some three readings
        assert each.read <= sum(min(beam * t, t + 64) + slack(beam, t + 64, calls) for t in range(1, length + 1))
    per_step = {length: each.moved / length for length, each in found.items()}
    assert per_step[512] <= 4 * per_step[64], per_step  # quadratic copying would be 8 times


def test_the_slack_is_where_copying_and_reading_cost_least():
    for beams in (1, 4, 8):
        for live in (256, 512, 2048):
            cost = {s: 3 * (live / 2) * beams / s + s / 2 for s in range(8, live, 8)}
            assert cost[slack(beams, live)] <= 1.05 * min(cost.values())
    assert (slack(1, 0), slack(4, 0)) == (16, 32)


def test_a_small_model_compacts_the_cache_of_one_source_less_often():
    """The calls of a compaction take longer than its copies there."""
    session = sharp_session("learned")
    few, many = (
        fixed_decode(session, sources_for(Case("one", batch, 4, 16, 64), SMALL), SearchOptions(max_length=64, beam=4))
        for batch in (1, 64)
    )
    assert few.counts.compactions + few.counts.growths < many.counts.compactions + many.counts.growths
    assert few.counts.most_slots <= slack(4, 0, COMPACTION_CALLS // LEAST_NUMBERS) + 4 * 64
