"""Many audios together: the current windows of all of them are one batch.

audio 0  wwwwww wwww wwwww      windows of an audio follow each other, since each begins where the one before ends; the
audio 1  ww wwwwwww             next one begins as soon as that is known (window_batches.py).
audio 2  wwww www wwwwwww       An audio that is done gives its place to the next one.
audio 3             wwww ww
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError, Seq2EngineError
from seq2engine.model.speech import SpeechConfig
from seq2engine.model.tokenizers.base import Coder

from ..session import Session
from .audio import Audio, speech_from
from .decoding import WindowDecoder
from .features import FRAMES_PER_SECOND, HOP
from .options import TranscribeOptions, check_model
from .transcript import Transcript
from .window_batches import WindowBatches
from .windows import Listener

STAGE = "transcribe"
BATCH = 8  # audios decoded together: a window is 1500 positions, so that more hardly fill a CPU better


def transcripts_of(
    session: Session,
    tokenizer: Coder,
    speech: SpeechConfig,
    audios: Sequence[Audio],
    options: TranscribeOptions,
    batch: int = BATCH,
    progress: Progress = silent,
) -> Iterator[Transcript]:
    """The transcript of every audio, in their order, each as soon as it and all before it are done.

    Audio that cannot be read or decoded has an error in place of a transcript; the others are not affected by it.
    """
    if batch < 1:
        raise RequestError(f"batch {batch}, expected at least 1")
    check_model(options, speech)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    work = _Work(session, tokenizer, speech, options, audios, progress)
    done: dict[int, Transcript] = {}
    shown = 0
    for number, transcript in work.transcripts(most):
        done[number] = transcript
        while shown in done:
            yield done.pop(shown)
            shown += 1


class _Work:
    """What all audios have in common."""

    def __init__(
        self,
        session: Session,
        tokenizer: Coder,
        speech: SpeechConfig,
        options: TranscribeOptions,
        audios: Sequence[Audio],
        progress: Progress,
    ):
        self.decoder = WindowDecoder(session, tokenizer, speech, options)
        self.audios, self.progress = audios, progress
        self.prompt: list[int] = []
        if options.prompt is not None and options.prompt.strip():
            self.prompt = tokenizer.encode_target(f" {options.prompt.strip()}")[:-1]
        self.batches = WindowBatches(self.decoder)
        self.listeners: dict[int, Listener] = {}  # audios that are being decoded, by their numbers
        self.finished = 0

    def transcripts(self, most: int) -> Iterator[tuple[int, Transcript]]:
        """Number and transcript of every audio, in the order in which they are done."""
        waiting = iter(enumerate(self.audios))
        coming: deque[int] = deque()  # audios whose next window can begin
        while True:
            for number, opened in self.opened(waiting, most - len(self.listeners)):
                if isinstance(opened, Transcript):
                    yield self.done(number, opened)
                else:
                    self.listeners[number] = opened
                    coming.append(number)
            while coming:
                number = coming.popleft()
                if (window := self.listeners[number].window()) is not None:
                    self.batches.add(number, window)
                else:
                    yield self.done(number, self.listeners.pop(number).transcript())
            if self.finished == len(self.audios):
                break
            for number, window, output in self.batches.step():
                listener = self.listeners[number]
                if isinstance(output, Seq2EngineError):
                    yield self.done(number, Transcript(self.listeners.pop(number).speech.name, error=str(output)))
                else:
                    listener.take(window, output)
                    coming.append(number)
                    self.report()
        self.progress(STAGE, 1.0)

    def done(self, number: int, transcript: Transcript) -> tuple[int, Transcript]:
        self.finished += 1
        self.report()
        return number, transcript

    def opened(self, waiting: Iterable[tuple[int, Audio]], count: int) -> Iterator[tuple[int, Listener | Transcript]]:
        """Up to `count` audios that can be decoded, and the errors of those between them that cannot."""
        while count > 0 and (coming := next(iter(waiting), None)) is not None:
            number, audio = coming
            try:
                config = self.decoder.config
                speech = speech_from(audio, config.mels, config.frames * HOP)
            except RequestError as error:
                yield number, Transcript(audio.name, error=str(error))
                continue
            yield number, Listener(speech, self.decoder, self.prompt)
            count -= 1

    def report(self) -> None:
        """How much of all audios is done; the end is reported once."""
        going = self.listeners.values()
        done = math.fsum((self.finished, *(listener.fraction for listener in going)))  # in any order
        seconds = sum(listener.place for listener in going) / FRAMES_PER_SECOND
        if done < len(self.audios):
            self.progress(STAGE, done / len(self.audios), f"{seconds:.0f} s of audio done" if going else "")
