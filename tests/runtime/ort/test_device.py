"""States on a device, which here is the CPU used like a GPU: the tokens of numpy's states, and little that crosses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import assert_same_outputs, rounding_from_session

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.forms import step_form
from seq2engine.export.ort_form import OrtForm
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.ort.binding import OrtState
from seq2engine.runtime.ort.device import Replays
from seq2engine.runtime.ort.device_state import DeviceState
from seq2engine.runtime.ort.graphs import OrtModel, model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.text.continuous_batching import translate_many

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
WIDE = dataclasses.replace(SMALL, target_vocab=32_000, share_embeddings=False)  # what the budget is counted with
BUDGET = 20_000  # bytes to the host per step, at batch 32 and beam 4
ON_DEVICE = OrtSettings(threads=1, on_device=True)


class SameForm(OrtSettings):
    """States in host memory, with the graphs that a device has: so that every bit must be the same."""

    def form(self, model: OrtModel) -> OrtForm:
        form = OrtSettings(attention=self.attention, on_device=True).form(model)
        return dataclasses.replace(form, keeps_mask=False)


def sources_of(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, SMALL.source_vocab, rng.integers(1, SMALL.max_source)).tolist() for _ in range(count)]


def tokens_of(found: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[one.tokens for one in nbest] for nbest in found]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    root = tmp_path_factory.mktemp("device")
    return {
        form: onnx_from_model(random_model(SMALL, 5), root / form, ("fp32", "fp16"), cache_form=form)
        for form in ("static", "growing")
    }


@pytest.fixture(scope="module")
def sessions(bundles: dict[str, Bundle]) -> Iterator[Any]:
    """Sessions by cache form, precision and whether their states are on a device."""
    with ExitStack() as opened:

        @cache
        def session(form: str, precision: str, on_device: bool, **options: Any) -> OrtSession:
            kind = OrtSettings if on_device else SameForm
            asked = kind(threads=1, on_device=on_device, **{"tokens_per_wait": 1, **options})
            return opened.enter_context(OrtSession(model_from_bundle(bundles[form], precision), asked))

        yield session


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(["static", "growing"]),
    precision=st.sampled_from(["fp32", "fp16"]),
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    beam=st.integers(1, 5),
    length=st.integers(1, 24),
    scores=st.booleans(),
    rows=st.integers(0, 4),
)
def test_tokens_are_those_of_states_in_host_memory(
    sessions: Any, form: str, precision: str, seed: int, count: int, beam: int, length: int, scores: bool, rows: int
) -> None:
    """Sources leave, caches are compacted and grow, and with continuous batching (`rows`) new sources take rows."""
    sources = sources_of(count, seed)
    options = SearchOptions(max_length=length, beam=beam, nbest=beam, scores=scores or beam > 1)
    host, device = sessions(form, precision, False), sessions(form, precision, True)
    expected, found = (outputs_of(one, sources, options, rows) for one in (host, device))
    assert [[best.tokens for best in nbest] for nbest in found] == [
        [best.tokens for best in nbest] for nbest in expected
    ]
    if options.scores:  # the last bits of sums may depend on where in memory a row begins
        assert_same_outputs(found, expected, rounding_from_session(host, sources, length), options)


def outputs_of(session: Any, sources: Any, options: SearchOptions, rows: int) -> list[list[Hypothesis]]:
    """What a session outputs for a batch, or with continuous batching of so many rows."""
    if not rows:
        return generate(session, sources, options)
    return [nbest for _, nbest in sorted(translate_many(session, sources, options, batch=rows))]


@pytest.mark.parametrize("form", ["static", "growing"])
def test_tensors_of_a_state_are_those_in_host_memory(sessions: Any, form: str) -> None:
    kinds = [sessions(form, "fp32", on_device, attention=True) for on_device in (False, True)]
    ids, mask = padded(sources_of(4, 3), SMALL.pad_id)
    new_ids, new_mask = padded(sources_of(2, 4), SMALL.pad_id)
    width = max(ids.shape[1], new_ids.shape[1])
    states = []
    for session in kinds:
        state = session.encode(ids, mask)
        session.select(state, np.array([3, 1, 0]), None)
        session.replace(state, np.array([2, 0]), session.encode(new_ids, new_mask), width)
        session.reserve(state, 0 if form == "growing" else 4)
        own = np.zeros((3, 2, 2 if form == "growing" else 4), dtype=bool)
        own[:, [0, 1], [0, 1]] = True
        places = np.zeros(3, dtype=np.int64)
        session.step(state, np.array([[5, 6], [7, 8], [9, 3]]), places, places, own)
        session.select(state, np.array([1, 2]), np.array([[1, 0, 1], [0, 0, 1]]))
        states.append(state)
    assert not isinstance(states[0], DeviceState)
    assert isinstance(states[1], DeviceState)
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        host, device = (session.tensor(state, name) for session, state in zip(kinds, states, strict=True))
        assert host.dtype == device.dtype
        if name.startswith("self"):
            assert host.shape[2] == 3
        assert np.array_equal(host, device), name


def test_a_deterministic_session_drops_the_columns_it_added(sessions: Any) -> None:
    host, device = (sessions("static", "fp32", on_device, deterministic=True) for on_device in (False, True))
    ids, mask = padded([[5, 6, 7]], SMALL.pad_id)
    for name in ("encoder_states", "source_mask", "cross_k.0"):
        shapes = [session.tensor(session.encode(ids, mask), name).shape for session in (host, device)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("form", ["static", "growing"])
def test_no_node_of_a_step_computes_a_shape(bundles: dict[str, Bundle], form: str) -> None:
    """Providers of GPUs leave such nodes to the CPU."""
    model = model_from_bundle(bundles[form], "fp32")
    path = model.graphs["decoder_step"]
    step = step_form(onnx.load(path, load_external_data=False), ON_DEVICE.form(model), path.parent)
    assert "Unsqueeze" in {node.op_type for node in step.graph.node}
    assert not {"Shape", "Size", "Range", "If"} & {node.op_type for node in step.graph.node}


def crossed(session: OrtSession, sources: list[list[int]], options: SearchOptions) -> list[tuple[int, int]]:
    """Bytes to the device and to the host by step; what happens between steps counts for the next one."""
    device, found = session.device, []
    assert device is not None
    before = device.sent, device.read

    def count(emitted: Any) -> None:
        nonlocal before
        now = device.sent, device.read
        found.append((now[0] - before[0], now[1] - before[1]))
        before = now

    generate(session, sources, options, on_step=count)
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrtSession]:
    bundle = onnx_from_model(random_model(WIDE, 5), tmp_path_factory.mktemp("wide") / "bundle", ("fp32",))
    with OrtSession(model_from_bundle(bundle, "fp32"), ON_DEVICE) as session:
        yield session


@pytest.mark.parametrize(("beam", "scores"), [(4, True), (1, True), (1, False)])
def test_a_step_reads_kilobytes(wide: OrtSession, beam: int, scores: bool) -> None:
    options = SearchOptions(max_length=12, beam=beam, scores=scores, ignore_eos=True)
    steps = crossed(wide, sources_of(32, 1), options)
    assert len(steps) == 12
    assert max(read for _, read in steps) <= BUDGET
    small = 4 * 32 * beam * 8  # tokens, parents, positions and places to write to: no mask but where one begins
    assert sorted(sent for sent, _ in steps)[6] <= small


def test_a_rule_that_reads_logits_gets_them(wide: OrtSession) -> None:
    sources = sources_of(3, 1)
    steps = crossed(wide, sources, SearchOptions(max_length=4, repetition_penalty=1.5))
    logits = 3 * WIDE.target_vocab * 4
    assert logits < steps[0][1] < logits + BUDGET


def test_no_cache_crosses(wide: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in steps nor where sources leave, caches grow and new sources take rows: only indices do."""
    assert wide.device is not None
    sizes: list[int] = []
    monkeypatch.setattr(type(wide.device), "write", recording(type(wide.device).write, sizes))
    options = SearchOptions(max_length=24, beam=4)
    list(translate_many(wide, sources_of(24, 2), options, batch=8))
    slots = 4 * 24 + 64  # no cache has more
    assert max(sizes) <= 8 * slots * 8  # an index of every slot of every source
    one_tensor = 8 * SMALL.d_model * slots * 4
    assert max(sizes) < one_tensor


