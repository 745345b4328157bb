"""Long audio as windows of 30 s: each begins where the last complete segment of the one before ends.

audio    |----------------------------------------------------------------|
window 1 |<0.00> a b c <4.20><4.20> d e f <27.60><27.60> g h|               the last segment is cut off:
window 2                                          |<0.00> g h i ...         it is decoded again, as a whole
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from seq2engine.model.config import FRAMES
from seq2engine.model.speech import SECONDS_PER_TIMESTAMP

from .audio import Speech
from .decoding import Window, WindowDecoder, WindowOutput
from .features import FRAMES_PER_SECOND
from .transcript import Segment, Transcript
from .words import words_of_segments

HOT = 0.5  # what was drawn at a higher temperature is not continued


@dataclass(frozen=True)
class Cut:
    """A piece of a window's tokens, with its start and end in timestamps after the window's first frame."""

    start: float
    end: float
    tokens: tuple[int, ...]


def cuts_of(tokens: Sequence[int], first_timestamp: int, frames: int) -> tuple[list[Cut], int, bool]:
    """Tokens of a window of this many frames -> its pieces, frames to the next window, and whether all was decoded.

    Two timestamps in a row end a piece. What follows the last pair is dropped, because the window may have cut it off,
    unless one timestamp alone ends the output: then there is no speech in the rest of the window.
    """
    times = [token - first_timestamp for token in tokens]  # negative for text
    pairs = [place for place in range(1, len(times)) if times[place - 1] >= 0 and times[place] >= 0]
    alone = len(times) > 1 and times[-1] >= 0 > times[-2]
    if not pairs:
        last = next((time for time in reversed(times) if time >= 0), 0)
        return [Cut(0, last or frames / FRAMES, tuple(tokens))], frames, alone
    places = [0, *pairs, *([len(times)] if alone else [])]
    cuts = [Cut(times[begin], times[end - 1], tuple(tokens[begin:end])) for begin, end in itertools.pairwise(places)]
    return cuts, frames if alone else max(FRAMES * times[pairs[-1] - 1], FRAMES), alone


class Listener:
    """The progress of one audio: it yields windows and collects their decoded segments."""

    def __init__(self, speech: Speech, decoder: WindowDecoder, prompt: Sequence[int]):
        self.speech, self.decoder, self.options = speech, decoder, decoder.options
        self.language: str | None = decoder.options.language if decoder.speech.multilingual else None
        self.size = decoder.config.frames
        self.frames = math.ceil(speech.seconds * FRAMES_PER_SECOND) if speech.short else speech.features.frames
        self.timestamps = decoder.options.timestamps or decoder.options.words or not speech.short
        self.prompt = list(prompt)  # text that the next window continues
        self.place = 0  # frame that the next window begins with
        self.spoken = 0.0  # seconds at which the last word ended
        self.segments: list[Segment] = []

    @property
    def fraction(self) -> float:
        return min(self.place / self.frames, 1.0) if self.frames else 1.0

    def window(self) -> Window | None:
        """The next window; None at the end of the audio. Silent windows are skipped."""
        while self.place < self.frames:
            features = self.speech.features.window(self.place, self.size)
            if not self.speech.features.silent():
                previous = tuple(self.prompt)
                window = Window(features, self.place, self.language, self.timestamps, previous)
                return self.with_detected_language(window)
            self.place += self.window_frames
        return None

    def with_detected_language(self, window: Window) -> Window:
        if self.language is None and self.decoder.speech.multilingual:
            self.language, _ = self.decoder.language_of(window)
        return window if window.language == self.language else replace(window, language=self.language)

    @property
    def window_frames(self) -> int:
        """Frames of the next window that are not after the end of the features."""
        return min(self.size, self.speech.features.frames - self.place)

    def take(self, window: Window, output: WindowOutput) -> list[Segment]:
        """Adds the segments of a decoded window and sets the start of the next one."""
        frames = self.window_frames
        if output.is_silence(self.options):
            self.place += frames
            return []
        cuts, advance, alone = [Cut(0, frames / FRAMES, output.tokens)], frames, True
        if window.timestamps:
            cuts, advance, alone = cuts_of(output.tokens, self.decoder.speech.first_timestamp, frames)
        segments = [self.segment(cut, output) for cut in cuts]
        next_place = self.place + advance
        if self.options.words:
            segments, self.spoken = words_of_segments(self.decoder, window, segments, frames, self.spoken)
            ends = [segment.words[-1].end for segment in segments if segment.words]
            if not alone and ends and ends[-1] > self.place / FRAMES_PER_SECOND:
                next_place = round(ends[-1] * FRAMES_PER_SECOND)
        self.place = max(next_place, self.place + FRAMES)
        segments = [one for one in segments if one.text.strip() and one.end > one.start]
        self.segments += segments
        if not self.options.previous_text or output.temperature > HOT:
            self.prompt.clear()
        else:
            self.prompt += [token for segment in segments for token in segment.tokens]
            del self.prompt[: -self.decoder.room]  # the prompt never uses more
        return segments

    def segment(self, cut: Cut, output: WindowOutput) -> Segment:
        offset = self.place / FRAMES_PER_SECOND
        start, end = (offset + time * SECONDS_PER_TIMESTAMP for time in (cut.start, cut.end))
        return Segment(
            start=round(min(start, self.speech.seconds), 2),
            end=round(min(end, self.speech.seconds), 2),
            text=self.decoder.text(cut.tokens),
            tokens=cut.tokens,
            log_prob=output.log_prob,
            no_speech=output.no_speech,
            compression_ratio=output.compression_ratio,
            temperature=output.temperature,
        )

    def transcript(self) -> Transcript:
        return Transcript(self.speech.name, self.speech.seconds, self.language, tuple(self.segments))
