"""Small models to hold parity on, and sessions that get something wrong."""

from __future__ import annotations

import dataclasses

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.parity.compare import parity_of_sessions
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import EVERYTHING
from seq2engine.runtime.text.sources import random_sources

SMALL = dataclasses.replace(PRESETS["tiny"], source_vocab=64, target_vocab=64, max_source=20, max_target=24)


def bundle_of(config, folder, form="static"):
    return onnx_from_model(random_model(config, 3), folder / "bundle", ("fp32", "fp16"), form)


def parity_with(bundle, candidate, count=16, max_length=10, sources=None, beam=4, batch=8):
    sources = sources or random_sources(bundle.config, count)
    options = ParityOptions(beam=beam, max_length=max_length, batch=batch)
    with (
        open_session(bundle, "torch", "fp64", threads=1) as oracle,
        open_session(bundle, "torch", candidate.precision, threads=1) as reference,
    ):
        return parity_of_sessions(oracle, reference, candidate, sources, options)


class Changed(OrtSession):
    """ONNX Runtime with something done to what comes out of it, or into it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.largest = 0

    def encode(self, source_ids, source_mask):
        self.largest = max(self.largest, len(source_ids))
        return self.encoded(super().encode(source_ids, source_mask), source_mask)

    def reserve(self, state, slots, form=EVERYTHING):
        super().reserve(state, slots, form)
        self.reserved(state)

    def step(self, state, tokens, position, write_index, self_mask):
        logits = super().step(state, tokens, position, write_index, self_mask).logits
        self.answered(logits, position)
        return StepOutput(logits)

    def encoded(self, state, mask):
        return state

    def reserved(self, state):
        pass

    def answered(self, logits, position):
        pass


def changed(bundle, precision="fp32", **methods):
    """A session with some of the methods at the end of `Changed` replaced."""
    kind = type("Changed", (Changed,), {name: staticmethod(method) for name, method in methods.items()})
    return kind.from_bundle(bundle, precision, threads=1)
