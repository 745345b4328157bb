"""Lines in, lines out: text becomes ids, batches of like length are decoded, and ids become text, in input order.

    lines -> windows of what has arrived -> batches by length -> decoded when the first of its lines is next -> lines

How fast this is does not depend on the order of the lines, and what a line gets does not depend on the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from seq2engine.errors import RequestError
from seq2engine.model.tokenizers.base import Coder, unknown_text

from ..generate import generate
from ..model_options import options_from_session
from ..requests import check_request
from ..search.option_checks import problems_with_prefix
from ..search.options import SearchOptions
from ..session import Session
from .lines import Line, windows_of

BATCH = 32
WINDOW = 64  # batches that are looked ahead: enough for lines of one length to meet, soon enough through


@dataclass(frozen=True)
class Output:
    """A hypothesis (search.py) and its text."""

    text: str
    tokens: tuple[int, ...]
    score: float
    log_probs: tuple[float, ...] = ()
    alignments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translated:
    """A line and what became of it: n-best outputs, best first; none for an empty line or one with an error.

    `unknown` is what the model has no token for (characters, or words): it was decoded as <unk>.
    """

    line: Line
    source: tuple[int, ...] = ()
    outputs: tuple[Output, ...] = ()
    error: str | None = None
    unknown: tuple[str, ...] = ()


def translate(
    session: Session,
    tokenizer: Coder,
    texts: Iterable[str],
    options: SearchOptions | None = None,
    batch: int = BATCH,
    truncate: bool = False,
    language: str | None = None,
    target_language: str | None = None,
) -> list[str]:
    """The best output of every text; of an empty text an empty one. The first text that cannot be taken is an error.

    Without `options`, texts are decoded as the model does by default. `target_language` is the first token of every
    output, as the model names it, whatever the options say.
    """
    lines = (Line(number, text) for number, text in enumerate(texts, start=1))
    asked = dataclasses.replace(options or options_from_session(session), scores=False)
    if target_language is not None:
        asked = dataclasses.replace(asked, forced_bos=tokenizer.language_id(target_language))
    found = []
    for translated in translate_lines(session, tokenizer, lines, asked, batch, truncate, language):
        if translated.error is not None:
            raise RequestError(f"text {translated.line.number}: {translated.error}")
        found.append(translated.outputs[0].text if translated.outputs else "")
    return found


def translate_lines(
    session: Session,
    tokenizer: Coder,
    lines: Iterable[Line],
    options: SearchOptions | None = None,
    batch: int = BATCH,
    truncate: bool = False,
    language: str | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    strict: bool = False,
) -> Iterator[Translated]:
    """Every line's outputs in the order of the lines, each as soon as it and all before it are done.

    `language` is the source's. A source that is too long is an error of its line, or is cut, if `truncate`; the special
    tokens that close it stay. What no line could be decoded with is refused at once. `prefixes` are what the output of
    each line begins with, by the lines' numbers from 1 (an empty one: nothing of its own). If `strict`, what the model
    has no token for is an error of its line.
    """
    if batch < 1:
        raise RequestError(f"batch {batch}, expected at least 1")
    options = options or options_from_session(session)
    check_request(session.limits, session.config, [[session.config.pad_id]], options)
    if prefixes is not None and options.prefix:
        raise RequestError("a prefix of all lines and one of each, expected either")
    work = _Work(session, tokenizer, options, truncate, language, prefixes, strict)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    return (done for window in windows_of(lines, WINDOW * most) for done in work.window(window, most))


class _Work:
    """What stays the same from line to line."""

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
        """A batch is decoded when the first of its lines is next, so that lines come out as early as they can."""
        taken = [self.source(line) for line in lines]
        ready = {place: source for place, source in enumerate(taken) if isinstance(source, Translated)}
        waiting = {place: source for place, source in enumerate(taken) if not isinstance(source, Translated)}
        batches = batches_by_length(waiting, most)
        for place in range(len(lines)):
            if place not in ready:
                places = batches[place]
                sources = [waiting[other] for other in places]
                prefixes = None
                if self.prefixes is not None:
                    prefixes = [self.prefixes[lines[other].number - 1] for other in places]
                found = generate(self.session, sources, self.options, prefixes=prefixes)
                for other, hypotheses in zip(places, found, strict=True):
                    outputs = (
                        Output(
                            self.tokenizer.decode_target(best.tokens),
                            best.tokens,
                            best.score,
                            best.log_probs,
                            best.alignments,
                        )
                        for best in hypotheses
                    )
                    unknown = tuple(self.tokenizer.unknown_source(lines[other].text))
                    ready[other] = Translated(lines[other], tuple(waiting[other]), tuple(outputs), unknown=unknown)
            yield ready.pop(place)

    def source(self, line: Line) -> list[int] | Translated:
        """What to decode, or, where there is nothing to decode, what the line has become without."""
        if line.error is not None:
            return Translated(line, error=line.error)
        if not line.text.strip():
            return Translated(line)
        try:
            ids = self.tokenizer.encode_source(line.text, self.language)
        except RequestError as error:
            return Translated(line, error=str(error))
        if ids == self.frame:  # the tokenizer saw nothing in it
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


def batches_by_length(sources: dict[int, list[int]], most: int) -> dict[int, list[int]]:
    """Every place -> the places of its batch: neighbours in length, so that little is padded."""
    places = sorted(sources, key=lambda place: len(sources[place]))
    batches = [places[start : start + most] for start in range(0, len(places), most)]
    return {place: batch for batch in batches for place in batch}


def cut_source(ids: list[int], frame: list[int], longest: int) -> list[int]:
    """At most `longest` ids. What an empty text would end with as well is kept: it closes every source."""
    if len(ids) <= longest:
        return ids
    closing = 0
    while closing < min(len(frame), longest) and frame[-1 - closing] == ids[-1 - closing]:
        closing += 1
    return ids[: longest - closing] + ids[len(ids) - closing :]
