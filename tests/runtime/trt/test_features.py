"""TrtSession over the stand-in: features of audio or images in place of token ids; prompts that are read by steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stand_in_engines import put_engines, session_over
from support.trocr_models import image_config, pixels
from support.whisper_models import audio_config, features

from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

AUDIO, IMAGES = audio_config(mels=20, max_target=32), image_config(max_target=32)
PROMPTS = [[1, 9], [5, 6, 7, 1, 9], [1], [8, 1, 7]]
KINDS = {"audio": (AUDIO, features(4, AUDIO.mels), PROMPTS), "images": (IMAGES, pixels(4), None)}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("built", "beam", "cache_form"),
    [(1, 1, "static"), (3, 3, "static"), (3, 1, "static"), (1, 1, "growing"), (3, 3, "growing")],
)
def test_decodes_are_those_of_pytorch(built: int, beam: int, cache_form: str, kind: str, tmp_path: Path) -> None:
    """With fewer beams than a static engine has, those that are missing are padding; a growing one has no others."""
    config, sources, prompts = KINDS[kind]
    model = random_model(config, 4)
    bundle = onnx_from_model(model, tmp_path / "bundle", ("fp32",), cache_form)
    whole = Range(config.max_source, config.max_source, config.max_source)
    ranges = ShapeRanges(Range(1, 2, 4), Range(built, built, built), whole, Range(1, 8, 32))
    options = SearchOptions(max_length=16, beam=beam)
    with session_over(put_engines(bundle, ranges)) as session, TorchSession(model) as reference:
        assert not session.prefills
        expected = [best.tokens for best, *_ in generate(reference, sources, options, prompts=prompts)]
        assert len(set(expected)) > 2
        assert [best.tokens for best, *_ in generate(session, sources, options, prompts=prompts)] == expected
        fed = dict(translate_many(session, sources, options, batch=2, prompts=prompts))
        assert [fed[row][0].tokens for row in range(len(sources))] == expected
