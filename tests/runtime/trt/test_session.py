"""Opening, closing and wrong calls of a TrtSession."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host_device import HostDevice
from support.stand_in_engines import (
    BEAMS,
    MODEL,
    ONE_BEAM,
    SOURCES,
    check_logits,
    copied,
    put_engines,
    reference_greedy,
    session_over,
)
from support.tensorrt_stand_in import tensorrt_stand_in
from support.trt_steps import LENGTH, encoded, greedy, opened

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.profiles import Range
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Limits
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.trt import session as trt_session


def test_closing_releases_all_and_ends_all(bundles: dict[str, Path], tmp_path: Path) -> None:
    trt, device = tensorrt_stand_in(), HostDevice()
    folder = put_engines(copied(bundles["static"], tmp_path / "run7"))
    with session_over(folder, trt, device) as session:
        state = encoded(session)
    session.close()
    calls = (
        partial(session.encode, *padded(SOURCES, 0)),
        partial(session.reserve, state, ONE_BEAM.slots),
        partial(session.step, state, **STEP),
        partial(session.select, state, np.array([0]), None),
        partial(session.tensor, state, "cross_k.0"),
    )
    for call in calls:
        with pytest.raises(SessionError, match="closed; open it again"):
            call()
    assert len(device.live) == 6, "only what the state keeps is still there: cross K/V, states, mask; cache; its masks"
    del state, calls, call
    gc.collect()
    assert not trt.broken
    session.pool.clear()
    assert not device.live


def test_open_session_opens_the_only_engine(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(bundles["static"], tmp_path / "run7")
    put_engines(bundle)
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    monkeypatch.setattr(trt_session, "load_tensorrt", tensorrt_stand_in)
    with open_session(bundle.root, "tensorrt", "fp32") as session:
        assert session.backend == "tensorrt"
        assert session.precision == "fp32"
        assert session.limits == Limits(4, 1, 16, 12, 12)
        assert greedy(session, SOURCES[:1], LENGTH) == [reference_greedy(MODEL, SOURCES[0], LENGTH)]


STEP = {
    "tokens": np.full((3, 1), 7),
    "position": np.zeros(3, dtype=np.int64),
    "write_index": np.zeros(3, dtype=np.int64),
    "self_mask": np.ones((3, 1, 12), dtype=bool),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": np.full((2, 1), 7)}, r"position has shape \[3\], expected \[2\] in this call"),
        ({"position": np.zeros((3, 1), dtype=np.int64)}, r"position has shape \[3, 1\], expected \[3\] in this call"),
        ({"self_mask": np.ones((3, 2, 12), dtype=bool)}, r"self_mask has shape \[3, 2, 12\], expected \[3, 1, L\]"),
        ({"self_mask": np.ones((3, 1, 11), dtype=bool)}, r"self_k.0 has shape \[3, 4, 12, 16\], expected \[3, 4, 11"),
        ({"tokens": np.full((3, 1), 7.0)}, "tokens is float64, expected int64"),
        ({"self_mask": np.ones((3, 1, 12), dtype=np.int64)}, "self_mask is int64, expected bool"),
        ({"tokens": np.full((3, 1), 256)}, "tokens holds 256 to 256, expected 0 to 255"),
        ({"tokens": np.full((3, 1), -1)}, "tokens holds -1 to -1, expected 0 to 255"),
        ({"position": np.full(3, 64)}, "position holds 64 to 64, expected 0 to 63"),
        ({"write_index": np.array([0, 12, 3])}, "write_index holds 0 to 12, expected 0 to 11"),
    ],
)
def test_a_wrong_step_is_refused_before_it_runs(
    changed: dict[str, np.ndarray], message: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    right = {**STEP, "self_mask": np.broadcast_to(np.arange(12) < 1, (3, 1, 12))}
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        for _ in range(2):  # as the first call and between two right ones
            with pytest.raises(RequestError, match=message):
                session.step(state, **{**STEP, **changed})
            check_logits(session.step(state, **right).logits[:, 0], SOURCES, [[7]] * 3)


def rebuild(where: Path, ranges: str) -> str:
    build = f"seq2engine build {where}/run7 --precision fp32 --gpu sm86 sm89 --flavour tensorrt_rtx"
    return f"rebuild with: {build} {ranges} --force"


def test_more_beams_than_the_engine_has_are_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        more = {"tokens": np.full((3, 2), 7), "self_mask": np.ones((3, 2, 12), dtype=bool)}
        with pytest.raises(RequestError) as caught:
            session.step(state, **{**STEP, **more})
        assert str(caught.value) == (
            "decoder_step input tokens has shape [3, 2], this engine takes [1, 1] to [4, 1]; "
            + rebuild(tmp_path, "--batch 1:2:4 --beam 1:1:2 --source-length 1:8:16 --max-length 1:8:12")
        )


def test_sources_below_the_least_length_are_padded(bundles: dict[str, Path], tmp_path: Path) -> None:
    """An engine for 6 to 16 tokens decodes shorter sources as one for 1 to 16 does, also those that come later."""
    long = dataclasses.replace(ONE_BEAM, source=Range(6, 8, 16))
    options = SearchOptions(max_length=LENGTH)
    short = [[77, 3], [5], [12, 200, 31, 8, 99], [9, 9], [41]]
    with opened(bundles, tmp_path / "any") as session:
        wanted = dict(translate_many(session, short, options, 2))
        states = session.tensor(encoded(session, short[:2]), "encoder_states")
    with opened(bundles, tmp_path / "long", ranges=long) as session:
        found = dict(translate_many(session, short, options, 2))
        state = encoded(session, short[:2])
        padded_states = session.tensor(state, "encoder_states")
        assert session.tensor(state, "source_mask").shape == (2, 6)
    assert [found[row][0].tokens for row in range(5)] == [wanted[row][0].tokens for row in range(5)]
    assert padded_states.shape == states.shape == (2, 2, MODEL.config.d_model)


def test_a_wrong_batch_is_refused_before_it_runs(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        cases: list[tuple[Any, Any, str]] = [
            (np.ones((5, 17)), np.ones((5, 17)), "encoder input source_ids is float64, expected int64"),
            (
                np.ones((5, 17), dtype=np.int64),
                np.ones((5, 17), dtype=bool),
                "encoder input source_ids has shape [5, 17], this engine takes [1, 1] to [4, 16]; "
                + rebuild(tmp_path, "--batch 1:2:5 --beam 1 --source-length 1:8:17 --max-length 1:8:12"),
            ),
            (
                np.ones((2, 3), dtype=np.int64),
                np.ones((2, 4), dtype=bool),
                "encoder input source_mask has shape [2, 4], expected [2, 3] in this call",
            ),
            (
                np.full((1, 3), 256),
                np.ones((1, 3), dtype=bool),
                "source_ids holds 256 to 256, expected 0 to 255",
            ),
        ]
        for ids, mask, message in cases:
            with pytest.raises(RequestError) as caught:
                session.encode(ids, mask)
            assert str(caught.value) == message


def test_a_wrong_cache_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        state = session.encode(*padded(SOURCES, 0))
        with pytest.raises(RequestError, match="no cache yet; reserve one"):
            session.step(state, **STEP)
        with pytest.raises(RequestError, match=r"a cache of 40 slots was requested, this engine has 12; .* --slots 40"):
            session.reserve(state, 40)


def test_a_growing_cache_is_held_to_its_range(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, "growing", ranges=BEAMS) as session:
        state = session.encode(*padded(SOURCES, 0))
        with pytest.raises(
            RequestError, match=r"of 36 slots was .*, this engine takes 0 to 33; .* --max-length 1:8:13"
        ):
            session.reserve(state, 36)
        session.reserve(state, 33)
        with pytest.raises(RequestError, match="last axis to count 33 cached slots and 1 new ones"):
            session.step(state, **{**STEP, "self_mask": np.ones((3, 1, 33), dtype=bool)})
        session.step(state, **{**STEP, "self_mask": np.ones((3, 1, 34), dtype=bool)})
        with pytest.raises(RequestError, match=r"self_k.0 has .* this engine takes .*; .* --max-length 1:8:13"):
            session.step(state, **{**STEP, "self_mask": np.ones((3, 1, 35), dtype=bool)})


def test_a_wrong_selection_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, str]] = [
        (np.array([3]), None, "rows holds 3 to 3, expected 0 to 2"),
        (np.array([0, 0, 0, 0, 1]), None, "5 rows were selected, this engine takes 4"),
        (np.array([0]), np.zeros((2, 3), dtype=np.int64), r"slots have shape \[2, 3\], expected \[1, up to 12\]"),
        (None, np.zeros((3, 13), dtype=np.int64), r"slots have shape \[3, 13\], expected \[3, up to 12\]"),
        (None, np.full((3, 2), 12), "slots holds 12 to 12, expected 0 to 11"),
    ]
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        for rows, slots, message in cases:
            with pytest.raises(RequestError, match=message):
                session.select(state, rows, slots)
