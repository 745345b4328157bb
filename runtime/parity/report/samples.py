"""A few sample outputs for the report, even if all are equal."""

from __future__ import annotations

from collections.abc import Sequence

from ...encoder_inputs import FeatureSource
from ..levels.corpus import Corpus
from ..levels.cost import Fp32Outputs
from ..levels.decodes import search_name
from ..levels.result import ParityResult, Sample
from ..levels.sanity import spread_rows

SAMPLES, APART = 5, 2  # sources to show, and how many of them with different outputs
IDS = 24  # token ids shown of a source or an output without text


def samples_of(result: ParityResult, corpus: Corpus, fp32: Fp32Outputs) -> tuple[Sample, ...]:
    """Sources spread over all lengths, some with different outputs, in the widest completed search, against fp32; if
    that was not decoded, against the baseline.
    """
    searches = [options for options in corpus.searches if search_name(options) in result.finished_searches]
    if not searches:
        return ()
    options, name = searches[-1], search_name(searches[-1])
    if result.cost is not None and not result.cost.failure:
        whose, expected = fp32.name, dict(enumerate(fp32.outputs(options, corpus)))
    else:
        whose, expected = result.baseline, corpus.outputs[result.baseline, name]
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
    """For sources given as ids: their tokens, if the bundle has a tokenizer."""
    source = corpus.sources[row]
    if isinstance(source, FeatureSource):
        return f"{'image' if source.features.ndim == 3 else 'audio'} {row}"
    if not corpus.bundle.takes_text:
        return ids_text(source)
    return cut_text(corpus.tokenizer.source_tokens(source[: IDS + 1]))


def target_text(corpus: Corpus, tokens: Sequence[int]) -> str:
    return corpus.tokenizer.decode_target(tokens) if corpus.bundle.takes_text else ids_text(tokens)


def ids_text(ids: Sequence[int]) -> str:
    return cut_text([str(token) for token in ids])


def cut_text(words: Sequence[str]) -> str:
    return " ".join([*words[:IDS], *(["..."] if len(words) > IDS else [])])
