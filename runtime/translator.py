"""Text in, text out: a bundle with its session, its tokenizer and its own decoding defaults.

with seq2engine.load("out/opus", precision="w8a8") as model:
    model.translate(["今天天气很好。"], beam=4)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, overload

from seq2engine.common.measured import user_cache
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError, UsageError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.profiles import Workload
from seq2engine.model.tokenizers.base import Coder, unknown_text
from seq2engine.model.tokenizers.ids import IdsTokenizer

from .backends import AUTO
from .defaults import defaults_of
from .generate import decode, generate
from .images.reader import Reader
from .model_options import first_token, options_from_session
from .opening import open_session
from .search.options import SearchOptions
from .session import Session
from .speech.transcriber import Transcriber
from .text.batching import BATCH
from .text.lines import Line
from .text.scoring import ScoredLine, TargetScore, score_lines, score_targets
from .text.sources import coder_of
from .text.streaming import TextStream
from .text.translate import Translated, translate_lines, translate_texts
from .threads import both

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .attention.view import AttentionView
    from .model_options import SearchFields


def load(
    bundle: Bundle | str | os.PathLike[str],
    backend: str = "onnxruntime",
    precision: str | None = None,
    threads: int | None = None,
    engine: str | None = None,
    attention: bool = False,
    deterministic: bool = False,
    provider: str | None = None,
    draft: str | None = AUTO,
    workload: Workload | None = None,
    ids: bool = False,
    tokens_per_wait: int | None = None,
    remeasure: bool = False,
) -> Translator:
    """Opens a bundle for text: session, tokenizer and the model's own decoding defaults. All but `ids` is as in
    `open_session`, with speculative decoding where it is faster (`draft=None`: without). What is measured for that, or
    for precision "auto", is kept in the user's cache folder, as are the graphs that ONNX Runtime runs (`remeasure`: all
    of it is done again, and not kept).

    With `attention`, outputs can have alignments and a coverage penalty; a model whose own defaults ask for them gets
    it anyway. With `ids`, texts are lines of token ids such as "17 4 250", as they are where the bundle has no
    tokenizer.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    opening = partial(
        open_session,
        opened,
        backend,
        precision,
        threads,
        engine,
        attention or defaults_of(opened).needs_attention,
        deterministic,
        provider,
        draft,
        workload,
        tokens_per_wait,
        None if remeasure else user_cache() / "measured",
        None if remeasure else user_cache(),
    )
    coder, session = both(partial(coder_of, opened, ids), opening)
    return Translator(opened, session, coder, threads)