def recording(write: Any, sizes: list[int]) -> Any:
    def recorded(device: Any, array: Any, values: np.ndarray) -> None:
        sizes.append(values.nbytes)
        write(device, array, values)

    return recorded


def test_a_plain_session_has_states_in_host_memory(sessions: Any) -> None:
    session = sessions("static", "fp32", False)
    assert session.device is None
    state = session.encode(*padded([[5, 6]], SMALL.pad_id))
    assert type(state) is OrtState
    assert all(isinstance(array, np.ndarray) for array in state.values())


def test_one_cuda_graph_for_every_set_of_arrays(sessions: Any) -> None:
    """The mask has two places, so a decode without moves has two; what is bound elsewhere gets a number of its own."""
    session = sessions("static", "fp32", True)
    replays = session.decoders.whole.replays
    replays.numbers.clear()
    generate(session, sources_of(3, 1), SearchOptions(max_length=8, beam=2, ignore_eos=True))
    assert len(replays.numbers) == 2
    state = session.encode(*padded(sources_of(2, 1), SMALL.pad_id))
    session.reserve(state, 8)
    tokens, place, mask = np.full((2, 1), 5), np.zeros(2, dtype=np.int64), np.zeros((2, 1, 8), dtype=bool)
    for _ in range(4):
        session.step(state, tokens, place, place, mask)
    assert len(replays.numbers) == 4
    cache = state["self_k.0"].place
    session.select(state, np.array([1, 0]), None)
    assert state["self_k.0"].place != cache
    session.step(state, tokens, place, place, mask)
    assert len(replays.numbers) == 5


