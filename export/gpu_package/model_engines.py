"""The model on the GPU: its engines, the device memory of their inputs and outputs, and the decoder's cache.

Shapes: B sources, K beams, S source length, L cache slots, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cuda_memory import Cuda
from package_files import rebuild
from trt_engine import Engine

STORED = {"bfloat16": "uint16"}  # numpy has no such type: its bits

Places = dict[str, tuple[int, tuple[int, ...]]]  # tensor -> its address and shape


class ModelEngines:
    """Use with `with`: leaving the block closes the engines and gives their memory back.

    Memory is kept by name from call to call, so the results of a call stay valid until the next one.
    """

    def __init__(self, package: Any, cuda: Cuda, trt: Any, folder: Path, built: Any):
        self.package, self.cuda, self.graphs = package, cuda, package["graphs"]
        tensors = [t for graph in self.graphs.values() for t in graph["inputs"] + graph["outputs"]]
        self.dtypes = {t["name"]: t["dtype"] for t in tensors}
        self.memory: dict[str, tuple[int, int]] = {}  # name -> address and size
        self.engines: dict[str, Engine] = {}
        try:
            for name, graph in self.graphs.items():
                path = folder / built["engines"][name]["file"]
                self.engines[name] = Engine(trt, cuda, path, graph, rebuild(built))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ModelEngines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.engines = {}
        self.cuda.release()
        self.memory = {}

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> Places:
        """Runs the encoder on ids and mask [B,S]; where its inputs and outputs are, of which the decoder reads some."""
        given = {"source_ids": ids, "source_mask": mask}
        sizes = dict(zip("BS", ids.shape, strict=True))
        places: Places = {name: (self.uploaded(name, array), array.shape) for name, array in given.items()}
        for tensor in self.graphs["encoder"]["outputs"]:
            shape = shape_of(tensor, sizes)
            places[tensor["name"]] = (self.place(tensor["name"], self.nbytes(tensor["name"], shape)), shape)
        addresses = {name: address for name, (address, _) in places.items()}
        self.engines["encoder"].run({name: array.shape for name, array in given.items()}, addresses)
        self.cuda.wait()
        return places

    def step(self, encoded: Places, cache: Cache, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """One decoder step -> logits [B,K,V]. `given` are tokens [B,K], position [B], write_index [B] (which a growing
        cache has no use for), self_mask [B,K,slots attended to] and slot_position [B,slots attended to] (which only
        a model with relative positions has a use for)."""
        address, shape = self.queued_step(encoded, cache, given)
        self.cuda.wait()
        return self.downloaded("logits", address, shape)

    def best(self, encoded: Places, cache: Cache, given: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The same -> the best few tokens of every beam and their logits [B,K,C]. All logits stay on the GPU."""
        address, shape = self.queued_step(encoded, cache, given)
        addresses, shapes = {"logits": address}, {}
        for tensor in self.graphs["candidates"]["outputs"]:
            name = tensor["name"]
            shapes[name] = shape_of(tensor, dict(zip("BK", shape, strict=False)))
            addresses[name] = self.place(name, self.nbytes(name, shapes[name]))
        self.engines["candidates"].run({"logits": shape}, addresses)
        self.cuda.wait()
        tokens, logits = (self.downloaded(n, addresses[n], shapes[n]) for n in ("best_tokens", "best_logits"))
        return tokens, logits

    def queued_step(
        self, encoded: Places, cache: Cache, given: Mapping[str, np.ndarray]
    ) -> tuple[int, tuple[int, ...]]:
        """Queues one decoder step; where its logits will be, and their shape."""
        graph = self.graphs["decoder_step"]
        shapes, addresses = {}, {}
        for tensor in graph["inputs"]:
            name = tensor["name"]
            if name in given:
                shapes[name], addresses[name] = given[name].shape, self.uploaded(name, given[name])
            elif name in encoded:
                addresses[name], shapes[name] = encoded[name]
            else:
                addresses[name], shapes[name] = cache.read[name], cache.shape
        (spec,) = (t for t in graph["outputs"] if t["name"] == "logits")
        shape = shape_of(spec, dict(zip("BK", given["tokens"].shape, strict=True)))
        addresses["logits"] = self.place("logits", self.nbytes("logits", shape))
        addresses |= {f"new_{name}": cache.written[name] for name in cache.names}
        self.engines["decoder_step"].run(shapes, addresses)
        cache.advance()
        return addresses["logits"], shape

    def place(self, name: str, size: int) -> int:
        """The address of at least that much memory under a name; its content is lost when it has to grow."""
        address, room = self.memory.get(name, (0, -1))
        if size > room:
            if room >= 0:
                self.cuda.free(address)
            self.memory[name] = address, room = self.cuda.allocate(size), size
        return address

    def uploaded(self, name: str, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.place(name, array.nbytes)
        self.cuda.upload(array, address)
        return address

    def downloaded(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = self.dtypes[name]
        array = np.empty(shape, dtype=STORED.get(dtype, dtype))
        self.cuda.download(address, array)
        return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array

    def nbytes(self, name: str, shape: tuple[int, ...]) -> int:
        dtype = self.dtypes[name]
        return math.prod(shape) * np.dtype(STORED.get(dtype, dtype)).itemsize


class Cache:
    """The decoder's cache: one buffer a tensor that is updated in place, or two that change places in every step.

    A model has one at a time: the next takes over its memory.
    """

    def __init__(self, model: ModelEngines, batch: int, beams: int, steps: int):
        self.model, self.batch, self.beams = model, batch, beams
        self.static = model.package["cache_form"] == "static"
        graph = model.graphs["decoder_step"]
        outputs = {t["name"] for t in graph["outputs"]}
        tensors = [t for t in graph["inputs"] if f"new_{t['name']}" in outputs]
        self.names = [t["name"] for t in tensors]
        self.axes = tensors[0]
        self.length = model.package["slots"] if self.static else beams * steps
        self.steps = 0
        self.read = {name: self.buffer(name, name) for name in self.names}
        self.written = self.read
        if not self.static:
            self.written = {name: self.buffer(name, f"new_{name}") for name in self.names}

    def buffer(self, name: str, place: str) -> int:
        size = self.model.nbytes(name, self.shaped(self.length))
        address = self.model.place(place, size)
        self.model.cuda.clear(address, size)
        return address

    def shaped(self, length: int) -> tuple[int, ...]:
        return shape_of(self.axes, {"B": self.batch, "L": length})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each of its tensors, as the next step reads it."""
        return self.shaped(self.length if self.static else self.beams * self.steps)

    @property
    def attended(self) -> int:
        """Slots that the next step's mask is about."""
        return self.length if self.static else self.beams * (self.steps + 1)

    def advance(self) -> None:
        self.steps += 1
        self.read, self.written = self.written, self.read

    def array(self, name: str) -> np.ndarray:
        return self.model.downloaded(name, self.read[name], self.shape)


def shape_of(tensor: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor["axes"])
