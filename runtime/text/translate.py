"""Lines in, lines out: text becomes ids, ids are decoded together, and outputs become text, in input order.

    lines -> windows of what has arrived -> ids -> continuous batching, or batches by length -> text -> lines

The speed does not depend on the order of the lines, and the output of a line does not depend on the other lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from seq2engine.errors import RequestError
from seq2engine.model.tokenizers.base import Coder, unknown_text

from ..encoder_inputs import check_takes_text
from ..generate import generate, makes_steps_ahead
from ..requests import check_options
from ..search.option_checks import problems_with_prefix
from ..search.options import SearchOptions
from ..search.step import Hypothesis
from ..session import Session
from .batching import BATCH, batches_by_length
from .continuous_batching import Decoded, first_then_longest, translate_many, worth_it
from .lines import Line, windows_of

WINDOW = 64  # batches of look-ahead: enough to group lines by length, without long waits


@dataclass(frozen=True)
class Output:
    """A hypothesis and its text."""

    text: str
    tokens: tuple[int, ...]
    score: float
    log_probs: tuple[float, ...] = ()
    alignments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translated:
    """A line with its n-best outputs, best first; an empty line, and one with an error, has none.

    `unknown` are the characters or words that the model has no token for: they were decoded as <unk>.
    """

    line: Line
    source: tuple[int, ...] = ()
    outputs: tuple[Output, ...] = ()
    error: str | None = None
    unknown: tuple[str, ...] = ()


def translate_texts(
    session: Session,
    tokenizer: Coder,
    texts: Iterable[str],
    options: SearchOptions,
    batch: int = BATCH,
    truncate: bool = False,
    language: str | None = None,
    name: str = "text",
) -> Iterator[str]:
    """The best output of every text; of an empty text an empty one. The first text that cannot be decoded is an error,
    which calls it `name` and its number, from 1. `language` is the source's.
    """
    lines = (Line(number, text) for number, text in enumerate(texts, start=1))
    for translated in translate_lines(session, tokenizer, lines, options, batch, truncate, language):
        if translated.error is not None:
            raise RequestError(f"{name} {translated.line.number}: {translated.error}")
        yield translated.outputs[0].text if translated.outputs else ""


def translate_lines(
    session: Session,
    tokenizer: Coder,
    lines: Iterable[Line],
    options: SearchOptions,
    batch: int = BATCH,
    truncate: bool = False,
    language: str | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    strict: bool = False,
) -> Iterator[Translated]:
    """The outputs of every line, in the order of the lines, each as soon as it and all before it are done.

    `language` is the source's. A source that is too long is an error of its line, or is cut if `truncate`; the special
    tokens at its end stay. Options that no line can be decoded with are refused at once. `prefixes` are the beginnings
    of each line's output, by the lines' numbers from 1 (an empty one: none). If `strict`, a character that the model
    has no token for is an error of its line.
    """
    if batch < 1:
        raise RequestError(f"batch {batch}, expected at least 1")
    check_takes_text(session.config)
    check_options(session.limits, session.config, options)
    if prefixes is not None and options.prefix:
        raise RequestError("a prefix for all lines and one for each, expected one of the two")
    work = LineCoder(session, tokenizer, options, truncate, language, prefixes, strict)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    return (done for window in windows_of(lines, WINDOW * most) for done in work.window(window, most))


class LineCoder:
    """Lines to ids and back, with what stays the same from line to line."""

    def __init__(
        self,
        session: Session,
        tokenizer: Coder,
        options: SearchOptions,
        truncate: bool,
        language: str | None,
        prefixes: Sequence[Sequence[int]] | None,
        strict: bool,
    ):
        self.session, self.tokenizer, self.options = session, tokenizer, options
        self.truncate, self.language, self.prefixes, self.strict = truncate, language, prefixes, strict
        self.frame = tokenizer.encode_source("", language)  # special tokens alone; refuses an unknown language

    def window(self, lines: Sequence[Line], most: int) -> Iterator[Translated]:
        """Decodes as far as the next line needs, so that lines come out as early as they can."""
        ready: dict[int, Translated] = {}
        places: list[int] = []
        sources: list[list[int]] = []
        for place, line in enumerate(lines):
            source = self.source(line)
            if isinstance(source, Translated):
                ready[place] = source
            else:
                places.append(place)
                sources.append(source)
        prefixes = None if self.prefixes is None else [self.prefixes[lines[place].number - 1] for place in places]
        decoded = decoded_by_number(self.session, sources, self.options, most, prefixes)
        for place in range(len(lines)):
            while place not in ready:
                number, hypotheses = next(decoded)
                line = lines[places[number]]
                ready[places[number]] = self.translated(line, sources[number], hypotheses)
            yield ready.pop(place)

    def translated(self, line: Line, source: Sequence[int], hypotheses: Sequence[Hypothesis]) -> Translated:
        outputs = (
            Output(self.tokenizer.decode_target(best.tokens), best.tokens, best.score, best.log_probs, best.alignments)
            for best in hypotheses
        )
        unknown = tuple(self.tokenizer.unknown_source(line.text))
        return Translated(line, tuple(source), tuple(outputs), unknown=unknown)

    def source(self, line: Line) -> list[int] | Translated:
        """The ids to decode; where there is nothing to decode, the line's result."""
        if line.error is not None:
            return Translated(line, error=line.error)
        if not line.text.strip():
            return Translated(line)
        try:
            ids = self.tokenizer.encode_source(line.text, self.language)
        except RequestError as error:
            return Translated(line, error=str(error))
        if ids == self.frame:  # the text has no token
            return Translated(line)
        if self.strict and (unknown := self.tokenizer.unknown_source(line.text)):
            return Translated(line, error=unknown_text(unknown), unknown=tuple(unknown))
        longest, vocab = self.session.limits.source, self.session.config.source_vocab
        if len(ids) > longest and not self.truncate:
            counted = f"{len(ids):,} tokens, at most {longest:,} are supported"
            return Translated(line, error=f"{counted}; shorten it or add --truncate")
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            return Translated(line, error=f"token {wrong[0]}, but the vocabulary has 0 to {vocab - 1}")
        if problem := self.problem_with_prefix(line.number):
            return Translated(line, error=problem)
        return cut_source(ids, self.frame, longest)

    def problem_with_prefix(self, number: int) -> str | None:
        if self.prefixes is None:
            return None
        if number > len(self.prefixes):
            return f"no prefix for it, there are {len(self.prefixes)}; give one for every line"
        config = self.session.config
        prefix = self.prefixes[number - 1]
        return "; ".join(problems_with_prefix(self.options, prefix, config.target_vocab, config.end_id)) or None


