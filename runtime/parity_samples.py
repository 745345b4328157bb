"""A handful of outputs to read, also where all agree: numbers alone do not show what a model says."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import Baseline
from .free_decodes import search_name
from .parity_corpus import Corpus
from .parity_result import ParityResult, Sample
from .sanity import spread_rows

SAMPLES = 5
IDS = 24  # of a source or an output that are shown where there is no text


def samples_of(result: ParityResult, corpus: Corpus, baseline: Baseline) -> tuple[Sample, ...]:
    """Sources evenly over all lengths, in the widest search that came to its end, beside fp32; where that was not
    decoded, beside the other side.
    """
    searches = [options for options in corpus.searches if search_name(options) in result.finished_searches]
    if not searches:
        return ()
    options, name = searches[-1], search_name(searches[-1])
    if result.cost is not None and not result.cost.failure:
        whose, expected = baseline.name, dict(enumerate(baseline.outputs(options, corpus)))
    else:
        whose, expected = result.speaker, corpus.outputs[result.speaker, name]
    by_length = sorted(range(len(corpus.sources)), key=lambda row: len(corpus.sources[row]))
    rows = [by_length[place] for place in spread_rows(len(by_length), SAMPLES)]
    ours = corpus.outputs[result.candidate, name]
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
