"""Decodes through the forms that TensorRT gets, computed by ONNX Runtime in the stand-in, are those of PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.stand_in_engines import BEAMS, ONE_BEAM, SOURCES, THREE_BEAMS, put_engines, session_over

from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.profiles import ShapeRanges
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession

# Post-norm, so that queries are folded; stand_in_engines.MODEL is pre-norm. Its decodes wander, too.
MODEL = random_model(dataclasses.replace(PRESETS["tiny"], positions="learned"), seed=5)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {form: onnx_from_model(MODEL, folder / form, ("fp32", "fp16"), form).root for form in ("static", "growing")}


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("ranges", "beam"), [(ONE_BEAM, 1), (THREE_BEAMS, 3), (BEAMS, 3)])
def test_tokens_are_those_of_pytorch(
    form: str, precision: str, ranges: ShapeRanges, beam: int, bundles: dict[str, Path]
) -> None:
    bundle = open_bundle(bundles[form])
    folder = put_engines(bundle, ranges, precision, name=f"{precision}-{ranges.beam.min}-{ranges.beam.max}")
    options = SearchOptions(max_length=12, beam=beam, nbest=beam)
    with session_over(folder) as session, TorchSession(MODEL) as torch_session:
        found = generate(session, SOURCES, options)
        expected = generate(torch_session, SOURCES, options)
    best = [[h.tokens for h in row] for row in expected]
    assert len({token for row in best for tokens in row for token in tokens}) > 5, "repetition proves little"
    assert [[h.tokens for h in row] for row in found] == best
