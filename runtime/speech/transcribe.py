"""Many audios at once: the next window of each is decoded together with those of the others.

audio 0  w w w w       a row of the batch is one audio; its windows follow each other, since each begins where the
audio 1  w w           one before ends. An audio that is done gives its row to the next one.
audio 2  w w w
audio 3      w w
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.model.speech import SpeechConfig
from seq2engine.model.tokenizers.base import Coder

from ..session import Session
from .audio import Audio, speech_from
from .decoding import WindowDecoder
from .features import FRAMES_PER_SECOND, HOP
from .options import TranscribeOptions, check_model
from .transcript import Transcript
from .windows import Listener

STAGE = "transcribe"
BATCH = 8  # audios decoded together: a window is 1500 positions, so that more hardly fill a CPU better


@dataclass
class _Row:
    number: int
    listener: Listener


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
    """What stays the same from audio to audio."""

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
        self.finished = 0

    def transcripts(self, most: int) -> Iterator[tuple[int, Transcript]]:
        """Number and transcript of every audio, in the order in which they are done."""
        waiting = iter(enumerate(self.audios))
        rows: list[_Row] = []
        while True:
            self.report(rows)
            for number, opened in self.opened(waiting, most - len(rows)):
                if isinstance(opened, Transcript):
                    self.finished += 1
                    yield number, opened
                else:
                    rows.append(_Row(number, opened))
            if not rows:
                break
            for row in self.advanced(rows):
                self.finished += 1
                yield row.number, row.listener.transcript()
                rows.remove(row)
        self.progress(STAGE, 1.0)

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

    def advanced(self, rows: Sequence[_Row]) -> list[_Row]:
        """One window of every row; those rows that have no more."""
        windows = [(row, row.listener.window()) for row in rows]
        going = [(row, window) for row, window in windows if window is not None]
        if going:
            outputs = self.decoder.decode([window for _, window in going])
            for (row, window), output in zip(going, outputs, strict=True):
                row.listener.take(window, output)
        return [row for row, window in windows if window is None]

    def report(self, rows: Sequence[_Row]) -> None:
        """How much of all audios is done; the end is reported once."""
        heard = self.finished + sum(row.listener.fraction for row in rows)
        seconds = sum(row.listener.place for row in rows) / FRAMES_PER_SECOND
        if heard < len(self.audios):
            self.progress(STAGE, heard / len(self.audios), f"{seconds:.0f} s of audio done" if rows else "")