def decoded_by_number(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    most: int,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Iterator[Decoded]:
    """Number and hypotheses of every source, in the order in which they are done; at most `most` are decoded at once.

    By continuous batching where that is at least as fast; else in batches by length, each of which begins when the
    first of its sources is next.
    """
    lengths = [len(source) for source in sources]
    ahead = makes_steps_ahead(session, options, min(most, len(sources)), prefixes)
    if worth_it(session, len(sources), most, options.width, ahead):
        order = first_then_longest(lengths, most)
        own = None if prefixes is None else [prefixes[number] for number in order]
        ordered = [sources[number] for number in order]
        for place, hypotheses in translate_many(session, ordered, options, most, 0, own):
            yield order[place], hypotheses
        return
    for numbers in sorted(batches_by_length(lengths, most), key=min):
        own = None if prefixes is None else [prefixes[number] for number in numbers]
        found = generate(session, [sources[number] for number in numbers], options, prefixes=own)
        yield from zip(numbers, found, strict=True)


def cut_source(ids: list[int], frame: list[int], longest: int) -> list[int]:
    """At most `longest` ids. The special tokens that end every source, also an empty one, are kept."""
    if len(ids) <= longest:
        return ids
    closing = 0
    while closing < min(len(frame), longest) and frame[-1 - closing] == ids[-1 - closing]:
        closing += 1
    return ids[: longest - closing] + ids[len(ids) - closing :]
