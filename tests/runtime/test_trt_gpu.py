"""What only a GPU can tell: engines built and run on the one that is here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stand_in_engines import (
    MODEL,
    ONE_BEAM,
    SOURCES,
    THREE_BEAMS,
)
from trt_steps import FLAVOURS, FORMS

from seq2engine.export.passport import PASSPORT, read_passport
from seq2engine.export.to_engine import engines_from_onnx
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search import SearchOptions
from seq2engine.runtime.session import open_session
from seq2engine.runtime.torch_session import TorchSession


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
