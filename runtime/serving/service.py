"""Text in, text out, over a scheduler: shared by the HTTP server and the Triton model.

The ids of a text, its checks and the text of its outputs are those of `run` (text/translate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from seq2engine.errors import RequestError

from ..encoder_inputs import check_takes_text
from ..model_options import options_from_session
from ..search.option_fields import OptionFields
from ..search.options import SearchOptions
from ..search.step import Hypothesis
from ..text.batching import BATCH
from ..text.lines import Line
from ..text.streaming import TextStream
from ..text.translate import LineCoder, Output, Translated
from ..translator import Translator
from .scheduler import QUEUE, Scheduler
from .tickets import Request, Ticket

WIDEST = 32  # default maximum of beams or samples per text: each takes memory and time from other requests
WARM_LENGTH = 4  # tokens of the warm-up decode


@dataclass(frozen=True)
class TextRequest:
    """Texts of one client. `options` are fields of SearchOptions; None leaves the model's own."""

    texts: tuple[str, ...]
    options: SearchOptions
    source_language: str | None = None
    truncate: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Pending:
    """A pending text: a ticket, or the result if there is nothing to decode."""

    coder: LineCoder
    line: Line
    source: tuple[int, ...] = ()
    ticket: Ticket | None = None
    ready: Translated | None = None

    @property
    def future(self) -> Future[list[Hypothesis]] | None:
        return None if self.ticket is None else self.ticket.future

    def translated(self) -> Translated:
        """The result; waits for it."""
        if self.ready is not None:
            return self.ready
        assert self.ticket is not None
        return self.coder.translated(self.line, self.source, self.ticket.result())

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()


class TextService:
    """A loaded model for many concurrent clients. It owns neither the model nor its session."""

    def __init__(self, model: Translator, rows: int = BATCH, queue: int = QUEUE, widest: int = WIDEST):
        check_takes_text(model.session.config, model.bundle.root)
        self.model, self.widest = model, widest
        self.scheduler = Scheduler(model.session, rows, queue)

    def __enter__(self) -> TextService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scheduler.close(drain=kind is None)

    def warm_up(self) -> None:
        """Decodes a few tokens, so that the first request of a client finds everything allocated."""
        options = options_from_session(self.model.session, max_length=WARM_LENGTH, min_length=0)
        self.scheduler.generate(Request([self.model.session.config.end_id], options))

    def options(self, target_language: str | None = None, **fields: object) -> SearchOptions:
        """The model's own options with these in their place; more beams than this service gives are refused."""
        options = self.model.options(target_language, **fields)  # type: ignore[arg-type]
        if problem := self.too_wide(options):
            raise RequestError(problem)
        return options

    def too_wide(self, options: OptionFields) -> str:
        if options.width <= self.widest:
            return ""
        return f"{options.width} beams or samples of a text, at most {self.widest}"

    def submit(self, request: TextRequest, on_token: Callable[[int, int], None] | None = None) -> list[Pending]:
        """Queues all texts, or none. A text that cannot be decoded has its error as its result.

        `on_token` gets the place of a text and its next token, in the thread that decodes.
        """
        model = self.model
        coder = LineCoder(
            model.session,
            model.tokenizer,
            request.options,
            request.truncate,
            request.source_language,
            prefixes=None,
            strict=False,
        )
        lines = [Line(number, text) for number, text in enumerate(request.texts, start=1)]
        sources = [coder.source(line) for line in lines]
        asked = [
            Request(source, request.options, timeout=request.timeout, on_token=with_place(on_token, place))
            for place, source in enumerate(sources)
            if not isinstance(source, Translated)
        ]
        tickets = iter(self.scheduler.submit(*asked) if asked else ())
        return [
            Pending(coder, line, ready=source)
            if isinstance(source, Translated)
            else Pending(coder, line, tuple(source), next(tickets))
            for line, source in zip(lines, sources, strict=True)
        ]

    def stream(self) -> TextStream:
        """What makes text of tokens as they come."""
        return TextStream(self.model.tokenizer)


def with_place(on_token: Callable[[int, int], None] | None, place: int) -> Callable[[int], None] | None:
    return None if on_token is None else lambda token: on_token(place, token)


def values_of(outputs: Sequence[Output], scores: bool, tokens: bool) -> list[dict[str, object]]:
    """Outputs as JSON has them."""
    return [
        {
            "text": output.text,
            **({"score": output.score, "log_probs": list(output.log_probs)} if scores else {}),
            **({"tokens": list(output.tokens)} if tokens else {}),
            **({"alignments": list(output.alignments)} if output.alignments else {}),
        }
        for output in outputs
    ]
