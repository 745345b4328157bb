"""The encoder in ONNX Runtime: large batches in several calls, and memory given back where batches change."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec

from ..threads import Turns
from .binding import OrtState, bind_input, bind_output
from .memory import HELD, LARGE, giving_back, trim, zeros


class Encoder:
    """`turns`: decodes that share it use it one after another, each with all threads; None: at the same time."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, inner: int, on_cpu: bool, turns: Turns | None):
        self.session, self.spec, self.turns = session, spec, turns
        self.inner, self.on_cpu = inner, on_cpu  # inner: d_ff, the widest a token gets

    def __call__(self, source_ids: np.ndarray, source_mask: np.ndarray) -> OrtState:
        """ids int64 and mask bool [B,S] -> a state of the encoder's outputs."""
        state = OrtState(source_mask=np.array(source_mask, order="C"))
        sizes = dict(zip("BS", source_ids.shape, strict=True))
        for tensor in self.spec.outputs:
            state[tensor.name] = zeros(tensor.shape(sizes), tensor.dtype)
        given = {**state, "source_ids": np.ascontiguousarray(source_ids)}
        fits = not self.on_cpu or HELD.fits(source_ids.size * self.inner)
        # A large batch in several calls: one call is no faster, and its working memory exceeds its outputs.
        rows = max(1, LARGE // (source_ids.shape[1] * self.inner)) if self.on_cpu else len(source_ids)
        with nullcontext() if self.turns is None else self.turns.taken():
            for first in range(0, len(source_ids), rows):
                part = {name: array[first : first + rows] for name, array in given.items()}
                last = first + rows >= len(source_ids)
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
        self.session.run_with_iobinding(binding, options)
