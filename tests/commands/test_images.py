"""A bundle that takes images: what only they have, and what is refused (test_features.py has what audio has, too)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.trocr_models import image_config

from seq2engine import exporting
from seq2engine.benchmarks.peers.hugging_face_from_model import hugging_face_from_model
from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.checkpoint import random_model
from seq2engine.packaging.model_card import usage_text
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import random_sources, sources_of
from seq2engine.runtime.translator import load

CONFIG = image_config()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("images")
    return exporting.onnx_from_model(random_model(CONFIG, 4), folder / "bundle", ("fp32", "fp16", "w8a8"))


def test_audio_is_refused(bundle: Bundle) -> None:
    with load(bundle) as model, pytest.raises(RequestError, match=r"takes images; use: seq2engine read .* line.png"):
        model.transcribe("talk.wav")


def test_peers_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the peers cannot run this model: it takes images"):
        hugging_face_from_model(random_model(CONFIG, 4), tmp_path)


def test_its_model_card_shows_how_to_read(bundle: Bundle) -> None:
    shown = usage_text(bundle, "me/lines")
    assert "It takes images." in shown
    assert "seq2engine read hf:me/lines line.png" in shown
    assert 'model.read("line.png")' in shown


def test_texts_are_refused_as_sources(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="texts were given, but this model takes images; leave them out"):
        sources_of(bundle, ["hello"], 1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        ([3, 4, 5], "source 0 is a list, expected features .channels, height, width.: this model takes images"),
        (np.zeros((3, 4), np.float32), "source 0 is an array .3, 4., expected features"),
        (np.zeros((3, 8, 8), np.float32), "source 0 is features of .3, 8, 8., expected .3, 32, 48.: resize the image"),
        (np.full((3, 32, 48), np.nan, np.float32), "has features that are not finite numbers"),
    ],
)
def test_sources_that_are_no_pixels_are_refused(wrong, bundle: Bundle) -> None:
    source, message = wrong
    with open_session(bundle) as session, pytest.raises(RequestError, match=message):
        generate(session, [source], SearchOptions(max_length=4))


def test_rules_on_tokens_of_the_source_are_refused(bundle: Bundle) -> None:
    options = SearchOptions(max_length=4, source_no_repeat_ngram=2)
    with open_session(bundle) as session, pytest.raises(RequestError, match="sources of images have no tokens"):
        generate(session, random_sources(CONFIG, 1), options)