def test_a_step_has_no_more_than_some_cuda_graphs() -> None:
    replays = Replays(most=2)
    numbers = [replays.options(arrays).get_run_config_entry("gpu_graph_id") for arrays in ((1,), (2,), (1,), (3,))]
    assert numbers == ["1", "2", "1", "-1"]


def test_a_session_in_host_memory_has_no_cuda_graphs(sessions: Any) -> None:
    assert sessions("static", "fp32", False).decoders.whole.replays is None
    assert sessions("growing", "fp32", True).decoders.whole.replays is None


RULES: list[dict[str, Any]] = [
    {},
    {"min_length": 4},
    {"banned": ((7,), (9,)), "first_banned": (11,)},
    {"forced_bos": 9, "forced_eos": 2},
    {"prefix": (8, 12)},
    {"ignore_eos": True},
]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 24),
    length=st.integers(4, 24),
    rules=st.sampled_from(RULES),
    scores=st.booleans(),
    rows=st.integers(0, 4),
)
@pytest.mark.slow
def test_greedy_search_ahead_of_the_host_is_the_loop_of_single_steps(
    sessions: Any, seed: int, count: int, length: int, rules: dict[str, Any], scores: bool, rows: int
) -> None:
    """Sources end at different steps and are noticed late, and new sources take their rows (`rows`)."""
    sources = sources_of(count, seed)
    options = SearchOptions(max_length=length, scores=scores, **rules)
    one_by_one, ahead = sessions("static", "fp32", True), sessions("static", "fp32", True, tokens_per_wait=8)
    assert one_by_one.ahead is None
    assert ahead.ahead.tokens == 8
    expected = generate(one_by_one, sources, options)
    if rows:
        by_number = dict(translate_many(ahead, sources, options, batch=rows))
        found = [by_number[number] for number in range(count)]
    else:
        found = generate(ahead, sources, options)
    assert tokens_of(found) == tokens_of(expected)
    if scores:
        near = rounding_from_session(one_by_one, sources, length).of_normaliser()
        assert [[one.score for one in nbest] for nbest in found] == [near.scores(nbest, options) for nbest in expected]


def test_a_chain_waits_once_for_eight_tokens(wide: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is sent between them: neither tokens nor masks nor bans."""
    waits: list[bool] = []
    honest = Replays.options

    def counted(replays: Replays, arrays: Any, waiting: bool = True) -> Any:
        waits.append(waiting)
        return honest(replays, arrays, waiting)

    monkeypatch.setattr(Replays, "options", counted)
    steps = crossed(wide, sources_of(32, 1), SearchOptions(max_length=24, ignore_eos=True))
    assert [number for number, waiting in enumerate(waits) if waiting] == [7, 15, 23]
    assert [sent for sent, _ in steps[1:]] == [0] * 23
    assert [step for step, (_, read) in enumerate(steps) if read] == [0, 8, 16]
    assert max(read for _, read in steps) / 8 <= BUDGET


def test_options_that_a_chain_does_not_serve_go_step_by_step(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions("static", "fp32", True, tokens_per_wait=8)
    monkeypatch.setattr(session, "choose", lambda *given: pytest.fail("a chain reads no logits"))
    for options in ({"beam": 2}, {"repetition_penalty": 1.2}, {"sample": True, "seed": 1}):
        generate(session, sources_of(2, 1), SearchOptions(max_length=5, **options))
    for form, more in (("growing", {}), ("static", {"deterministic": True})):
        assert sessions(form, "fp32", True, **{"tokens_per_wait": 8, **more}).ahead is None
