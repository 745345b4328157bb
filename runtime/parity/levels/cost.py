"""The cost of a precision: its outputs against those of fp32, source by source.

Budgets compare a precision with its own weights. What those weights lose against fp32 is another question: the one
that matters to users, because int4 can be computed without error and still change every output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import GraphError, RequestError
from seq2engine.export.artifact.bundle import Bundle

from ...numerics.teacher_forcing import Tokens
from ...opening import open_session
from ...quality.intervals import Rate, difference_text, rates_from_outputs
from ...quality.metrics import edit_distance
from ...search.options import SearchOptions
from .corpus import Corpus
from .decodes import search_name
from .divergence import first_difference
from .sanity import outputs_of


@dataclass(frozen=True)
class SearchCost:
    """One search of the candidate against fp32; `rates` where there are references."""

    search: str
    sources: int
    equal: int
    edit_rate: float  # tokens substituted, deleted or inserted, per token of fp32
    first_difference: float | None  # median step of the first difference; None if no output differs
    rates: tuple[Rate, ...] = ()

    @property
    def summary(self) -> str:
        text = f"{self.search}: {self.equal} of {self.sources} outputs equal"
        if self.first_difference is not None:
            text += (
                f", {self.edit_rate:.1%} of tokens edited, first difference at step {self.first_difference:g} (median)"
            )
        shown = [rate for rate in self.rates if "," not in rate.metric]  # those without stress are only in tables
        return text + "".join(f", {rate.metric} {difference_text(rate)}" for rate in shown)


@dataclass(frozen=True)
class Cost:
    """All searches of a candidate against `baseline`, which is fp32; `failure`: why nothing was compared."""

    baseline: str
    searches: tuple[SearchCost, ...] = ()
    failure: str = ""

    @property
    def nothing(self) -> bool:
        """Whether all outputs equal those of fp32."""
        return not self.failure and all(search.equal == search.sources for search in self.searches)

    @property
    def summary(self) -> str:
        if not self.searches:
            return self.failure or "not measured: no search came to its end"
        return "; ".join(search.summary for search in self.searches)


class Fp32Outputs:
    """The outputs of fp32, decoded once for all precisions of a bundle: by PyTorch if it is a baseline anyway, else by
    ONNX Runtime if the bundle has fp32 graphs, which is faster.
    """

    def __init__(self, bundle: Bundle, backend: str, provider: str | None, by_torch: bool):
        quick = backend == "onnxruntime" and "fp32" in bundle.precisions and not by_torch
        self.bundle, self.backend = bundle, "onnxruntime" if quick else "torch"
        self.provider = provider if quick else None
        self.kept: dict[tuple[str, int, Tokens], Tokens] = {}  # search, most tokens, source -> output

    @property
    def name(self) -> str:
        return "PyTorch fp32" if self.backend == "torch" else f"{self.backend} fp32"

    def cost(self, candidate: str, searches: Sequence[str], corpus: Corpus, progress: Progress = silent) -> Cost:
        """The cost of a candidate whose outputs of these searches are in the corpus."""
        chosen = [options for options in corpus.searches if search_name(options) in searches]
        self.keep(corpus)
        try:
            self.decode(chosen, corpus, progress)
        except (RequestError, GraphError) as error:  # requests were checked before: the fp32 graphs are wrong
            return Cost(self.name, failure=f"not measured, {self.name} stopped: {error}")
        return Cost(self.name, tuple(self.search_cost(candidate, options, corpus) for options in chosen))

    def keep(self, corpus: Corpus) -> None:
        """Reuses outputs that fp32 decoded as part of a comparison."""
        for options in corpus.searches:
            for row, tokens in corpus.outputs.get((self.name, search_name(options)), {}).items():
                self.kept[key_of(options, corpus.sources[row])] = tokens

    def decode(self, searches: Sequence[SearchOptions], corpus: Corpus, progress: Progress) -> None:
        """Decodes the sources that are missing."""
        missing = {
            options: rows
            for options in searches
            if (rows := [i for i, source in enumerate(corpus.sources) if key_of(options, source) not in self.kept])
        }
        if not missing:
            return
        with open_session(self.bundle, self.backend, "fp32", corpus.threads, provider=self.provider) as session:
            for done, (options, rows) in enumerate(missing.items()):
                progress("parity: fp32 for the cost", done / len(missing), search_name(options))
                for row, tokens in outputs_of(session, corpus.sources, rows, options, corpus.batch).items():
                    self.kept[key_of(options, corpus.sources[row])] = tokens
        progress("parity: fp32 for the cost", 1.0)

    def outputs(self, options: SearchOptions, corpus: Corpus) -> list[Tokens]:
        return [self.kept[key_of(options, source)] for source in corpus.sources]

    def search_cost(self, candidate: str, options: SearchOptions, corpus: Corpus) -> SearchCost:
        search = search_name(options)
        theirs = corpus.outputs[candidate, search]
        pairs = [(ours, theirs[row]) for row, ours in enumerate(self.outputs(options, corpus))]
        apart = [(ours, other) for ours, other in pairs if ours != other]
        edits = sum(edit_distance(other, ours) for ours, other in apart)
        rates: tuple[Rate, ...] = ()
        if corpus.references is not None:
            sides = [corpus.texts(dict(enumerate(side))) for side in zip(*pairs, strict=True)]
            rates = rates_from_outputs(search, sides[0], sides[1], corpus.references, corpus.metrics)
        return SearchCost(
            search,
            len(pairs),
            len(pairs) - len(apart),
            edits / max(1, sum(len(ours) for ours, _ in pairs)),
            median(first_difference(*pair) for pair in apart) if apart else None,
            rates,
        )


def key_of(options: SearchOptions, source: Sequence[int]) -> tuple[str, int, Tokens]:
    return search_name(options), options.max_length, tuple(source)
