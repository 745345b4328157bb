"""Audio in, transcript out: what a loaded model does with audio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError, UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.images import command_for
from seq2engine.model.speech import check_speech, read_speech
from seq2engine.model.tokenizers.base import Coder

from ..session import Session
from .audio import AudioInput, audio_from
from .features import RATE
from .options import TranscribeOptions
from .transcribe import BATCH, transcripts_of
from .transcript import Transcript

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import TranscribeFields


class Transcriber:
    """A loaded model of speech. A `Translator` is one: what it takes is in its bundle."""

    bundle: Bundle
    session: Session
    tokenizer: Coder

    def transcribe(
        self,
        audio: AudioInput,
        options: TranscribeOptions | None = None,
        *,
        rate: int = RATE,
        progress: Progress = silent,
        **fields: Unpack[TranscribeFields],
    ) -> Transcript:
        """The transcript of an audio file, or of samples [N] or [N, channels] at a rate.

        Options are fields of `TranscribeOptions` by name, such as `language="en"`, or all of them as `options`. Audio
        that cannot be read raises a RequestError.
        """
        (found,) = self.transcribe_iter([audio], options, rate=rate, progress=progress, **fields)
        if found.error is not None:
            raise RequestError(found.error)
        return found

    def transcribe_iter(
        self,
        audios: Iterable[AudioInput],
        options: TranscribeOptions | None = None,
        *,
        rate: int = RATE,
        batch: int = BATCH,
        progress: Progress = silent,
        **fields: Unpack[TranscribeFields],
    ) -> Iterator[Transcript]:
        """The transcripts of several audios, in their order, decoded together; one that cannot be read has an error."""
        if options is not None and fields:
            raise UsageError(f"options together with {', '.join(fields)}, expected either all options or fields")
        asked = options or TranscribeOptions(**fields)
        if self.session.config.takes_images:
            raise RequestError(f"this model takes images; {command_for(self.session.config, self.bundle.root)}")
        opened = [audio_from(audio, rate) for audio in audios]
        speech = read_speech(self.bundle.root)
        check_speech(speech, self.bundle.config, self.bundle.root)
        return transcripts_of(self.session, self.tokenizer, speech, opened, asked, batch, progress)
