"""Both sides of a parity against references: their scores, and whether the candidate's fall beyond the interval."""

from __future__ import annotations

import dataclasses

from ...opening import open_session
from ...quality.intervals import Rate, rates_from_outputs
from ...quality.metrics import Quality, quality_from_outputs
from .corpus import Corpus
from .decodes import search_name
from .result import ParityResult
from .sanity import LINES, fallen, outputs_of, quality_doubts, spread_rows


def with_quality(result: ParityResult, corpus: Corpus, against: bool) -> ParityResult:
    """With the scores of both sides in every search that came to its end, and a doubt for each score that falls."""
    if corpus.references is None:
        return result
    quality: dict[str, tuple[Quality, ...]] = {}
    rates: tuple[Rate, ...] = ()
    for search in result.finished_searches:
        names = (result.speaker, result.candidate)
        sides = [corpus.texts(corpus.outputs[name, search]) for name in names]
        for name, side in zip(names, sides, strict=True):
            quality[name] = (*quality.get(name, ()), quality_from_outputs(search, side, corpus.references))
        rates += rates_from_outputs(search, sides[0], sides[1], corpus.references, corpus.metrics)
    result = dataclasses.replace(result, quality=quality, rates=rates)
    if not fallen(rates):
        return result
    own = None if against or result.precision == "fp32" else own_rates(result, corpus)
    doubts = quality_doubts(rates, own, f"PyTorch {result.precision}")
    return dataclasses.replace(result, doubts=(*result.doubts, *doubts))


def own_rates(result: ParityResult, corpus: Corpus) -> list[Rate]:
    """The candidate's scores against those of PyTorch at the same precision, on some of the lines, in the searches in
    which they fall: what falls for PyTorch as well is the precision's doing, and its cost is told elsewhere.
    """
    assert corpus.references is not None
    texts, rows = list(corpus.references), spread_rows(len(corpus.sources), LINES)
    chosen = {texts[row]: corpus.references[texts[row]] for row in rows}
    falling = {rate.search for rate in fallen(result.rates)}
    found: list[Rate] = []
    with open_session(corpus.bundle, "torch", result.precision, corpus.threads) as session:
        for options in corpus.searches:
            if (search := search_name(options)) in falling:
                own = outputs_of(session, corpus.sources, rows, options, corpus.batch)
                sides = [corpus.texts(said, rows) for said in (own, corpus.outputs[result.candidate, search])]
                found += rates_from_outputs(search, sides[0], sides[1], chosen, corpus.metrics)
    return found
