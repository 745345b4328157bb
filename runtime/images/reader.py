"""Pictures in, text out: what a loaded model does with images.

pictures -> windows -> pixels -> continuous batching, or batches -> text, in the order of the pictures
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError, UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.images import ImageConfig, read_images
from seq2engine.model.tokenizers.base import Coder

from ..encoder_inputs import FeatureSource
from ..model_options import options_from_session
from ..requests import check_options
from ..search.option_checks import problems_with_prefix
from ..search.options import SearchOptions
from ..session import Session
from ..text.translate import Output, decoded_by_number
from .pixels import ImageInput, pixels_from

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..model_options import SearchFields

BATCH = 8  # pictures decoded together: one has as many positions as twenty sentences
WINDOW = 4  # batches whose pixels are held
STAGE = "read"


@dataclass(frozen=True)
class Reading:
    """A picture with its n-best outputs, best first; one that could not be read has an error and none."""

    name: str
    outputs: tuple[Output, ...] = ()
    error: str | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text if self.outputs else ""


class Reader:
    """A loaded model of images. A `Translator` is one: what it takes is in its bundle."""

    bundle: Bundle
    session: Session
    tokenizer: Coder

    @overload
    def read(  # type: ignore[overload-overlap]
        self,
        images: ImageInput,
        options: SearchOptions | None = None,
        *,
        batch: int = BATCH,
        progress: Progress = silent,
        **fields: Unpack[SearchFields],
    ) -> str: ...

    @overload
    def read(
        self,
        images: Sequence[ImageInput],
        options: SearchOptions | None = None,
        *,
        batch: int = BATCH,
        progress: Progress = silent,
        **fields: Unpack[SearchFields],
    ) -> list[str]: ...

    def read(
        self,
        images: ImageInput | Sequence[ImageInput],
        options: SearchOptions | None = None,
        *,
        batch: int = BATCH,
        progress: Progress = silent,
        **fields: Unpack[SearchFields],
    ) -> str | list[str]:
        """The text of a picture, or of every picture of a list.

        A picture is a file, an array uint8 [height, width] or [height, width, channels], or one of Pillow's. Options
        are fields of `SearchOptions` by name, such as `beam=4`, or all of them as `options`. A picture that cannot be
        read raises a RequestError.
        """
        several = isinstance(images, list | tuple)
        given: Any = images if several else [images]
        found = []
        for reading in self.read_iter(given, options, batch=batch, progress=progress, **fields):
            if reading.error is not None:
                raise RequestError(reading.error)
            found.append(reading.text)
        return found if several else found[0]

    def read_iter(
        self,
        images: Iterable[ImageInput],
        options: SearchOptions | None = None,
        *,
        batch: int = BATCH,
        prefixes: Sequence[Sequence[int]] | None = None,
        progress: Progress = silent,
        **fields: Unpack[SearchFields],
    ) -> Iterator[Reading]:
        """The outputs of several pictures, in their order, decoded together; one that cannot be read has an error.

        `prefixes` are the token ids that the output of each begins with.
        """
        if options is not None and fields:
            raise UsageError(f"options together with {', '.join(fields)}, expected either all options or fields")
        if batch < 1:
            raise RequestError(f"batch {batch}, expected at least 1")
        asked = options or options_from_session(self.session, **fields)
        settings = read_images(self.bundle.root, self.session.config)
        check_options(self.session.limits, self.session.config, asked)
        work = _Work(self.session, self.tokenizer, settings, asked, prefixes)
        limit = self.session.limits.batch
        return work.readings(images, batch if limit is None else min(batch, limit), progress)


@dataclass(frozen=True)
class _Work:
    """What all pictures have in common."""

    session: Session
    tokenizer: Coder
    images: ImageConfig
    options: SearchOptions
    prefixes: Sequence[Sequence[int]] | None

    def readings(self, pictures: Iterable[Any], most: int, progress: Progress) -> Iterator[Reading]:
        total = len(pictures) if isinstance(pictures, Sequence) else 0
        waiting, done = iter(pictures), 0
        while window := list(islice(waiting, WINDOW * most)):
            for reading in self.window(window, done, most):
                done += 1
                if total:
                    progress(STAGE, done / total, f"{done} of {total} pictures")
                yield reading

    def window(self, pictures: Sequence[Any], first: int, most: int) -> Iterator[Reading]:
        """Decodes as far as the next picture needs. `first` is the number of the first one."""
        ready: dict[int, Reading] = {}
        places: list[int] = []
        sources: list[FeatureSource] = []
        for place, picture in enumerate(pictures):
            try:
                sources.append(self.source(picture, first + place))
                places.append(place)
            except RequestError as error:
                ready[place] = Reading(name_of(picture, first + place), error=str(error))
        prefixes = None if self.prefixes is None else [self.prefixes[first + place] for place in places]
        decoded = decoded_by_number(self.session, sources, self.options, most, prefixes)
        for place in range(len(pictures)):
            while place not in ready:
                number, hypotheses = next(decoded)
                outputs = tuple(
                    Output(
                        self.tokenizer.decode_target(best.tokens).strip(),
                        best.tokens,
                        best.score,
                        best.log_probs,
                        best.alignments,
                    )
                    for best in hypotheses
                )
                ready[places[number]] = Reading(name_of(pictures[places[number]], first + places[number]), outputs)
            yield ready.pop(place)

    def source(self, picture: Any, number: int) -> FeatureSource:
        config = self.session.config
        if self.prefixes is not None:
            if number >= len(self.prefixes):
                raise RequestError(f"no prefix for it, there are {len(self.prefixes)}; give one for every picture")
            wrong = problems_with_prefix(self.options, self.prefixes[number], config.target_vocab, config.end_id)
            if wrong:
                raise RequestError("; ".join(wrong))
        return FeatureSource(pixels_from(picture, self.images, config), config.max_source)


def name_of(picture: Any, number: int) -> str:
    """A file's name; of anything else its number, from 1."""
    return f"picture {number + 1}" if isinstance(picture, np.ndarray) or hasattr(picture, "mode") else str(picture)
