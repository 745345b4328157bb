"""The encoder on the CPU: large batches in several calls, and memory given back where batches change."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec

from ..threads import Turns
from .binding import OrtState, bind_input, bind_output
from .graphs import run_bound
from .memory import HELD, LARGE, giving_back, trim, zeros


class Encoder:
    """`turns`: decodes that share it use it one after another, each with all threads; None: at the same time."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, inner: int, turns: Turns | None):
        self.session, self.spec, self.turns = session, spec, turns
        self.inner = inner  # the most numbers a position becomes

    def __call__(self, source: np.ndarray, source_mask: np.ndarray) -> OrtState:
        """ids [B,S] or features [B,mels,2S], and mask [B,S] -> a state of the encoder's outputs."""
        state = OrtState(source_mask=np.array(source_mask, order="C"))
        sizes = dict(zip("BS", source_mask.shape, strict=True))
        for tensor in self.spec.outputs:
            state[tensor.name] = zeros(tensor.shape(sizes), tensor.dtype)
        given = {**state, self.spec.inputs[0].name: np.ascontiguousarray(source)}
        fits = HELD.fits(source_mask.size * self.inner)
        # A large batch in several calls: one call is no faster, and its working memory exceeds its outputs.
        batch, length = source_mask.shape
        rows = max(1, LARGE // (length * self.inner))
        with nullcontext() if self.turns is None else self.turns.taken():
            for first in range(0, batch, rows):
                part = {name: array[first : first + rows] for name, array in given.items()}
                last = first + rows >= batch
                self.encode_part(part, giving_back() if last and not fits else None)
        if not fits:
            trim()
        return state

    def encode_part(self, part: dict[str, np.ndarray], options: ort.RunOptions | None) -> None:
        """Writes some sources' rows of a state in place."""
        binding = self.session.io_binding()
        for tensor in self.spec.inputs:
            bind_input(binding, tensor.name, part[tensor.name])
        for tensor in self.spec.outputs:
            bind_output(binding, tensor.name, part[tensor.name])
        run_bound(self.session, binding, options)
