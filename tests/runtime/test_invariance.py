"""Batch invariance: a source's output does not depend on the batch, its order, padding, cache form or compaction.

Every source of a pool is decoded alone once, by PyTorch with a static cache. Then it is decoded in drawn batches and
must get the same tokens, and the same log-probability of every token up to rounding.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import rounding_from_session

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint, random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.shipped import TEST_SPLIT, shipped_checkpoint
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import search_over
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search import step as step_module
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import drain
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.steps.tree_cache import TreeStep
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

LENGTH, POOL = 14, 10
SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
MODELS = {  # seeds whose outputs end at several lengths
    "sinusoidal-post": (dataclasses.replace(SMALL, positions="sinusoidal", norm="post"), 1),
    "learned-pre": (dataclasses.replace(SMALL, positions="learned", norm="pre"), 3),
    "rotary-pre": (dataclasses.replace(SMALL, positions="rotary", norm="pre"), 2),
}
FORMS = ("static", "growing")
BACKENDS = ("torch", "onnxruntime")
LEAVING = {
    "as usual": None,
    "never": lambda done: None,
    "at once": lambda done: np.flatnonzero(~done) if done.any() and not done.all() else None,
}


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How a batch is decoded; nothing of it may be seen in the outputs."""

    places: tuple[int, ...]  # in the pool: who is there, in which order, some of them twice
    padding: int = 0  # columns more than the longest source needs
    leaving: str = "as usual"
    spare_slots: int | None = None  # a static cache of fixed length, with this many slots more than are ever needed
    compact_every: int = 0  # steps; 0: when the cache sees fit
    expanded: bool = False  # every beam has a row and a cache of its own
    fed: int = 0  # rows that the sources are fed into; 0: they start together


def batch_plans(pool):
    return st.builds(
        BatchPlan,
        places=st.lists(st.integers(0, pool - 1), min_size=1, max_size=9).map(tuple),
        padding=st.integers(0, 5),
        leaving=st.sampled_from(list(LEAVING)),
        spare_slots=st.sampled_from([None, 0, 3, 16]),
        compact_every=st.sampled_from([0, 0, 1, 3]),
        expanded=st.booleans(),
        fed=st.sampled_from([0, 0, 1, 3, 8]),
    )


class RestlessTree(TreeStep):
    """A tree that gathers its live slots every few steps."""

    every = 0

    def descend(self, parents):
        super().descend(parents)
        if self.every and self.position.max() % self.every == self.every - 1:
            self.compact(self.live_slots() if self.growing else self.capacity)


class ExpandedStep:
    """A Step without a tree: K beams are K rows, and a beam that is continued is copied, cache and all."""

    def __init__(self, tree, beams):
        self.tree, self.beams = tree, beams

    def __call__(self, tokens, parents):
        self.tree.keep((np.arange(len(tokens))[:, None] * self.beams + parents).ravel())
        answer = self.tree(tokens.reshape(-1, 1), np.zeros((tokens.size, 1), dtype=np.int64))
        return StepOutput(answer.logits.reshape(*tokens.shape, -1))

    def keep(self, rows):
        self.tree.keep((rows[:, None] * self.beams + np.arange(self.beams)).ravel())


def decoded(session, sources, options, plan):
    """n-best hypotheses of every source, and of greedy search the gap between its best two tokens at every step."""
    tree = type("Tree", (RestlessTree,), {"every": plan.compact_every})
    with ExitStack() as patches:
        if (leave := LEAVING[plan.leaving]) is not None:
            patches.enter_context(mock.patch.object(step_module, "staying_rows", leave))
        if plan.spare_slots is not None and session.cache_form == "static":
            slots = options.max_length * options.beam + plan.spare_slots
            patches.enter_context(
                mock.patch.object(session, "limits", dataclasses.replace(session.limits, slots=slots))
            )
        if plan.fed:
            patches.enter_context(mock.patch("seq2engine.runtime.text.running_batch.TreeStep", tree))
            found = dict(translate_many(session, sources, options, plan.fed, plan.padding % 3))
            return [found[number] for number in range(len(sources))], []
        ids, mask = padded(sources, session.config.pad_id)
        more = min(plan.padding, session.limits.source - ids.shape[1])
        ids = np.pad(ids, ((0, 0), (0, more)), constant_values=session.config.pad_id)
        mask = np.pad(mask, ((0, 0), (0, more)))
        own = options.beam if plan.expanded else 1
        state = session.encode(ids.repeat(own, axis=0), mask.repeat(own, axis=0))
        beams = options.beam // own
        step = tree(session, state, len(sources) * own, beams, options.max_length)
        search = search_over(ExpandedStep(step, own) if plan.expanded else step, sources, session.config, options)
        gaps = []

        def note_gap(emitted):
            best = np.sort(emitted.answer.logits, axis=-1)[..., -2:]
            gaps.append(float((best[..., 1] - best[..., 0]).min()))

        return drain(search, note_gap), gaps


