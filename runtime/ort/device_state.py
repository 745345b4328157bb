"""A state on a device: small graphs on the same provider move its arrays, so that no cache is copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec, TensorSpec

from .binding import OrtState
from .device import Device, DeviceArray

if TYPE_CHECKING:
    import onnx

Maker = Callable[[Sequence[TensorSpec]], tuple["onnx.ModelProto", GraphSpec]]
Opener = Callable[["onnx.ModelProto"], ort.InferenceSession]


class Moves:
    """The device graphs of one session, each opened on first use."""

    def __init__(self, device: Device, opened: Opener):
        from seq2engine.export.device_graphs import gathers  # imported late: a session on the CPU needs no onnx

        self.device, self.opened, self.makers = device, opened, gathers
        self.graphs: dict[tuple[Maker, tuple[TensorSpec, ...]], tuple[ort.InferenceSession, GraphSpec]] = {}

    def run(
        self,
        maker: Maker,
        tensors: Sequence[TensorSpec],
        arrays: Mapping[str, DeviceArray],
        places: Mapping[str, np.ndarray],
    ) -> dict[str, DeviceArray]:
        """The tensors after a move, by their names. `places` are the indices, from the host."""
        key = (maker, tuple(tensors))
        if key not in self.graphs:
            model, spec = maker(tensors)
            self.graphs[key] = self.opened(model), spec
        session, spec = self.graphs[key]
        binding = session.io_binding()
        given = {**arrays, **{name: self.device.put(values) for name, values in places.items()}}
        sizes: dict[str, int] = {}
        for tensor in spec.inputs:
            array = given[tensor.name]
            letters = [
                (axis, size) for axis, size in zip(tensor.axes, array.shape, strict=True) if isinstance(axis, str)
            ]
            sizes.update(letters)
            self.device.bind_input(binding, tensor.name, array)
        moved = {}
        for tensor in spec.outputs:
            array = moved[tensor.name.removeprefix("new_")] = self.device.empty(tensor.shape(sizes), tensor.dtype)
            self.device.bind_output(binding, tensor.name, array)
        session.run_with_iobinding(binding)
        return moved


class DeviceMask:
    """The mask of steps that make it themselves [B,K,L], twice: a step reads one and writes the other."""

    def __init__(self, device: Device, shape: tuple[int, ...]):
        self.device, self.shape = device, shape
        self.latest, self.next = (device.empty(shape, "bool") for _ in range(2))
        self.own = np.arange(shape[1])
        self.places = {"beam": device.put(self.own), "slots": device.put(np.arange(shape[2]))}

    def bind_next(self, binding: ort.IOBinding, mask: np.ndarray | None) -> None:
        if mask is not None:
            self.device.write(self.latest, mask)
        self.device.bind_input(binding, "self_mask", self.latest)
        self.device.bind_output(binding, "new_self_mask", self.next)
        self.where = (*self.latest.place, *self.next.place, *(array.place for array in self.places.values()))
        self.latest, self.next = self.next, self.latest


class DeviceState(OrtState):
    """The arrays of one batch on a device."""

    memory: Device
    mask: DeviceMask | None = None
    chain: Any = None  # the chain of steps (chain.py), valid while its arrays stay

    def __init__(self, moves: Moves, arrays: Mapping[str, DeviceArray], kept: Sequence[TensorSpec]):
        super().__init__(arrays)
        self.moves, self.memory = moves, moves.device
        self.tensors = {tensor.name: tensor for tensor in kept}  # all sources

    @property
    def rows(self) -> int:
        return self["source_mask"].shape[0]

    def reserve(self, tensors: Iterable[TensorSpec], slots: int) -> None:
        """An empty cache: a cache of one zero slot, gathered to the requested length."""
        cache = list(tensors)
        device, self.bound, self.chain = self.moves.device, None, None
        self.tensors |= {tensor.name: tensor for tensor in cache}
        if not slots:
            sizes = {"B": self.rows, "L": 0}
            self.update({tensor.name: device.empty(tensor.shape(sizes), tensor.dtype) for tensor in cache})
            return
        nothing = {t.name: device.put(np.zeros(t.shape({"B": 1, "L": 1}), dtype=t.dtype)) for t in cache}
        places = {"rows": np.zeros(self.rows, dtype=np.int64), "slots": np.zeros((self.rows, slots), dtype=np.int64)}
        self.update(self.moves.run(self.moves.makers.gather_slots, cache, nothing, places))

    def kept_mask(self, shape: tuple[int, ...]) -> DeviceMask | None:
        if not self.decoder.form.keeps_mask:
            return None
        if self.mask is None or self.mask.shape != shape:
            self.mask = DeviceMask(self.memory, shape)
        return self.mask

    def attend(self, weights: Mapping[str, DeviceArray], types: Mapping[str, str]) -> None:
        for name, array in weights.items():
            self.tensors[name] = TensorSpec(name, types[name], ("B", array.shape[1], "K", "A"))
        self.update(weights)

    def select(self, cache: Sequence[TensorSpec], rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        self.bound = self.chain = None
        makers = self.moves.makers
        if slots is not None:
            taken = np.arange(self.rows) if rows is None else rows
            self.move(makers.gather_slots, cache, {"rows": taken, "slots": slots})
        if rows is not None:
            done = () if slots is None else cache
            self.move(makers.gather_rows, [one for one in self.tensors.values() if one not in done], {"rows": rows})

    def replace(self, kept: Iterable[TensorSpec], rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        self.bound = self.chain = None
        makers, tensors = self.moves.makers, list(kept)
        places = {
            "rows": makers.put_places(self.rows, rows),
            "columns": makers.put_columns(self["source_mask"].shape[1], width),
            "new_columns": makers.put_columns(newcomers["source_mask"].shape[1], width),
        }
        self.move(
            makers.put_rows, tensors, places, {f"put_{tensor.name}": newcomers[tensor.name] for tensor in tensors}
        )

    def move(
        self,
        maker: Maker,
        tensors: Sequence[TensorSpec],
        places: Mapping[str, np.ndarray],
        beside: Mapping[str, DeviceArray] | None = None,
    ) -> None:
        arrays = {tensor.name: self[tensor.name] for tensor in tensors}
        self.update(self.moves.run(maker, tensors, {**arrays, **(beside or {})}, places))


class DeviceEncoder:
    """The encoder, whose outputs stay on its device."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, moves: Moves):
        self.session, self.spec, self.moves = session, spec, moves
        self.kept = (spec.input("source_mask"), *spec.outputs)

    def __call__(self, source: np.ndarray, source_mask: np.ndarray) -> DeviceState:
        """ids [B,S] or features [B,mels,2S], and mask [B,S] -> a state of the encoder's outputs."""
        device, binding = self.moves.device, self.session.io_binding()
        arrays = {self.spec.inputs[0].name: device.put(source), "source_mask": device.put(source_mask)}
        sizes = dict(zip("BS", source_mask.shape, strict=True))
        for tensor in self.spec.inputs:
            device.bind_input(binding, tensor.name, arrays[tensor.name])
        for tensor in self.spec.outputs:
            array = arrays[tensor.name] = device.empty(tensor.shape(sizes), tensor.dtype)
            device.bind_output(binding, tensor.name, array)
        self.session.run_with_iobinding(binding)
        return DeviceState(self.moves, {tensor.name: arrays[tensor.name] for tensor in self.kept}, self.kept)
