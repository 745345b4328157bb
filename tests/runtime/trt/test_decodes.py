"""TrtSession over the stand-in: whole decodes, which must be those of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rounding import tensor_error
from support.stand_in_engines import (
    BEAMS,
    FOUR_BEAMS,
    MODEL,
    NARROWER,
    SOURCES,
    THREE_BEAMS,
    check_logits,
    reference_greedy,
)
from support.tensorrt_stand_in import tensorrt_stand_in
from support.trt_steps import FLAVOURS, FORMS, LENGTH, Tree, encoded, greedy, opened

from seq2engine.errors import RequestError
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession


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


@pytest.mark.each_value
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


@pytest.mark.each_value
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beam", [1, 4])
def test_searches_find_what_they_find_over_pytorch(
    form: str, beam: int, flavour: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    """Padded batches to the engine's length limit; in the static cache with so few slots that it must be compacted."""
    options = SearchOptions(max_length=12, beam=beam, nbest=beam)
    trt = tensorrt_stand_in(flavour)
    with (
        opened(bundles, tmp_path, form, trt, ranges=FOUR_BEAMS, slots=40, flavour=flavour) as session,
        TorchSession(MODEL) as torch_session,
    ):
        assert session.limits.target == options.max_length
        found = generate(session, SOURCES, options)
        expected = generate(torch_session, SOURCES, options)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]
    assert max(len(h.tokens) for row in found for h in row) == options.max_length
    assert not trt.broken
    assert not trt.contexts


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_several_profiles_and_continuous_batching(flavour: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    """Sources of all lengths come and go, through every profile of the engine."""
    many = [[(7 * row + 3 * place) % 250 + 3 for place in range(1 + row % 9)] for row in range(11)]
    options = SearchOptions(max_length=8, beam=2)
    with (
        opened(bundles, tmp_path, ranges=FOUR_BEAMS, narrower=NARROWER, flavour=flavour) as session,
        TorchSession(MODEL) as torch_session,
    ):
        found = {number: row[0].tokens for number, row in translate_many(session, many, options, batch=4)}
        alone = generate(session, many[:1], options)[0][0].tokens
        profiles = set(session.engines["decoder_step"].context.switches)
        expected = [generate(torch_session, [source], options)[0][0].tokens for source in many]
    assert [found[number] for number in range(len(many))] == expected
    assert alone == expected[0]
    assert profiles == {0, 1, 2}


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
            array = torch_session.tensor(expected, name)
            near = tensor_error(MODEL.config, array) if array.dtype == np.float32 else 0.0
            np.testing.assert_allclose(session.tensor(state, name), array, rtol=0, atol=near)
        session.tensor(state, "cross_k.0")[...] = 0
        assert session.tensor(state, "cross_k.0").any()
