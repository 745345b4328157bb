"""The sessions of a parity run: candidates, PyTorch in fp64 and at each precision, and the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from seq2engine.errors import GraphError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.profiles import Workload
from seq2engine.export.contract import oracle_of

from ..backends import with_defaults
from ..defaults import defaults_of
from ..encoder_inputs import listed_sources
from ..opening import open_session
from ..session import Session
from ..text.sources import FEWEST_SOURCES, sample_of
from .levels.baseline import Baseline
from .options import ParityOptions, beam_of


@dataclass(frozen=True)
class Compared:
    """A candidate, PyTorch in fp64 (the oracle) and PyTorch at the candidate's precision (the reference).

    `judges`, an oracle and a reference, measure the error that explains a divergence from the baseline, if these two
    are of another precision. With `excused`, outputs may differ from the baseline's as often as the reference's do.
    """

    oracle: Session
    reference: Session
    candidate: Session
    judges: tuple[Session, Session] | None = None
    excused: bool = False

    @property
    def three(self) -> tuple[Session, Session, Session]:
        return self.oracle, self.reference, self.candidate


class Sessions(ExitStack):
    """Opens every session once, and closes all of them."""

    def __init__(self, bundle: Bundle, backend: str, options: ParityOptions):
        super().__init__()
        self.bundle, self.backend, self.options = bundle, backend, options
        self.opened: dict[str, Session] = {}
        self.weights: dict[str, Any] = {}  # PyTorch sessions with the same weights share one model

    def torch(self, precision: str) -> Session:
        from ..torch_session import TorchSession, model_with_weights_of, weights_of

        if precision not in self.opened:
            whose = weights_of(precision)
            if whose not in self.weights:
                self.weights[whose] = model_with_weights_of(self.bundle, whose)
            session = TorchSession.from_bundle(self.bundle, precision, self.options.threads, model=self.weights[whose])
            self.opened[precision] = self.enter_context(with_defaults(session, self.bundle))
        return self.opened[precision]

    def compared(self, precision: str, baseline: Baseline) -> Compared:
        options = self.options
        candidate = self.enter_context(
            open_session(
                self.bundle,
                self.backend,
                precision,
                options.threads,
                options.engine,
                deterministic=options.deterministic,
                provider=options.provider,
                workload=Workload(beam=beam_of(options.beam, defaults_of(self.bundle)), target=options.max_length),
            )
        )
        own = (oracle_of(precision), precision)
        judges = None if baseline.judges == own else (self.torch(baseline.judges[0]), self.torch(baseline.judges[1]))
        excused = options.against is None and precision != "fp32"
        return Compared(self.torch(own[0]), self.torch(own[1]), candidate, judges, excused)

    def baseline(self, baseline: Baseline) -> Session:
        if baseline.backend == "torch" and baseline.bundle is self.bundle:
            return self.torch(baseline.precision)
        return self.enter_context(
            open_session(baseline.bundle, baseline.backend, baseline.precision, self.options.threads)
        )

    def take_quickest_threads(self, compared: Compared, sources: Sequence[Sequence[int]]) -> int:
        """Sets PyTorch's threads to the number asked for, or to the quickest, as long as these sessions are open."""
        import torch

        from ..torch_session import threads_of_torch
        from .torch_threads import take_quickest_threads

        if self.options.threads is not None:
            self.enter_context(threads_of_torch(self.options.threads))
            return self.options.threads
        self.callback(torch.set_num_threads, torch.get_num_threads())
        most = min(FEWEST_SOURCES, self.options.batch, compared.candidate.limits.batch or FEWEST_SOURCES)
        sample = sample_of(listed_sources(sources, self.bundle.config), most)
        with suppress(GraphError):  # a candidate that cannot run is reported when it is compared
            return take_quickest_threads(compared.three, sample)
        return torch.get_num_threads()
