"""speech.json: written and read back, and every way in which it can be wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.model.presets import PRESETS
from seq2engine.model.speech import SPEECH, SpeechConfig, check_speech, read_speech
from seq2engine.model.whisper_tokens import layout_of, speech_from_layout

LAYOUT = layout_of(51865)
assert LAYOUT is not None
SPEECH_OF_TINY = speech_from_layout(LAYOUT, ((2, 2), (3, 0)))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / SPEECH).write_text(SPEECH_OF_TINY.to_json())
    assert read_speech(tmp_path) == SPEECH_OF_TINY


def test_prompts() -> None:
    assert SPEECH_OF_TINY.prompt("fr", "translate") == [50265, 50358, 50363]
    assert SPEECH_OF_TINY.prompt("fr", timestamps=True) == [50265, 50359]
    assert dataclasses.replace(SPEECH_OF_TINY, languages={"fr": 9}).prompt() == [9, 50359, 50363]
    with pytest.raises(RequestError, match="language 'xx', expected one of en, zh"):
        SPEECH_OF_TINY.prompt("xx")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"has no speech.json, so it takes no audio; give text to: seq2engine run"),
        ("{", "not JSON"),
        ("[]", "expected an object"),
        (json.dumps({"translate": 1, "other": 2}), "unknown field other; missing field transcribe"),
        (json.dumps({**json.loads(SPEECH_OF_TINY.to_json()), "languages": 7}), "cannot be used"),
    ],
)
def test_a_wrong_file_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / SPEECH).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_speech(tmp_path)


def test_a_model_of_one_language_has_none_in_its_prompt() -> None:
    speech = SpeechConfig(transcribe=1, translate=2, start_of_previous=3, no_speech=4, no_timestamps=5)
    assert not speech.multilingual
    assert (speech.prompt("fr"), speech.prompt(timestamps=True)) == ([5], [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"no_speech": 51865}, "no_speech is token 51865, the vocabulary has 51865"),
        ({"languages": {"en": -1}}, "language 'en' is token -1"),
        ({"suppressed": (7, 60000)}, "suppressed 60000 is token 60000"),
        ({"alignment_heads": ((4, 0),)}, "alignment head 4, 0: the decoder has 4 layers of 6 heads"),
        ({"suppressed": tuple(range(51865, 51875))}, "and 5 more; import the checkpoint again"),
    ],
)
def test_tokens_and_heads_that_the_model_does_not_have_are_refused(changed: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(PRESETS["whisper-tiny.en"], target_vocab=51865)
    check_speech(SPEECH_OF_TINY, config, Path("bundle"))
    with pytest.raises(CheckpointError, match=message):
        check_speech(dataclasses.replace(SPEECH_OF_TINY, **changed), config, Path("bundle"))
