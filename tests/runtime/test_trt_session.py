"""TrtSession over the stand-in: whole decodes against PyTorch, and what it does with memory, graphs and wrong calls."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_engines import (
    BEAMS,
    MODEL,
    ONE_BEAM,
    SOURCES,
    THREE_BEAMS,
    check_logits,
    copied,
    exported,
    put_engines,
    reference_greedy,
    session_over,
)
from tensorrt_stand_in import CudaGraphStrategy, HostDevice, tensorrt_stand_in

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.passport import PASSPORT, read_passport
from seq2engine.export.to_engine import engines_from_onnx
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime import trt_session
from seq2engine.runtime.generate import generate, padded
from seq2engine.runtime.search import SearchOptions
from seq2engine.runtime.session import Session, State, open_session
from seq2engine.runtime.torch_session import TorchSession
from seq2engine.runtime.trt_session import TrtSession

FORMS = ("static", "growing")
FLAVOURS = ("tensorrt_rtx", "tensorrt")
LENGTH = 10


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return exported(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only suffer from being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def opened(bundles: dict[str, Path], where: Path, form: str = "static", trt: Any = None, **options: Any) -> TrtSession:
    return session_over(put_engines(copied(bundles[form], where / "run7"), **options), trt)


def encoded(session: Session, sources: list[list[int]] = SOURCES) -> State:
    state = session.encode(*padded(sources, session.config.pad_id))
    session.reserve(state, session.limits.slots or 0)
    return state


def one_beam_step(session: Session, state: State, tokens: np.ndarray, step: int) -> np.ndarray:
    """One step of sources that have one beam and have done `step` of them."""
    batch, slots = len(tokens), session.limits.slots or step + 1
    place = np.full(batch, step)
    mask = np.broadcast_to(np.arange(slots) <= step, (batch, 1, slots))
    return session.step(state, tokens, place, place, mask).logits


def greedy(session: Session, sources: list[list[int]], length: int) -> list[list[int]]:
    """The plain loop; finished sources leave the batch at once."""
    state = encoded(session, sources)
    found: list[list[int]] = [[] for _ in sources]
    rows = np.arange(len(sources))
    tokens = np.full((len(rows), 1), session.config.start_id)
    for step in range(length):
        tokens = one_beam_step(session, state, tokens, step).argmax(axis=-1)
        for row, token in zip(rows, tokens[:, 0], strict=True):
            found[row].append(int(token))
        going = np.flatnonzero(tokens[:, 0] != session.config.end_id)
        if not len(going):
            break
        if len(going) < len(rows):
            session.select(state, going, None)
            rows, tokens = rows[going], tokens[going]
    return found


class Tree:
    """Sources with K beams each, whose ancestors are kept track of by hand, checked against PyTorch step by step."""

    def __init__(self, session: Session, sources: list[list[int]], beams: int):
        self.session, self.sources, self.beams = session, sources, beams
        self.state = encoded(session, sources)
        start = session.config.start_id
        self.paths = [[[start] for _ in range(beams)] for _ in sources]  # decoder inputs of every beam
        self.slots: list[list[list[int]]] = [[[] for _ in range(beams)] for _ in sources]  # where they are cached
        self.used = [0] * len(sources)

    def step(self) -> np.ndarray:
        """Runs the last token of every path; its logits must be PyTorch's."""
        longest = max(self.used) + self.beams
        mask = np.zeros((len(self.sources), self.beams, longest), dtype=bool)
        for row, beams in enumerate(self.slots):
            for beam, own in enumerate(beams):
                own.append(self.used[row] + beam)
                mask[row, beam, own] = True
        if (slots := self.session.limits.slots) is not None:
            mask = np.pad(mask, ((0, 0), (0, 0), (0, max(slots - longest, 0))))[:, :, :slots]
        tokens = np.array([[path[-1] for path in beams] for beams in self.paths])
        position = np.array([len(beams[0]) - 1 for beams in self.paths])
        logits = self.session.step(self.state, tokens, position, np.array(self.used), mask).logits
        self.used = [used + self.beams for used in self.used]
        for row, source in enumerate(self.sources):
            check_logits(logits[row], [source] * self.beams, self.paths[row])
        return logits.copy()

    def descend(self, logits: np.ndarray, turn: int) -> None:
        """Every beam moves on: beam k continues beam (k * turn) % K with its k-th best token."""
        for row in range(len(self.sources)):
            parents = [(beam * turn) % self.beams for beam in range(self.beams)]
            best = [int(np.argsort(-logits[row, parent])[beam]) for beam, parent in enumerate(parents)]
            self.paths[row] = [[*self.paths[row][parent], token] for parent, token in zip(parents, best, strict=True)]
            self.slots[row] = [list(self.slots[row][parent]) for parent in parents]

    def select(self, rows: list[int] | None, compact: bool) -> None:
        kept = list(range(len(self.sources))) if rows is None else rows
        self.sources = [self.sources[row] for row in kept]
        self.paths = [self.paths[row] for row in kept]
        self.slots = [self.slots[row] for row in kept]
        self.used = [self.used[row] for row in kept]
        slots = None
        if compact:
            live = [sorted({slot for beam in beams for slot in beam}) for beams in self.slots]
            slots = np.zeros((len(kept), max(map(len, live))), dtype=np.int64)
            for row, own in enumerate(live):
                slots[row, : len(own)] = own
                self.slots[row] = [[own.index(slot) for slot in beam] for beam in self.slots[row]]
            # A growing cache appends behind the longest.
            growing = self.session.cache_form == "growing"
            self.used = [slots.shape[1] if growing else len(own) for own in live]
        self.session.select(self.state, None if rows is None else np.array(rows), slots)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("form", FORMS)