class Translator(Transcriber, Reader):
    """A model that takes text, audio or images. It owns its session: close it, or use it in a `with` block.

    Search options are fields of `SearchOptions` by name, such as `beam=4`, in place of the model's own; or one
    `SearchOptions` as `options`, which replaces all of them. Languages are named as the model names them, such as
    `fra_Latn`; most models have none.
    """

    def __init__(self, bundle: Bundle, session: Session, tokenizer: Coder, threads: int | None = None):
        self.bundle, self.session, self.tokenizer, self.threads = bundle, session, tokenizer, threads

    def __enter__(self) -> Translator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the session; the model decodes nothing from then on."""
        self.session.close()

    @property
    def takes_text(self) -> bool:
        """Whether texts are text; if not, they are lines of token ids such as "17 4 250"."""
        return not isinstance(self.tokenizer, IdsTokenizer)

    @cached_property
    def labels(self) -> Coder:
        """The tokenizer that names single tokens: the bundle's, also where texts are lines of ids."""
        return coder_of(self.bundle)

    def options(self, target_language: str | None = None, **fields: Unpack[SearchFields]) -> SearchOptions:
        """The model's own search options with these fields in their place.

        The target language is the first token of every output.
        """
        if target_language is not None:
            if fields.get("forced_bos") is not None:
                raise UsageError("target_language together with forced_bos, expected one: a language is a first token")
            fields["forced_bos"] = first_token(self.session, self.tokenizer, target_language)
        return options_from_session(self.session, **fields)

    def _asked(self, options: SearchOptions | None, target_language: str | None, fields: SearchFields) -> SearchOptions:
        """Options as a method got them: all of them, or some fields."""
        if options is None:
            return self.options(target_language, **fields)
        if fields:
            raise UsageError(f"options together with {', '.join(fields)}, expected either all options or fields")
        if target_language is None:
            return options
        return dataclasses.replace(options, forced_bos=self.tokenizer.language_id(target_language))

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        texts: str,
        options: SearchOptions | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        truncate: bool = False,
        **fields: Unpack[SearchFields],
    ) -> str: ...

    @overload
    def translate(
        self,
        texts: Iterable[str],
        options: SearchOptions | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        truncate: bool = False,
        **fields: Unpack[SearchFields],
    ) -> list[str]: ...

    def translate(
        self,
        texts: str | Iterable[str],
        options: SearchOptions | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        truncate: bool = False,
        **fields: Unpack[SearchFields],
    ) -> str | list[str]:
        """The best output of a text, or of every text of a list; of an empty text an empty one.

        A text that cannot be decoded raises a RequestError that names it by its number; with `truncate`, one that is
        too long is cut. At most `batch` texts are decoded at once.
        """
        asked = dataclasses.replace(self._asked(options, target_language, fields), scores=False)
        given = [texts] if isinstance(texts, str) else texts
        found = list(translate_texts(self.session, self.tokenizer, given, asked, batch, truncate, source_language))
        return found[0] if isinstance(texts, str) else found

    def translate_iter(
        self,
        lines: Iterable[str],
        options: SearchOptions | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        truncate: bool = False,
        **fields: Unpack[SearchFields],
    ) -> Iterator[str]:
        """The best output of every line, in input order, of input of any length, such as an open file.

        Lines are read in a thread, ahead of the decode, and an output does not wait for lines that have not come. A
        line break at the end of a line is not part of it. Errors are as in `translate`.
        """
        asked = dataclasses.replace(self._asked(options, target_language, fields), scores=False)
        texts = (line.removesuffix("\n").removesuffix("\r") for line in lines)
        return translate_texts(
            self.session, self.tokenizer, texts, asked, batch, truncate, source_language, name="line"
        )

    def translate_lines(
        self,
        lines: Iterable[Line],
        options: SearchOptions | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        truncate: bool = False,
        prefixes: Sequence[Sequence[int]] | None = None,
        strict: bool = False,
        **fields: Unpack[SearchFields],
    ) -> Iterator[Translated]:
        """Every line with all its outputs (n-best, tokens, scores), or with its error: what `seq2engine run` prints.

        `prefixes` are the token ids that each line's output begins with. If `strict`, a character that the model has no
        token for is an error of its line.
        """
        asked = self._asked(options, target_language, fields)
        return translate_lines(
            self.session, self.tokenizer, lines, asked, batch, truncate, source_language, prefixes, strict
        )

    @contextmanager
    def stream(
        self,
        text: str,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> Iterator[Iterator[str]]:
        """Pieces of the output as they are decoded; joined, they are what `translate` gives for `beam=1`.

        A piece is text that no later token changes: a character of several byte tokens comes when it is whole. Beam
        search may change its whole output until it ends, so streaming takes greedy search or sampling. Leaving the
        block ends the decode.
        """
        if (fields.get("beam") or 1) > 1 or (fields.get("nbest") or 1) > 1:
            raise UsageError("stream with beams or several outputs, expected greedy search or one sample; or translate")
        fields["beam"] = fields["nbest"] = 1
        fields.setdefault("coverage_penalty", 0.0)  # the model's own may be for beams
        fields.setdefault("alternatives", False)
        fields.setdefault("scores", False)
        options = self.options(target_language, **fields)
        with closing(self._pieces(text, options, source_language)) as pieces:
            yield pieces

    def _pieces(self, text: str, options: SearchOptions, source_language: str | None) -> Generator[str, None, None]:
        source = self.tokenizer.encode_source(text, source_language)
        if not text.strip() or source == self.tokenizer.encode_source("", source_language):
            return
        shown = TextStream(self.tokenizer)
        with closing(decode(self.session, [source], options)) as steps:
            while True:
                try:
                    emitted = next(steps)
                except StopIteration as finished:
                    best = finished.value[0][0].tokens
                    break
                if piece := shown.add(int(emitted.tokens[0, 0])):
                    yield piece
        if piece := shown.finish(best):
            yield piece

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        sources: str,
        targets: str,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
    ) -> TargetScore: ...

    @overload
    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
    ) -> list[TargetScore]: ...

    def score(
        self,
        sources: str | Sequence[str],
        targets: str | Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
    ) -> TargetScore | list[TargetScore]:
        """The log-probability of every token of one target for each source.

        A target of text is scored with its end token, after the forced first token where the model has one;
        ids are taken as they are.
        """
        if isinstance(sources, str) != isinstance(targets, str):
            raise UsageError("one text and a list of texts, expected two texts or two lists")
        first = self.first_tokens(target_language)
        found = score_targets(
            self.session,
            [self.tokenizer.encode_source(text, source_language) for text in listed(sources)],
            [[*first, *self.tokenizer.encode_target(text)] for text in listed(targets)],
            batch,
        )
        return found[0] if isinstance(sources, str) else found

    def score_lines(
        self,
        lines: Iterable[Line],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        batch: int = BATCH,
        strict: bool = False,
    ) -> Iterator[ScoredLine]:
        """The score or the error of every line of source<TAB>target: what `seq2engine score` prints."""
        first = self.first_tokens(target_language)
        return score_lines(self.session, self.tokenizer, lines, batch, source_language, first, strict=strict)

    def first_tokens(self, target_language: str | None = None) -> list[int]:
        """The tokens before the text of every target: the target language, or the model's own first token, if any."""
        first = first_token(self.session, self.tokenizer, target_language)
        return [] if first is None or not self.takes_text else [first]

    def attention(
        self,
        source: str,
        target: str | None = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        strict: bool = False,
        progress: Progress = silent,
        **fields: Unpack[SearchFields],
    ) -> AttentionView:
        """The cross-attention weights of every layer and head while `target` is decoded (None: the model's output).

        They come from ONNX Runtime and are compared with PyTorch's, at the session's precision. If `strict`, text that
        the model has no token for is refused.
        """
        from .attention.view import attention_view, checked_line

        ids = self.tokenizer.encode_source(checked_line(source), source_language)
        unknown = tuple(self.tokenizer.unknown_source(source))
        if strict and unknown:
            raise RequestError(f"the text has {unknown_text(unknown)}")
        fields.setdefault("nbest", 1)
        options = self.options(target_language, **fields)
        if target is None:
            progress("attention: decode", 0.0)
            output = generate(self.session, [ids], options)[0][0].tokens
            progress("attention: decode", 1.0)
        else:
            output = (*self.first_tokens(target_language), *self.tokenizer.encode_target(target))
        view = attention_view(self.bundle, self.session.precision, ids, output, options, self.threads, progress)
        return dataclasses.replace(
            view,
            text=source.strip(),
            output=self.labels.decode_target(output),
            source=tuple(self.source_labels(ids)),
            target=tuple(self.labels.target_tokens(output)),
            unknown=unknown,
        )

    def tokens(self, ids: Sequence[Sequence[int]]) -> list[list[str]]:
        """The target tokens of sequences of ids, as people read them, such as "▁the" or "</s>"."""
        return [self.labels.target_tokens(row) for row in ids]

    def source_labels(self, ids: Sequence[int]) -> list[str]:
        """The source tokens of ids, as people read them."""
        return self.bundle.tokenizer().source_tokens(ids) if self.bundle.takes_text else [str(token) for token in ids]


def listed(texts: str | Sequence[str]) -> Sequence[str]:
    """A text as a list of one."""
    return [texts] if isinstance(texts, str) else texts
