"""Models with relative positions over the stand-in: positions of slots follow on the device, as the mask does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.stand_in_engines import FOUR_BEAMS, ONE_BEAM, SOURCES, put_engines, session_over
from support.tensorrt_stand_in import tensorrt_stand_in

from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.profiles import ShapeRanges
from seq2engine.export.contract import CACHE_FORMS
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

# Distances up to 4, so that the table's end is reached; each layer its own, as in UMT5.
CONFIG = dataclasses.replace(
    PRESETS["tiny"], norm="pre", norm_kind="rms", positions="relative", max_distance=4, distances_per_layer=True
)
MODEL = random_model(CONFIG, seed=3)
MANY = [source[start:] for source in SOURCES for start in range(len(source) - 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("relative")
    for form in CACHE_FORMS:
        onnx_from_model(MODEL, root / form, ("fp32",), form)
    return {form: root / form for form in CACHE_FORMS}


@pytest.mark.each_value
@pytest.mark.parametrize("form", CACHE_FORMS)
@pytest.mark.parametrize(("beam", "ranges", "slots"), [(1, ONE_BEAM, None), (1, FOUR_BEAMS, None), (4, FOUR_BEAMS, 24)])
def test_searches_find_what_they_find_over_pytorch(
    form: str, beam: int, ranges: ShapeRanges, slots: int | None, folders: dict[str, Path]
) -> None:
    """One beam ahead of the host; four in so few slots that they are compacted."""
    bundle = open_bundle(folders[form])
    options = SearchOptions(max_length=12, beam=beam)
    name = f"{ranges.beam.max}-{beam}-{slots}"
    folder = put_engines(bundle, ranges, slots=slots if form == "static" else None, name=name)
    trt = tensorrt_stand_in("tensorrt_rtx")
    with session_over(folder, trt) as session, TorchSession(MODEL, cache_form=form) as reference:
        expected = [[each.tokens for each in nbest] for nbest in generate(reference, MANY, options)]
        found = [generate(session, MANY[first : first + 4], options) for first in range(0, len(MANY), 4)]
        assert [[each.tokens for each in nbest] for part in found for nbest in part] == expected
        if form == "static":  # in a growing cache new sources begin behind all slots: more than this engine has
            kept_full = dict(translate_many(session, MANY, options, batch=3))
            assert [[each.tokens for each in kept_full[number]] for number in range(len(MANY))] == expected
    assert not trt.broken
    assert len({tokens for nbest in expected for tokens in nbest}) > 3, "decodes that are all alike prove little"
