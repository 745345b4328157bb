"""The settings of a speech model beyond search options: its special tokens and alignment heads.

It is speech.json of a checkpoint or a bundle. Start and end tokens, mel bands and positions are in the model's config.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object, typed_from_json
from seq2engine.errors import CheckpointError, RequestError

from .config import ModelConfig

SPEECH = "speech.json"  # inside a checkpoint and inside a bundle
SINGLE_TOKENS = ("transcribe", "translate", "start_of_previous", "no_speech", "no_timestamps")
SECONDS_PER_TIMESTAMP = 0.02  # one position of the encoder, and the step between two timestamp tokens


@dataclass(frozen=True)
class SpeechConfig:
    """Token ids of a Whisper model, and which heads show where in the audio a token is.

    A prompt is `start_of_previous`, previous text, then the start token, a language and a task (in models with several
    languages) and `no_timestamps`, if no timestamps are wanted. `suppressed` tokens are never emitted,
    `first_suppressed` not as first token after the prompt.
    """

    transcribe: int
    translate: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    languages: dict[str, int] = field(default_factory=dict)  # by code, such as en; empty: one language only
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    latest_first_timestamp: int | None = 50  # steps of 0.02 s that the first timestamp may be at most; None: any
    alignment_heads: tuple[tuple[int, int], ...] = ()  # (decoder layer, head)

    @property
    def first_timestamp(self) -> int:
        """The token of 0.00 s; all tokens from there on are timestamps."""
        return self.no_timestamps + 1

    @property
    def multilingual(self) -> bool:
        return bool(self.languages)

    def prompt(self, language: str | None = None, task: str = "transcribe", timestamps: bool = False) -> list[int]:
        """The tokens after the start token: language and task, where the model has them, and `no_timestamps`."""
        asked = []
        if self.languages:
            code = language or next(code for code in ("en", *self.languages) if code in self.languages)
            if code not in self.languages:
                raise RequestError(f"language {code!r}, expected one of {', '.join(self.languages)}")
            asked = [self.languages[code], self.translate if task == "translate" else self.transcribe]
        return asked if timestamps else [*asked, self.no_timestamps]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def speech_from_dict(values: dict[str, Any], where: str = SPEECH) -> SpeechConfig:
    """From parsed JSON; unknown and missing names are errors, listed together."""
    try:
        return typed_from_json(SpeechConfig, values)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be used ({error}); import the checkpoint again") from error


def read_speech(root: Path) -> SpeechConfig:
    """The speech.json of a checkpoint or bundle folder."""
    path = root / SPEECH
    if not path.is_file():
        raise CheckpointError(f"{root} has no {SPEECH}, so it takes no audio; give text to: seq2engine run {root}")
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); import the checkpoint again") from error
    return speech_from_dict(values, str(path))


def check_speech(speech: SpeechConfig, config: ModelConfig, where: Path) -> None:
    """Refuses token ids that the model's vocabulary does not have, and heads that its decoder does not have."""
    tokens = {
        **{name: getattr(speech, name) for name in SINGLE_TOKENS},
        **{f"language {code!r}": token for code, token in speech.languages.items()},
        **{f"suppressed {token}": token for token in (*speech.suppressed, *speech.first_suppressed)},
    }
    problems = [
        f"{name} is token {token}, the vocabulary has {config.target_vocab}"
        for name, token in tokens.items()
        if not 0 <= token < config.target_vocab
    ]
    problems += [
        f"alignment head {layer}, {head}: the decoder has {config.decoder_layers} layers of {config.heads} heads"
        for layer, head in speech.alignment_heads
        if not (0 <= layer < config.decoder_layers and 0 <= head < config.heads)
    ]
    if problems:
        named = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{where / SPEECH}: {named}; import the checkpoint again")
