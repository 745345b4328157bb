"""A handful of outputs to read, also where all agree: numbers alone do not show what a model says."""

from __future__ import annotations

from collections.abc import Sequence

from ..levels.corpus import Corpus
from ..levels.cost import Baseline
from ..levels.decodes import search_name
from ..levels.result import ParityResult, Sample
from ..levels.sanity import spread_rows

SAMPLES, APART = 5, 2  # sources to show, and how many of them shall be such as differ
IDS = 24  # of a source or an output that are shown where there is no text


def samples_of(result: ParityResult, corpus: Corpus, baseline: Baseline) -> tuple[Sample, ...]:
    """Sources evenly over all lengths, some whose outputs differ among them, in the widest search that came to its end,
    beside fp32; where that was not decoded, beside the other side.
    """
    searches = [options for options in corpus.searches if search_name(options) in result.finished_searches]
    if not searches:
        return ()
    options, name = searches[-1], search_name(searches[-1])
    if result.cost is not None and not result.cost.failure:
        whose, expected = baseline.name, dict(enumerate(baseline.outputs(options, corpus)))
    else:
        whose, expected = result.speaker, corpus.outputs[result.speaker, name]
    ours = corpus.outputs[result.candidate, name]
    by_length = sorted(range(len(corpus.sources)), key=lambda row: len(corpus.sources[row]))
    apart = [row for row in by_length if expected[row] != ours[row]]
    shown = {apart[place] for place in spread_rows(len(apart), APART)}
    rest = [row for row in by_length if row not in shown]
    shown |= {rest[place] for place in spread_rows(len(rest), SAMPLES - len(shown))}
    rows = [row for row in by_length if row in shown]
    texts = None if corpus.references is None else list(corpus.references)
    return tuple(
        Sample(
            name,
            texts[row] if texts is not None else source_text(corpus, row),
            whose,
            target_text(corpus, expected[row]),
            target_text(corpus, ours[row]),
        )
        for row in rows
    )


def source_text(corpus: Corpus, row: int) -> str:
    """Of sources that came as ids: their tokens, where the bundle knows them."""
    source = corpus.sources[row]
    if not corpus.bundle.takes_text:
        return ids_text(source)
    return cut_text(corpus.tokenizer.source_tokens(source[: IDS + 1]))


def target_text(corpus: Corpus, tokens: Sequence[int]) -> str:
    return corpus.tokenizer.decode_target(tokens) if corpus.bundle.takes_text else ids_text(tokens)


def ids_text(ids: Sequence[int]) -> str:
    return cut_text([str(token) for token in ids])


def cut_text(words: Sequence[str]) -> str:
    return " ".join([*words[:IDS], *(["..."] if len(words) > IDS else [])])
