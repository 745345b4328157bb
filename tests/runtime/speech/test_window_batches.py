"""Several audios at once: each has the transcript that it has alone, and its windows wait for no other audio."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.speech_models import WINDOW, SpeechModel, sound, speech_model

from seq2engine.errors import RequestError
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.speech.transcript import Transcript
from seq2engine.runtime.translator import Translator, load

PLAIN: dict[str, Any] = {
    **{"temperatures": (0.0,), "no_speech": None, "log_prob": None, "compression_ratio": None},
    "max_length": 38,  # so that some windows end by themselves
}
SIZES = (2 * WINDOW, 900, WINDOW + 77, 3 * WINDOW, 0, WINDOW)  # samples
WAVES = [sound(size, seed) for seed, size in enumerate(SIZES)]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"previous_text": False},
    "previous text": {"previous_text": True},
    "initial prompt": {"prompt": "hey you", "beam": 2},
    "words": {"words": True, "previous_text": True},
    "beam": {"beam": 3, "timestamps": True},
    # By their mean log-probability some windows pass at each temperature; none is silence.
    "fallback": {"temperatures": (0.0, 0.3, 1.0), "log_prob": -0.7, "best_of": 3},
    "fallback as wide as the beam": {"temperatures": (0.0, 0.3), "log_prob": -0.7, "best_of": 2, "beam": 2},
    "silence": {"temperatures": (0.0, 0.8), "log_prob": -0.7, "no_speech": 0.0},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return speech_model(tmp_path_factory.mktemp("speech"), seed=3, ending=4.0)  # outputs of many lengths


@pytest.fixture(scope="module")
def models(small: SpeechModel) -> Iterator[dict[str, Translator]]:
    with (
        load(small.bundle, threads=1, attention=True) as usual,
        load(small.bundle, "torch", threads=1) as reference,
        load(small.bundle, threads=1, deterministic=True) as deterministic,
    ):
        yield {"onnxruntime": usual, "torch": reference, "deterministic": deterministic}


@pytest.fixture
def usual(models: dict[str, Translator]) -> Translator:
    return models["onnxruntime"]


def parts(found: Transcript) -> list[Any]:
    """All of it that rounding cannot change."""
    words = [[(word.text, word.start, word.end) for word in one.words] for one in found.segments]
    return [found.seconds, [(one.start, one.end, one.tokens, one.temperature) for one in found.segments], words]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("onnxruntime", kind) for kind in OPTIONS),
        *((backend, kind) for backend in ("torch", "deterministic") for kind in ("previous text", "fallback")),
    ],
)
def test_every_audio_has_the_transcript_of_it_alone(models, backend, kind):
    model, asked = models[backend], {**PLAIN, **OPTIONS[kind]}
    alone = [parts(model.transcribe(wave, **asked)) for wave in WAVES]
    for batch in (3, 8):
        together = [parts(one) for one in model.transcribe_iter(WAVES, batch=batch, **asked)]
        assert together == alone
    temperatures = {one[3] for found in alone for one in found[1]}
    if kind == "fallback":
        assert len(temperatures) > 1, "else this shows little"
    if kind == "words":
        assert any(found[2] for found in alone)


def calls(model: Translator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Of a session, as they come: what was called, and the shape of its tokens or features."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, place in (("encode", 0), ("prefill", 1), ("step", 1)):
        own = getattr(model.session, name)

        def call(*given: Any, own: Any = own, name: str = name, place: int = place) -> Any:
            seen.append((name, given[place].shape))
            return own(*given)

        monkeypatch.setattr(model.session, name, call)
    return seen


def steps_of_windows(seen: list[tuple[str, tuple[int, ...]]]) -> list[int]:
    """Of one audio, each of whose windows is encoded and then decoded once."""
    places = [*(place for place, (name, _) in enumerate(seen) if name == "encode"), len(seen)]
    return [sum(name == "step" for name, _ in seen[first:last]) for first, last in itertools.pairwise(places)]


@pytest.mark.parametrize("previous", [False, True])
def test_a_window_waits_for_no_other_audio(usual, monkeypatch, previous):
    """Where all audios have a row, the longest of them is all that there is to wait for; in rounds, it is the longest
    window of each round."""
    seen = calls(usual, monkeypatch)
    asked, waves = {**PLAIN, "previous_text": previous}, [sound(2 * WINDOW, seed) for seed in range(4)]
    alone = []
    for wave in waves:
        seen.clear()
        usual.transcribe(wave, **asked)
        alone.append(steps_of_windows(seen))
    seen.clear()
    list(usual.transcribe_iter(waves, **asked))
    steps = sum(name == "step" for name, _ in seen)
    rounds = max(map(len, alone))
    in_rounds = sum(max((one[i] for one in alone if i < len(one)), default=0) for i in range(rounds))
    assert steps == max(map(sum, alone)) < in_rounds
    assert sum(name == "encode" for name, _ in seen) <= sum(map(len, alone))


def test_a_prompt_is_read_for_its_own_row_alone(usual, monkeypatch):
    """Those that began together are read together; later ones do not have the others computed again."""
    seen = calls(usual, monkeypatch)
    list(usual.transcribe_iter(WAVES, batch=len(WAVES), previous_text=True, prompt="hey you", **PLAIN))
    first, *later = [shape for name, shape in seen if name == "prefill"]
    assert first[0] == sum(size > 0 for size in SIZES)
    alone = [shape for shape in later if shape[0] == 1]
    assert len(alone) > len(later) / 2


def test_where_prompts_are_read_by_steps_long_ones_begin_together(small, monkeypatch):
    """Else all rows of a batch would wait for every prompt."""
    for own in (True, False):
        with load(small.bundle, threads=1) as model:
            model.session.prefills = model.session.prefills_rows = False
            seen = calls(model, monkeypatch)
            waves = [sound(2 * WINDOW, seed) for seed in range(4)]
            list(model.transcribe_iter(waves, **{**PLAIN, "previous_text": own}))
            several = [shape[0] for name, shape in seen if name == "encode"]
            assert several[0] == 4
            assert (several[1] == 4) == own  # without the text of before, a window begins as soon as it can


def test_a_window_that_is_no_number_is_an_error_of_its_audio(usual, monkeypatch):
    """The audios that began with it are decoded all the same."""
    alone = [parts(usual.transcribe(wave, **PLAIN)) for wave in WAVES]
    own = usual.session.step

    def step(state: Any, tokens: np.ndarray, position: np.ndarray, *rest: Any) -> StepOutput:
        output = own(state, tokens, position, *rest)
        if len(tokens) > 2 and not bad:
            bad.append(position)
            output.logits[2] = np.nan
            return StepOutput(output.logits)
        return output

    bad: list[np.ndarray] = []
    monkeypatch.setattr(usual.session, "step", step)
    found = [*usual.transcribe_iter(WAVES, **PLAIN)]
    assert "not finite" in str(found[2].error)
    others = [place for place in range(len(WAVES)) if place != 2]
    assert [parts(found[place]) for place in others] == [alone[place] for place in others]
    monkeypatch.setattr(usual.session, "step", lambda *given: StepOutput(np.full((1, 1, 200), np.nan)))
    with pytest.raises(RequestError, match="not finite"):
        usual.transcribe(WAVES[0], **PLAIN)
