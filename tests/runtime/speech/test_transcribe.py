"""Whole transcriptions are those of Hugging Face's `generate`: greedy and beam search, with and without timestamps,
short audio and long, with and without the text of before; and what comes out does not depend on other files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fast_cases import rest_slow
from support.rounding import rounding_from_config
from support.speech_models import (
    ENGLISH,
    GERMAN,
    START,
    WINDOW,
    SpeechModel,
    library_segments,
    sound,
    speech_model,
    text_of,
)

from seq2engine.errors import CheckpointError, RequestError, UsageError
from seq2engine.model.speech import read_speech
from seq2engine.runtime.speech.audio import audio_from, speech_from
from seq2engine.runtime.speech.decoding import Window, WindowDecoder, WindowOutput
from seq2engine.runtime.speech.features import HOP, RATE, log_mel
from seq2engine.runtime.speech.options import TranscribeOptions
from seq2engine.runtime.speech.window_batches import WindowBatches
from seq2engine.runtime.translator import Translator, load

PLAIN: dict[str, Any] = {  # the library's defaults
    "temperatures": (0.0,),
    "no_speech": None,
    "max_length": 40,
    "previous_text": False,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return speech_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    """A model of two languages."""
    return speech_model(tmp_path_factory.mktemp("languages"), seed=5, multilingual=True, timed=False)


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return speech_model(tmp_path_factory.mktemp("untimed"), timed=False)


@pytest.fixture(scope="module")
def model(small: SpeechModel) -> Iterator[Translator]:
    with load(small.bundle, threads=1, attention=True) as opened:
        yield opened


def decoded(decoder: WindowDecoder, window: Window) -> WindowOutput:
    batches = WindowBatches(decoder)
    batches.add(0, window)
    while not (found := batches.step()):
        pass
    ((_, _, output),) = found
    assert isinstance(output, WindowOutput)
    return output


def assert_same(model: Translator, theirs: Any, wave: np.ndarray, ours: dict[str, Any], **library: Any) -> None:
    """Segments without text, and those behind the end of the audio, are none of ours."""
    found = model.transcribe(wave, **{**PLAIN, **ours})
    every = library_segments(theirs, wave, **library)
    expected = [one for one in every if one[0] < found.seconds and model.tokenizer.decode_target(one[2]).strip()]
    assert [text_of(one.tokens) for one in found.segments] == [tokens for _, _, tokens in expected]
    times = [(round(start, 2), round(min(end, found.seconds), 2)) for start, end, _ in expected]
    assert [(one.start, one.end) for one in found.segments] == times


@pytest.mark.parametrize("beam", rest_slow([1, 5], [1]))
def test_short_audio_is_the_library_s(untimed, beam):
    with load(untimed.bundle, threads=1) as model:
        for seed in range(4):
            wave = sound(WINDOW, seed)
            assert_same(model, untimed.theirs, wave, {"beam": beam}, num_beams=beam, return_timestamps=False)


@pytest.mark.parametrize("beam", rest_slow([1, 5], [5]))
def test_short_audio_with_timestamps_is_the_library_s(small, model, beam):
    for seed in range(3):
        asked = {"beam": beam, "timestamps": True}
        assert_same(model, small.theirs, sound(WINDOW, seed), asked, num_beams=beam, return_timestamps=True)


@pytest.mark.each_value
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("beam", [1, 5])
def test_long_audio_is_the_library_s(small, model, beam, previous):
    for seed in range(2):
        wave = sound(3 * WINDOW + 1234, seed)
        assert_same(
            model,
            small.theirs,
            wave,
            {"beam": beam, "previous_text": previous},
            num_beams=beam,
            return_timestamps=True,
            condition_on_prev_tokens=previous,
        )


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_languages_and_tasks_are_the_library_s(several, task):
    detected = set()
    with load(several.bundle, threads=1) as model:
        for seed in range(4):
            wave = sound(WINDOW, seed)
            assert_same(model, several.theirs, wave, {"task": task}, task=task, return_timestamps=False)
            assert_same(model, several.theirs, wave, {"language": "de"}, language="de", return_timestamps=False)
            features = torch.from_numpy(log_mel(wave, 80))[None]
            expected = int(several.theirs.detect_language(features, num_segment_frames=features.shape[2])[0])
            found = model.transcribe(wave, **PLAIN).language
            assert {"en": ENGLISH, "de": GERMAN}[found or ""] == expected
            detected.add(found)
    assert detected == {"en", "de"}  # else this shows little


def test_a_prompt_is_the_library_s(untimed):
    speech = read_speech(untimed.bundle.root)
    with load(untimed.bundle, threads=1) as model:
        ids = torch.tensor([speech.start_of_previous, *model.tokenizer.encode_target(" hey")[:-1]])
        for seed in range(3):
            asked = {"prompt": "hey "}
            assert_same(model, untimed.theirs, sound(WINDOW, seed), asked, prompt_ids=ids, return_timestamps=False)


def test_a_prompt_is_read_in_one_call(several, monkeypatch):
    """Language, task and all but the last token; what the model makes of the start token is read there, too."""
    with load(several.bundle, threads=1) as model:
        calls = []
        for name in ("prefill", "step"):
            own = getattr(model.session, name)
            monkeypatch.setattr(
                model.session,
                name,
                lambda state, tokens, *rest, own=own, name=name: [
                    calls.append((name, tokens.shape)),
                    own(state, tokens, *rest),
                ][1],
            )
        found = model.transcribe(sound(WINDOW), language="de", **PLAIN)
    (segment,) = found.segments
    assert calls[0] == ("prefill", (1, 3))
    assert calls[1:] in ([("step", (1, 1))] * len(segment.tokens), [("step", (1, 1))] * (len(segment.tokens) + 1))
    assert 0 < segment.no_speech < 1


def test_several_files_have_the_transcripts_of_each_alone(model):
    waves = [sound(size, seed) for seed, size in enumerate((2 * WINDOW, 900, 3 * WINDOW + 77, WINDOW, WINDOW + 1, 0))]
    options = TranscribeOptions(**PLAIN, beam=2)
    alone = [model.transcribe(wave, options) for wave in waves]
    for batch in (2, 8):
        together = [*model.transcribe_iter(waves, options, batch=batch)]
        for one, other in zip(alone, together, strict=True):
            assert [segment.tokens for segment in one.segments] == [segment.tokens for segment in other.segments]
            assert (one.text, one.seconds) == (other.text, other.seconds)


def test_samples_are_the_same_in_any_batch_and_every_time(model):
    waves = [sound(2 * WINDOW, seed) for seed in range(3)]
    options = TranscribeOptions(temperatures=(0.8,), best_of=3, no_speech=None)
    first = [one.text for one in model.transcribe_iter(waves, options)]
    assert first == [model.transcribe(wave, options).text for wave in waves]
    other = dataclasses.replace(options, seed=1)
    assert first != [one.text for one in model.transcribe_iter(waves, other)]


def test_an_output_that_fails_is_decoded_at_the_next_temperature(model):
    wave = sound(WINDOW, 1)
    usual = model.transcribe(wave, no_speech=None, log_prob=None, compression_ratio=None)
    assert {one.temperature for one in usual.segments} == {0.0}
    for fails in ({"log_prob": 0.0}, {"compression_ratio": 0.0, "log_prob": None}):
        last = model.transcribe(wave, no_speech=None, temperatures=(0.0, 0.2, 0.7), **fails)
        assert {one.temperature for one in last.segments} == {0.7}


def test_a_window_is_silent_if_it_is_unlikely_and_has_no_speech(model):
    wave = sound(3 * WINDOW, 1)
    assert model.transcribe(wave, no_speech=0.0, log_prob=0.0).segments == ()
    assert model.transcribe(wave, no_speech=0.0, log_prob=-1e9, temperatures=(0.0,)).segments
    assert model.transcribe(wave, no_speech=1.0, log_prob=0.0, temperatures=(0.0,)).segments


def test_the_probability_of_no_speech_is_the_model_s(small, model):
    wave = sound(WINDOW, 2)
    speech = read_speech(small.bundle.root)
    decoder = WindowDecoder(model.session, model.tokenizer, speech, TranscribeOptions(**PLAIN))
    features = log_mel(wave, 80)
    with torch.inference_mode():
        logits = small.theirs(torch.from_numpy(features)[None], decoder_input_ids=torch.tensor([[START]])).logits[0, 0]
    expected = float(logits.double().log_softmax(-1)[speech.no_speech])
    close = rounding_from_config(model.session.config, float(logits.abs().max())).log_prob
    for timestamps in (False, True):
        for previous in ((), tuple(range(7))):
            found = decoded(decoder, Window(features, 0, None, timestamps, previous))
            same = math.log(found.no_speech) == pytest.approx(expected, rel=0, abs=close)
            assert same == (not previous)


def test_mean_log_probability_is_the_library_s(small, model):
    for beam in (1, 3):
        wave = sound(WINDOW, 3)
        features = torch.from_numpy(log_mel(wave, 80))[None]
        theirs = small.theirs.generate(
            features,
            num_beams=beam,
            return_timestamps=True,
            return_segments=True,
            return_dict_in_generate=True,
            output_scores=True,
            temperature=0.0,
            logprob_threshold=-1e9,
        )
        result = theirs["segments"][0][0]["result"]
        prompt = 1
        tokens = result["sequences"][prompt:]
        scores = result["scores"]
        mean = float(small.theirs._retrieve_avg_logprobs(scores, tokens[: len(scores)], 0.0))
        found = model.transcribe(wave, beam=beam, timestamps=True, **PLAIN)
        logits = torch.stack([torch.as_tensor(step) for step in scores])
        largest = float(logits[logits.isfinite()].abs().max())
        close = rounding_from_config(model.session.config, largest).log_prob
        assert found.segments[0].log_prob == pytest.approx(mean, rel=0, abs=close)


def test_hours_of_silence_are_quick_and_hold_little(model, monkeypatch):
    """Digital silence is never encoded."""
    monkeypatch.setattr(type(model.session), "encode", None)
    hours = np.broadcast_to(np.float32(0.0), (3 * 3600 * RATE,))  # takes no memory itself
    found = model.transcribe(hours)
    assert (found.text, found.seconds) == ("", 3 * 3600.0)


def test_silence_within_speech_is_left_out(model):
    quiet = np.zeros(20 * WINDOW, dtype=np.float32)
    found = model.transcribe(np.concatenate([sound(WINDOW, 1), quiet, sound(WINDOW, 2)]), **PLAIN)
    starts = [segment.start for segment in found.segments]
    assert starts[0] < 1.0
    assert starts[-1] > 20 * WINDOW / RATE - 1.0


def test_progress_reaches_the_end_once(model):
    seen: list[float] = []
    waves = [sound(3 * WINDOW, seed) for seed in range(3)]
    list(model.transcribe_iter(waves, progress=lambda stage, fraction, detail="": seen.append(fraction), **PLAIN))
    assert seen == sorted(seen)
    assert [fraction for fraction in seen if fraction >= 1] == [1.0]


def test_only_a_little_more_than_a_window_is_held():
    wave = sound(40 * WINDOW)
    pieces = range(0, len(wave), 1600)
    speech = speech_from(
        dataclasses.replace(audio_from(wave), blocks=lambda: (wave[first : first + 1600] for first in pieces)),
        80,
        WINDOW,
    )
    for first in range(0, speech.features.frames, 31):
        speech.features.window(first, WINDOW // HOP)
        assert len(speech.features.held) <= WINDOW // HOP + 11


def test_what_cannot_be_read_is_an_error_of_its_own(model, tmp_path):
    (tmp_path / "text.wav").write_text("no audio")
    sources = [tmp_path / "missing.wav", sound(WINDOW, 1), tmp_path / "text.wav", np.full(5, np.nan), sound(WINDOW, 2)]
    found = [*model.transcribe_iter(sources, **PLAIN)]
    assert [one.error is None for one in found] == [False, True, False, False, True]
    assert [bool(one.text) for one in found] == [False, True, False, False, True]
    with pytest.raises(RequestError, match="No such file"):
        model.transcribe(tmp_path / "missing.wav")


@pytest.mark.parametrize("samples", [0, 1, 100, 200, 201])
def test_hardly_any_audio(model, samples):
    assert model.transcribe(sound(samples), **PLAIN).seconds == samples / RATE
    assert model.transcribe(np.zeros(samples, dtype=np.float32)).text == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "sing"}, "task 'sing', expected transcribe or translate"),
        ({"beam": 0}, "beam 0, expected at least 1"),
        ({"best_of": 0}, "best of 0"),
        ({"temperatures": ()}, "temperatures empty"),
        ({"temperatures": (-1.0,)}, "temperatures -1.0"),
        ({"log_prob": float("nan")}, "log prob nan"),
        ({"length_penalty": float("inf")}, "length penalty inf"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_options_that_cannot_work(fields, words):
    with pytest.raises(UsageError, match=words):
        TranscribeOptions(**fields)


def test_options_that_a_model_cannot_do(model, several):
    with pytest.raises(RequestError, match="knows English only"):
        model.transcribe(sound(WINDOW), language="de")
    with pytest.raises(RequestError, match="knows English only"):
        model.transcribe(sound(WINDOW), task="translate")
    with pytest.raises(UsageError, match="either all options or fields"):
        model.transcribe(sound(WINDOW), TranscribeOptions(), beam=2)
    with pytest.raises(RequestError, match="batch 0"):
        list(model.transcribe_iter([sound(WINDOW)], batch=0))
    with load(several.bundle, threads=1) as other:
        with pytest.raises(RequestError, match="language 'fr', expected one of de, en"):
            other.transcribe(sound(WINDOW), language="fr")
        with pytest.raises(RequestError, match="attention=True"):
            other.transcribe(sound(WINDOW), words=True, language="en", **PLAIN)


def test_a_model_of_text_takes_no_audio(tmp_path):
    from support.text_bundle import text_bundle

    with load(text_bundle(tmp_path), threads=1) as model, pytest.raises(CheckpointError, match="takes no audio"):
        model.transcribe(sound(WINDOW))