def differences(found, alone, gaps, greedy, near):
    """What differs between a source's hypotheses and those it gets alone, but for a choice between equals."""
    for rank, (one, other) in enumerate(zip(found, alone, strict=True)):
        if one.tokens != other.tokens:
            if greedy:
                step = next(i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if len({*pair}) > 1)
                tie = gaps[step] < 2 * near.logit
            else:
                tie = abs(one.score - other.score) < near.score(len(one.tokens), 1.0)
            return None if tie else f"hypothesis {rank}: {one.tokens}, alone {other.tokens}"
        # Greedy search gives the sum over tokens, beam search the mean.
        if abs(one.score - other.score) > near.score(len(one.tokens), 0.0 if greedy else 1.0):
            return f"hypothesis {rank}: score {one.score}, alone {other.score}"
    return None


class Pool:
    """A model's sources, what each gets alone, and its sessions."""

    def __init__(self, model, sources, folder, length):
        self.sources, self.length = sources, length
        self.reference = TorchSession(model)
        bundles = {form: onnx_from_model(model, folder / form, ("fp32",), cache_form=form) for form in FORMS}
        self.sessions = {
            (form, backend): open_session(bundle, backend, threads=1)
            for form, bundle in bundles.items()
            for backend in BACKENDS
        }
        self.alone = cache(self._alone)
        self.near = rounding_from_session(self.reference, sources, length)

    def options(self, beam):
        return SearchOptions(max_length=self.length, beam=beam, nbest=beam)

    def _alone(self, place, beam):
        (found,), gaps = decoded(self.reference, [self.sources[place]], self.options(beam), BatchPlan((0,)))
        return found, gaps

    def check(self, form, backend, beam, plan):
        sources = [self.sources[place] for place in plan.places]
        results, _ = decoded(self.sessions[form, backend], sources, self.options(beam), plan)
        for place, found in zip(plan.places, results, strict=True):
            assert not differences(found, *self.alone(place, beam), beam == 1, self.near), f"source {place}"


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Every model's pool, made when it is first asked for."""

    @cache
    def pool(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "g2p":
            root = shipped_checkpoint("g2p")
            tokenizer, lines = read_tokenizer(root), (root / TEST_SPLIT).read_text().splitlines()
            words = [line.split("\t")[0] for line in lines[:: len(lines) // POOL][:POOL]]
            return Pool(load_checkpoint(root), [tokenizer.encode_source(word) for word in words], folder, 24)
        config, seed = MODELS[name]
        rng = np.random.default_rng(seed)
        lengths = [1, 15, *rng.integers(2, 15, POOL - 2)]
        sources = [rng.integers(3, config.source_vocab, length).tolist() for length in lengths]
        return Pool(random_model(config, seed), sources, folder, LENGTH)

    return pool


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_source_decides(pools, name, form, backend):
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(plan=batch_plans(POOL), beam=st.sampled_from([1, 2, 4]))
    def holds(plan, beam):
        pools(name).check(form, backend, beam, plan)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_the_word_decides(pools, form, backend):
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(plan=batch_plans(POOL), beam=st.sampled_from([1, 4]))
    def holds(plan, beam):
        pools("g2p").check(form, backend, beam, plan)

    holds()


@pytest.mark.each_value
@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_pools_are_worth_the_trouble(pools, name, beam):
    """Outputs of several lengths, or no source ever leaves; and no near ties, or the tests above would forgive them."""
    pool = pools(name)
    found = [pool.alone(place, beam) for place in range(POOL)]
    assert len({len(nbest[0].tokens) for nbest, _ in found}) >= 3
    assert beam > 1 or min(min(gaps) for _, gaps in found) > 2 * pool.near.logit


@pytest.mark.parametrize(
    ("fault", "beam"),
    [("neighbours", 1), ("padding", 1), ("padding", 4), ("parents", 4), ("slots", 2)],
)
def test_what_the_suite_is_for_is_found(pools, fault, beam):
    """Faults of the kind that go unseen on one batch: each must be seen here."""
    pool = pools("learned-pre")
    session = pool.sessions["static", "torch"]
    step, encode, select = session.step, session.encode, session.select

    def blind(state, tokens, position, write_index, self_mask):
        return step(state, tokens, np.full_like(position, position.max()), write_index, self_mask)

    def unmasked(ids, mask):
        return encode(ids, np.ones_like(mask))

    def unmoved(state, rows, slots):
        select(state, rows, None)

    patches = {
        "neighbours": (session, "step", blind),
        "padding": (session, "encode", unmasked),
        "parents": (TreeStep, "descend", lambda self, parents: None),
        "slots": (session, "select", unmoved),
    }
    plan = BatchPlan(
        tuple(range(POOL)), padding=5, spare_slots=0, compact_every=1, fed=3 if fault == "neighbours" else 0
    )
    for place in range(POOL):
        pool.alone(place, beam)
    with mock.patch.object(*patches[fault]), pytest.raises(AssertionError, match="source"):
        pool.check("static", "torch", beam, plan)
