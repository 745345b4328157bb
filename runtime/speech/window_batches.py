"""Windows of several audios in running batches: each begins in a free row as soon as it is available.

rows    0 1 2 3
step 7  a b c d
step 8  a b C d      c is done: the next window of that audio takes its row, while the others go on
step 9  a . C d      b has failed and is drawn again, in the batch of samples; its row is dropped or goes to another

Windows that are searched and windows that are drawn have steps of another form (`BatchForm`), so they are in two
batches, which take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from seq2engine.errors import Seq2EngineError

from ..search.step_output import NotFiniteError
from ..text.running_batch import BatchForm, Decoded, RunningBatch, Source, batch_form
from .decoding import Window, WindowDecoder, WindowOutput

FEW = 4  # tokens of a prompt without previous text: start, language, task, no timestamps


@dataclass(frozen=True)
class Attempt:
    """A window at one of the temperatures. Its number is that of its audio, which has one window at a time."""

    window: Window
    place: int  # of the temperature among the options' ones
    source: Source
    form: BatchForm


class WindowBatches:
    """Decodes windows that come and go. A window whose output fails is decoded again at the next temperature."""

    def __init__(self, decoder: WindowDecoder):
        self.decoder = decoder
        self.waiting: list[Attempt] = []
        self.running: dict[int, Attempt] = {}
        self.batches: dict[BatchForm, RunningBatch] = {}

    def add(self, number: int, window: Window, place: int = 0) -> None:
        """This window begins with the next step, if it can."""
        source = self.decoder.source(number, window, self.decoder.options.temperatures[place])
        self.waiting.append(Attempt(window, place, source, batch_form(self.decoder.session, source)))

    def step(self) -> list[tuple[int, Window, WindowOutput | Seq2EngineError]]:
        """One step of all windows; those that are done, with the numbers of their audios."""
        self.admit()
        found: list[tuple[int, Window, WindowOutput | Seq2EngineError]] = []
        for form, batch in list(self.batches.items()):
            batch.shrink()
            advance = batch.step()
            for one in advance.done:
                attempt, output = self.output(batch, one)
                if output.fails(self.decoder.options) and attempt.place + 1 < len(self.decoder.options.temperatures):
                    self.add(attempt.source.number, attempt.window, attempt.place + 1)
                else:
                    found.append((attempt.source.number, attempt.window, output))
            for numbers, error in advance.failed:
                for number in numbers:  # one of them is not finite; the others, which began with it, restart
                    attempt = self.running.pop(number)
                    batch.asked.pop(number, None)
                    if isinstance(error, NotFiniteError) and error.source != number:
                        self.waiting.append(attempt)
                    else:
                        found.append((number, attempt.window, error))
            if not batch.cohorts:
                del self.batches[form]  # at once: its state may be the one that the decoder keeps
        return found

    def admit(self) -> None:
        """Gives rows to windows that wait."""
        coming: dict[BatchForm, list[Attempt]] = {}
        later = []
        for attempt in self.waiting:
            if attempt.form in self.batches and not self.may_join(attempt):
                later.append(attempt)
            else:
                coming.setdefault(attempt.form, []).append(attempt)
        self.waiting = later
        for form, attempts in coming.items():
            if form not in self.batches:
                decoder = self.decoder
                self.batches[form] = RunningBatch(decoder.session, form, decoder.room, decoder.encode)
            self.running.update({attempt.source.number: attempt for attempt in attempts})
            self.batches[form].admit([attempt.source for attempt in attempts])

    def may_join(self, attempt: Attempt) -> bool:
        """Whether its prompt is read without the others in the batch. Else all of them would wait for it, so that long
        prompts begin together, once the batch is empty."""
        session = self.decoder.session
        assert attempt.source.prompt is not None
        return len(attempt.source.prompt) <= FEW or (session.prefills_rows and not session.deterministic)

    def output(self, batch: RunningBatch, decoded: Decoded) -> tuple[Attempt, WindowOutput]:
        number, hypotheses = decoded
        attempt = self.running.pop(number)
        temperature = self.decoder.options.temperatures[attempt.place]
        return attempt, self.decoder.output(hypotheses, batch.asked.pop(number), temperature)
