"""Both sides scored against references, and whether the candidate is significantly worse."""

from __future__ import annotations

import dataclasses

from ..opening import open_session
from ..quality.intervals import Rate, rates_from_outputs
from ..quality.metrics import Quality, quality_from_outputs
from .levels.corpus import Corpus
from .levels.decodes import search_name
from .levels.result import ParityResult
from .levels.sanity import LINES, outputs_of, quality_doubts, significantly_worse, spread_rows


def with_quality(result: ParityResult, corpus: Corpus, against: bool) -> ParityResult:
    """Adds the scores of both sides in every completed search, and a doubt for each that is significantly worse."""
    if corpus.references is None:
        return result
    quality: dict[str, tuple[Quality, ...]] = {}
    rates: tuple[Rate, ...] = ()
    for search in result.finished_searches:
        names = (result.baseline, result.candidate)
        sides = [corpus.texts(corpus.outputs[name, search]) for name in names]
        for name, side in zip(names, sides, strict=True):
            quality[name] = (*quality.get(name, ()), quality_from_outputs(search, side, corpus.references))
        rates += rates_from_outputs(search, sides[0], sides[1], corpus.references, corpus.metrics)
    result = dataclasses.replace(result, quality=quality, rates=rates)
    if not significantly_worse(rates):
        return result
    own = None if against or result.precision == "fp32" else own_rates(result, corpus)
    doubts = quality_doubts(rates, own, f"PyTorch {result.precision}")
    return dataclasses.replace(result, doubts=(*result.doubts, *doubts))


def own_rates(result: ParityResult, corpus: Corpus) -> list[Rate]:
    """The candidate's scores against those of PyTorch at the same precision, on some of the lines, in the searches that
    are significantly worse: what PyTorch loses as well is due to the precision, and is reported as its cost.
    """
    assert corpus.references is not None
    texts, rows = list(corpus.references), spread_rows(len(corpus.sources), LINES)
    chosen = {texts[row]: corpus.references[texts[row]] for row in rows}
    worse = {rate.search for rate in significantly_worse(result.rates)}
    found: list[Rate] = []
    with open_session(corpus.bundle, "torch", result.precision, corpus.threads) as session:
        for options in corpus.searches:
            if (search := search_name(options)) in worse:
                own = outputs_of(session, corpus.sources, rows, options, corpus.batch)
                sides = [corpus.texts(outputs, rows) for outputs in (own, corpus.outputs[result.candidate, search])]
                found += rates_from_outputs(search, sides[0], sides[1], chosen, corpus.metrics)
    return found
