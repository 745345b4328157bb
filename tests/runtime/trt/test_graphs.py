"""What TrtSession does with memory, waits and CUDA graphs."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host_device import HostDevice
from support.stand_in_config import CudaGraphStrategy
from support.stand_in_engines import (
    BEAMS,
    FOUR_BEAMS,
    MODEL,
    NARROWER,
    ONE_BEAM,
    SOURCES,
    check_logits,
    reference_greedy,
)
from support.tensorrt_stand_in import tensorrt_stand_in
from support.trt_steps import FLAVOURS, FORMS, LENGTH, encoded, greedy, one_beam_step, opened

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.profiles import Range
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions


def test_selected_slots_come_first_and_a_static_cache_keeps_its_length(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        for step in range(4):
            one_beam_step(session, state, np.full((3, 1), 7 + step), step)
        before, cross = session.tensor(state, "self_v.1"), session.tensor(state, "cross_v.1")
        session.select(state, np.array([2, 0]), np.array([[3, 0], [1, 2]]))
        after = session.tensor(state, "self_v.1")
        assert after.shape == (2, *before.shape[1:])
        assert np.array_equal(after[0, :, :2], before[2][:, [3, 0]])
        assert np.array_equal(after[1, :, :2], before[0][:, [1, 2]])
        assert np.array_equal(after[:, :, 2:], np.repeat(after[:, :, 1:2], after.shape[2] - 2, axis=2))
        assert np.array_equal(session.tensor(state, "cross_v.1"), cross[[2, 0]])
        session.select(state, None, None)
        assert np.array_equal(session.tensor(state, "self_v.1"), after)


def test_reserving_again_empties_the_cache(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        one_beam_step(session, state, np.full((3, 1), 7), 0)
        assert session.tensor(state, "self_k.0").any()
        session.reserve(state, ONE_BEAM.slots)
        assert not session.tensor(state, "self_k.0").any()


def test_a_step_waits_once_and_allocates_nothing(bundles: dict[str, Path], tmp_path: Path) -> None:
    for form in FORMS:
        with opened(bundles, tmp_path / form, form) as session:
            device: Any = session.device
            state = encoded(session)
            addresses = set(device.live)
            for step in range(5):
                waits = device.waits
                one_beam_step(session, state, np.full((3, 1), 7), step)
                assert device.waits == waits + 1
            assert set(device.live) == addresses


def test_one_graph_serves_all_steps_until_half_the_sources_have_left(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, flavour="tensorrt") as session:
        device: Any = session.device
        state = encoded(session)
        tokens = np.full((3, 1), 7)
        for step in range(4):
            one_beam_step(session, state, tokens, step)
        assert (device.captures, device.replays) == (1, 3)  # the first step warms up
        session.select(state, np.array([0, 2]), None)
        for step in range(4, 7):
            logits = one_beam_step(session, state, tokens[:2], step)
            check_logits(logits[:, 0], [SOURCES[0], SOURCES[2]], [[7] * (step + 1)] * 2)
        assert (device.captures, device.replays) == (1, 6)
        session.select(state, np.array([1]), None)  # the other half is nobody's: not worth its work any more
        for step in range(7, 9):
            logits = one_beam_step(session, state, tokens[:1], step)
            check_logits(logits[:, 0], [SOURCES[2]], [[7] * (step + 1)])
        assert (device.captures, device.replays) == (2, 7)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_whole_decode_has_few_graphs_and_waits(
    beam: int, flavour: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    ranges = dataclasses.replace(FOUR_BEAMS, beam=Range(beam, beam, beam))
    options = SearchOptions(max_length=12, beam=beam)
    # Few slots, so that the cache of four beams is compacted on the way.
    with opened(bundles, tmp_path, ranges=ranges, flavour=flavour, slots=12 if beam == 1 else 28) as session:
        device: Any = session.device
        waits, steps = device.waits, []
        generate(session, SOURCES[:1], options, on_step=steps.append)
        assert len(steps) == 12
        # For the encoder, and for the candidates of every step; with one beam, once for eight of them.
        assert device.waits == waits + 1 + (2 if beam == 1 else len(steps))
        own_graphs = session.engines["decoder_step"].context.own_graphs
        if flavour == "tensorrt":
            # An engine's first launch is not captured. With four beams a mask is sent whole or follows from the last.
            assert (device.captures, device.replays) == ((1, 11) if beam == 1 else (2, 10))
            assert not own_graphs
        else:
            assert device.captures == 0
            assert len(own_graphs) == 1


def test_compaction_is_a_gather_of_each_tensor_without_a_wait(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, ranges=BEAMS) as session:
        device: Any = session.device
        state = encoded(session)
        device.synchronize()
        waits, allocations = device.waits, device.allocations
        slots = np.tile(np.arange(4), (3, 1))
        session.select(state, None, slots)
        slots[:] = 99  # the caller's array is its own again
        assert len(device.queue) == 1 + 2 * len(session.cache)  # what to take; and each tensor aside and back
        assert (device.waits, device.allocations) == (waits, allocations)
        device.synchronize()


def test_sources_that_leave_are_moved_in_few_copies(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        device: Any = session.device
        state = encoded(session)
        device.synchronize()
        session.select(state, np.array([2, 1]), None)
        sent = device.sent
        assert len(device.queue) == 4  # one row: cross keys and values, encoder states, source mask; the cache
        device.synchronize()
        assert device.sent == sent


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_profiles_are_chosen_by_request(flavour: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    options = SearchOptions(max_length=6, beam=2)
    with opened(bundles, tmp_path, ranges=FOUR_BEAMS, narrower=NARROWER, flavour=flavour) as session:
        contexts = [session.engines[graph].context for graph in ("encoder", "decoder_step")]
        assert [context.switches for context in contexts] == [[0], [0]]
        for sources, profile in ((SOURCES[1:2], 1), (SOURCES[:1], 2), (SOURCES, 0), (SOURCES, 0)):
            generate(session, sources, dataclasses.replace(options, max_length=3))
            assert [context.profile for context in contexts] == [profile, profile]
        assert [context.switches for context in contexts] == [[0, 1, 2, 0]] * 2
        assert session.limits.batch == 4
        assert session.limits.source == 16
        with pytest.raises(
            RequestError, match=r"takes \[1, 1\] to \[4, 16\] or \[1, 1\] to \[1, 4\] or \[1, 1\] to \[2, 8\]; "
        ):
            session.encode(np.ones((1, 17), dtype=np.int64), np.ones((1, 17), dtype=bool))


def test_a_compaction_keeps_the_graph(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, flavour="tensorrt") as session:
        device: Any = session.device
        state = encoded(session)
        for step in range(4):
            one_beam_step(session, state, np.full((3, 1), 7), step)
        session.select(state, None, np.tile(np.arange(4), (3, 1)))
        one_beam_step(session, state, np.full((3, 1), 7), 4)
        assert (device.captures, device.replays) == (1, 4)


def test_a_growing_cache_is_not_captured(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, "growing", flavour="tensorrt") as session:
        greedy(session, SOURCES, LENGTH)
        assert session.device.captures == 0  # type: ignore[attr-defined]


def test_rtx_captures_only_where_shapes_repeat(bundles: dict[str, Path], tmp_path: Path) -> None:
    for form in FORMS:
        trt = tensorrt_stand_in("tensorrt_rtx")
        with opened(bundles, tmp_path / form, form, trt) as session:
            step, encoder = session.engines["decoder_step"], session.engines["encoder"]
            captured = step.config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            assert captured == step.context.captures_itself == (form == "static")
            assert step.context.specialises == (form == "static")
            assert not encoder.context.captures_itself
            assert encoder.context.specialises
            greedy(session, SOURCES, LENGTH)
            assert session.device.captures == 0  # type: ignore[attr-defined]


def test_a_failed_capture_is_logged_and_decoding_continues(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: HostDevice, launch: object) -> None:
        raise SessionError("operation not permitted when stream is capturing")

    monkeypatch.setattr(HostDevice, "capture", refuse)
    with opened(bundles, tmp_path, flavour="tensorrt") as session, caplog.at_level(logging.WARNING):
        assert greedy(session, SOURCES[:1], LENGTH) == [reference_greedy(MODEL, SOURCES[0], LENGTH)]
    assert [record.message.partition(" runs ")[2] for record in caplog.records] == [
        "without a CUDA graph, which could not be captured: operation not permitted when stream is capturing"
    ]


def test_states_do_not_disturb_each_other(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        states = [encoded(session, [source]) for source in SOURCES]
        tokens = [np.full((1, 1), MODEL.config.start_id) for _ in SOURCES]
        found: list[list[int]] = [[] for _ in SOURCES]
        for step in range(4):
            for i, state in enumerate(states):
                tokens[i] = one_beam_step(session, state, tokens[i], step).argmax(-1)
                found[i].append(int(tokens[i][0, 0]))
        for source, path in zip(SOURCES, found, strict=True):
            expected = reference_greedy(MODEL, source, 4)
            assert path[: len(expected)] == expected


def test_the_memory_of_a_dead_state_serves_the_next(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        first = encoded(session)
        address = first["cross_k.0"].address
        second = encoded(session)
        assert second["cross_k.0"].address != address
        del first
        third = encoded(session)
        assert third["cross_k.0"].address == address