def test_greedy_decodes_are_those_of_pytorch(form: str, flavour: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    trt = tensorrt_stand_in(flavour)
    expected = [reference_greedy(MODEL, source, LENGTH) for source in SOURCES]
    assert len({token for tokens in expected for token in tokens}) > 5, "decodes that repeat themselves prove little"
    assert len({len(tokens) for tokens in expected}) > 1, "one source should finish before the others"
    with opened(bundles, tmp_path, form, trt, flavour=flavour) as session:
        assert greedy(session, SOURCES, LENGTH) == expected
        # Another batch size and source length through the same buffers.
        assert greedy(session, SOURCES[1:2], LENGTH) == expected[1:2]
        assert greedy(session, SOURCES, LENGTH) == expected
    assert not trt.broken
    assert not trt.contexts


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("form", "ranges"), [("static", BEAMS), ("static", THREE_BEAMS), ("growing", BEAMS), ("growing", THREE_BEAMS)]
)
def test_a_tree_of_three_beams_through_selections(
    form: str, ranges: Any, flavour: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    with opened(bundles, tmp_path, form, flavour=flavour, ranges=ranges) as session:
        tree = Tree(session, SOURCES, beams=3)
        for turn in range(10):
            if turn == 4:
                tree.select(None, compact=True)
            if turn == 6:
                tree.select([2, 0], compact=False)
            if turn == 8:
                tree.select([1], compact=True)
            tree.descend(tree.step(), turn)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beam", [1, 3])
def test_searches_find_what_they_find_over_pytorch(
    form: str, beam: int, bundles: dict[str, Path], tmp_path: Path
) -> None:
    options = SearchOptions(max_length=12, beam=beam, nbest=beam)
    # Few slots, so that the static cache must be compacted on the way.
    with opened(bundles, tmp_path, form, ranges=BEAMS, slots=32) as session, TorchSession(MODEL) as torch_session:
        found = generate(session, SOURCES, options)
        expected = generate(torch_session, SOURCES, options)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_call_fits_and_the_next_does_not(form: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    longest = [list(range(9 + row, 25 + row)) for row in range(4)]
    with opened(bundles, tmp_path, form, ranges=THREE_BEAMS) as session:
        assert (len(longest), len(longest[0])) == (session.limits.batch, session.limits.source)
        tree = Tree(session, longest, beams=3)
        for _ in range(session.limits.target):
            tree.descend(tree.step(), turn=1)
        full = {
            "static": "write_index holds 36 to 36, expected 0 to 33",
            "growing": r"self_mask has shape \[4, 3, 39\]",
        }
        with pytest.raises(RequestError, match=full[form]):
            tree.step()


def test_the_number_of_beams_may_change_from_step_to_step(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, ranges=BEAMS, flavour="tensorrt") as session:
        state = encoded(session, SOURCES[:1])
        mask = np.zeros((1, 3, BEAMS.slots), dtype=bool)
        prefix: list[int] = []
        for step, beams in enumerate([1, 1, 3, 3, 1]):
            place = 3 * step
            mask[:, :, place] = True  # every beam but the first is a leaf
            ahead = mask[:, :beams].copy()
            ahead[0, np.arange(beams), place + np.arange(beams)] = True
            if beams > 1:
                ahead[0, 1:, place] = False
            tokens = np.array([[20 + step, 30 + step, 40 + step][:beams]])
            logits = session.step(state, tokens, np.array([step]), np.array([place]), ahead).logits
            paths = [[*prefix, token] for token in tokens[0].tolist()]
            check_logits(logits[0], SOURCES[:1] * beams, paths)
            prefix = paths[0]


def test_fp16_tensors_follow_the_passport(bundles: dict[str, Path], tmp_path: Path) -> None:
    # With a range of beams the engine's graph is the exported one, so ONNX Runtime must give the very same numbers.
    with (
        opened(bundles, tmp_path, precision="fp16", ranges=BEAMS) as session,
        open_session(bundles["static"], "onnxruntime", "fp16", threads=1) as onnx_session,
    ):
        assert session.precision == "fp16"
        state, expected = encoded(session), onnx_session.encode(*padded(SOURCES, MODEL.config.pad_id))
        onnx_session.reserve(expected, BEAMS.slots)
        for i in range(3):
            tokens, place = np.full((3, 2), 7 + i), np.full(3, 2 * i)
            mask = np.broadcast_to(np.arange(BEAMS.slots) < 2 * i + 2, (3, 2, BEAMS.slots))
            step = (tokens, np.full(3, i), place, mask)
            assert np.array_equal(session.step(state, *step).logits, onnx_session.step(expected, *step).logits)
        for name in ("cross_k.0", "self_v.1"):
            assert session.tensor(state, name).dtype == np.float16
            assert np.array_equal(session.tensor(state, name), onnx_session.tensor(expected, name))


def test_tensors_of_a_state_are_copies_of_what_pytorch_makes(bundles: dict[str, Path], tmp_path: Path) -> None:
    ids, mask = padded(SOURCES, MODEL.config.pad_id)
    with opened(bundles, tmp_path) as session, TorchSession(MODEL) as torch_session:
        state, expected = session.encode(ids, mask), torch_session.encode(ids, mask)
        assert state.keys() == expected.keys()
        for name in state:
            np.testing.assert_allclose(session.tensor(state, name), torch_session.tensor(expected, name), atol=1e-4)
        session.tensor(state, "cross_k.0")[...] = 0
        assert session.tensor(state, "cross_k.0").any()


def test_selected_slots_come_first_and_a_static_cache_is_zero_behind_them(
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
        assert not after[:, :, 2:].any()
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


def test_one_graph_serves_all_steps_of_equal_shape(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, flavour="tensorrt") as session:
        device: Any = session.device
        state = encoded(session)
        tokens = np.full((3, 1), 7)
        for step in range(6):
            one_beam_step(session, state, tokens, step)
        assert (device.captures, device.replays) == (1, 5)  # the first step warms up
        session.select(state, np.array([0, 2]), None)  # another batch is another graph
        for step in range(6, 9):
            one_beam_step(session, state, tokens[:2], step)
        assert (device.captures, device.replays) == (2, 7)


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


def test_rtx_is_told_to_capture_only_where_shapes_repeat(bundles: dict[str, Path], tmp_path: Path) -> None:
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


def test_a_failed_capture_is_told_and_decoding_goes_on(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: HostDevice, launch: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

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
    assert len(device.live) == len(state), "only what the state keeps is still there"
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
        assert dataclasses.astuple(session.limits) == (4, 1, 16, 12, 12, False)
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
    build = f"seq2engine build {where}/run7 --precision fp32 --target sm86 sm89 --flavour tensorrt_rtx"
    return f"rebuild with: {build} {ranges} --force"


def test_more_beams_than_the_engine_has_are_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        state = encoded(session)
        more = {"tokens": np.full((3, 2), 7), "self_mask": np.ones((3, 2, 12), dtype=bool)}
        with pytest.raises(RequestError) as caught:
            session.step(state, **{**STEP, **more})
        assert str(caught.value) == (
            "decoder_step input tokens has shape [3, 2], this engine takes [1, 1] to [4, 1]; "
            + rebuild(tmp_path, "--batch 1:2:4 --beam 1:1:2 --source 1:8:16 --length 1:8:12")
        )


def test_a_wrong_batch_is_refused_before_it_runs(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path) as session:
        cases: list[tuple[Any, Any, str]] = [
            (np.ones((5, 17)), np.ones((5, 17)), "encoder input source_ids is float64, expected int64"),
            (
                np.ones((5, 17), dtype=np.int64),
                np.ones((5, 17), dtype=bool),
                "encoder input source_ids has shape [5, 17], this engine takes [1, 1] to [4, 16]; "
                + rebuild(tmp_path, "--batch 1:2:5 --beam 1 --source 1:8:17 --length 1:8:12"),
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
        with pytest.raises(RequestError, match=r"a cache of 40 slots was asked for, this engine has 12; .* --slots 40"):
            session.reserve(state, 40)


def test_a_growing_cache_is_held_to_its_range(bundles: dict[str, Path], tmp_path: Path) -> None:
    with opened(bundles, tmp_path, "growing", ranges=BEAMS) as session:
        state = session.encode(*padded(SOURCES, 0))
        with pytest.raises(RequestError, match=r"of 36 slots was .*, this engine takes 0 to 33; .* --length 1:8:13"):
            session.reserve(state, 36)
        session.reserve(state, 33)
        with pytest.raises(RequestError, match="last axis to count 33 cached slots and 1 new ones"):
            session.step(state, **{**STEP, "self_mask": np.ones((3, 1, 33), dtype=bool)})
        session.step(state, **{**STEP, "self_mask": np.ones((3, 1, 34), dtype=bool)})
        with pytest.raises(RequestError, match=r"self_k.0 has .* this engine takes .*; .* --length 1:8:13"):
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


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("form", FORMS)
def test_a_real_engine_decodes_as_pytorch_does(form: str, flavour: str, tmp_path: Path) -> None:
    pytest.importorskip(flavour, reason=f"needs {flavour} and its GPU")
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",), form)
    rtx = flavour == "tensorrt_rtx"
    targets = ["sm{}{}".format(*torch.cuda.get_device_capability())] if rtx else []
    for ranges in (ONE_BEAM, THREE_BEAMS):
        engines_from_onnx(bundle, targets, ranges, "fp32", flavour=flavour)
    for folder in sorted((bundle.root / "engines").iterdir()):
        beam = read_passport(folder / PASSPORT).ranges.beam.max
        options = SearchOptions(max_length=12, beam=beam)
        for _ in range(2):  # the second time with the runtime cache of the first
            with open_session(bundle, "tensorrt", "fp32", engine=folder.name) as session:
                found = [row[0].tokens for row in generate(session, SOURCES, options)]
                again = [row[0].tokens for row in generate(session, SOURCES, options)]
            assert found == again == [row[0].tokens for row in generate(TorchSession(MODEL), SOURCES, options)]
