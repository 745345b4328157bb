"""The encoder on the CPU: sources of similar length together, large batches in several calls, memory returned when
the batch size changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec

from ..encoder_inputs import groups_by_padding
from ..threads import EncoderLock
from .binding import OrtState, bind_input, bind_output
from .graphs import run_bound
from .memory import HELD, LARGE, finite, giving_back, trim


@dataclass(frozen=True)
class Part:
    """One encoder call: rows of a batch, padded to the longest of them."""

    rows: np.ndarray
    width: int


class Encoder:
    """`lock` serialises decodes that share it, each with all threads; None: they run concurrently.

    `window` is the only length of a source, of audio, else 0. A call is then one window, so every call needs the same
    memory, and the next one finds it.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        inner: int,
        even: int,
        lock: EncoderLock | None,
        window: int = 0,
    ):
        self.session, self.spec, self.lock = session, spec, lock
        self.most_held = max(LARGE, window * inner)
        self.inner = inner  # the largest width of an activation
        self.even = even  # columns of a call are a multiple of this, up to the batch's width

    def __call__(self, source: np.ndarray, source_mask: np.ndarray) -> OrtState:
        """ids [B,S] or features [B,mels,2S], and mask [B,S] -> a state of the encoder's outputs.

        Outputs at padded places are undefined and must be masked.
        """
        state = OrtState(source_mask=np.array(source_mask, order="C"))
        sizes = dict(zip("BS", source_mask.shape, strict=True))
        for tensor in self.spec.outputs:
            state[tensor.name] = finite(tensor.shape(sizes), tensor.dtype)
        given = {**state, self.spec.inputs[0].name: np.ascontiguousarray(source)}
        parts = self.parts_of(source_mask)
        most = max(len(part.rows) * part.width for part in parts) * self.inner
        fits = HELD.fits(len(source_mask), most, self.most_held)
        with nullcontext() if self.lock is None else self.lock.held():
            for part in parts:
                self.encode_part(given, part, giving_back() if part is parts[-1] and not fits else None)
        if not fits:
            trim()
        return state

    def parts_of(self, mask: np.ndarray) -> list[Part]:
        """Divides the rows of a batch into calls with little padding and limited size.

        One call for a large batch is no faster than several, and its working memory exceeds its outputs.
        """
        longest = mask.shape[1]
        if len(mask) == 1:
            return [Part(np.zeros(1, dtype=np.int64), longest)]
        lengths = longest - mask[:, ::-1].argmax(axis=1)  # a row without any source keeps all columns
        widths = np.minimum(-(-lengths // self.even) * self.even, longest)
        parts = []
        for group in groups_by_padding(widths.tolist()):
            width, rows = int(widths[group].max()), np.sort(group)
            most = max(1, LARGE // (width * self.inner))
            parts += [Part(rows[first : first + most], width) for first in range(0, len(rows), most)]
        return parts

    def encode_part(self, given: dict[str, np.ndarray], part: Part, options: ort.RunOptions | None) -> None:
        """Writes some sources' rows of a state: in place where they are neighbours and of full width."""
        first, last = int(part.rows[0]), int(part.rows[-1])
        if part.width == given["source_mask"].shape[1] and last - first == len(part.rows) - 1:
            self.run({name: array[first : last + 1] for name, array in given.items()}, options)
            return
        sizes = {"B": len(part.rows), "S": part.width}
        cut = {
            tensor.name: np.ascontiguousarray(given[tensor.name][part.rows, : part.width])
            for tensor in self.spec.inputs
        }
        for tensor in self.spec.outputs:
            cut[tensor.name] = np.empty(tensor.shape(sizes), tensor.dtype)
        self.run(cut, options)
        for tensor in self.spec.outputs:
            array = cut[tensor.name]
            place: tuple[np.ndarray | slice, ...] = (part.rows, *map(slice, array.shape[1:]))
            given[tensor.name][place] = array

    def run(self, arrays: dict[str, np.ndarray], options: ort.RunOptions | None) -> None:
        binding = self.session.io_binding()
        for tensor in self.spec.inputs:
            bind_input(binding, tensor.name, arrays[tensor.name])
        for tensor in self.spec.outputs:
            bind_output(binding, tensor.name, arrays[tensor.name])
        run_bound(self.session, binding, options)
