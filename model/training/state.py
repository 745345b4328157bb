"""The state of a training on disk: a kill at any moment loses only the running step.

All weights and both moments of Adam live in flat arrays. After every step they are copied into one of two slots of a
file that is mapped into memory, and a small cursor file is then replaced to point at that slot: killed at any moment,
training goes on from the last whole step, and to the same result as if it had never stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.inner_paths import place_inside
from seq2engine.common.json_files import parse_json, read_object, read_text, typed_from_json
from seq2engine.errors import RequestError

from ..checkpoint import write_weights

BETAS, EPSILON = (0.9, 0.98), 1e-9  # the paper's


@dataclass(frozen=True)
class Cursor:
    """The progress of a training: the slot that holds the last whole step, and the batch that comes next."""

    slot: int = 0
    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


class FlatParameters:
    """A model's weights and gradients as two flat arrays that its parameters are views of, with Adam's moments."""

    def __init__(self, model: nn.Module):
        parameters = list(model.parameters())  # a tied weight comes once
        count = sum(parameter.numel() for parameter in parameters)
        self.state = torch.zeros(3, count)  # weights, first moment, second moment
        self.grads = torch.zeros(count)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            self.state[0, start:end] = parameter.detach().flatten()
            parameter.data = self.state[0, start:end].view_as(parameter)
            parameter.grad = self.grads[start:end].view_as(parameter)
            start = end

    def adam(self, rate: float, step: int, clip: float) -> None:
        """One step of Adam on the gradients, clipped to that norm; the gradients are zero afterwards."""
        weights, first, second = self.state
        norm = float(self.grads.norm())
        if norm > clip:
            self.grads.mul_(clip / norm)
        first.lerp_(self.grads, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(self.grads, self.grads, value=1 - BETAS[1])
        spread = second.div(1 - BETAS[1] ** step).sqrt_().add_(EPSILON)
        weights.addcdiv_(first, spread, value=-rate / (1 - BETAS[0] ** step))
        self.grads.zero_()


class TrainingFiles:
    """The files of one training in a folder: state.bin (two slots), cursor.json, history.jsonl, epochs/.

    A state of other data or options is refused, or with `force` removed: training starts over.
    """

    def __init__(self, folder: Path, flat: FlatParameters, about: dict[str, Any], force: bool = False):
        self.folder, self.flat = folder, flat
        known = place_inside(folder.parent, folder.name, "about.json")
        if known.is_file() and not self.is_of(known, about, force):
            shutil.rmtree(folder)
        if known.is_file():
            self.check_files()
        else:
            (folder / "epochs").mkdir(parents=True, exist_ok=True)
            self.allocate(folder / "state.bin", 2 * flat.state.nbytes)
            np.memmap(folder / "state.bin", np.float32, "r+", shape=(2, *flat.state.shape))[0] = flat.state.numpy()
            self.point_at(Cursor())
            with new_file(known) as beside:  # last: from here on the folder can be resumed
                beside.write_text(json.dumps(about))
        self.slots = np.memmap(folder / "state.bin", np.float32, "r+", shape=(2, *flat.state.shape))
        self.cursor = self.read_cursor()
        flat.state.copy_(torch.from_numpy(np.array(self.slots[self.cursor.slot])))
        kept = [entry for entry in self.history() if entry["step"] <= self.cursor.step]
        done = {entry["epoch"] for entry in kept if "dev_loss" in entry}
        if self.cursor.epoch and self.cursor.epoch - 1 not in done:
            lost = f"{folder / 'history.jsonl'} lacks epoch {self.cursor.epoch - 1}, which cursor.json has as done"
            raise RequestError(f"{lost}; delete {folder} to start over")
        with new_file(folder / "history.jsonl") as beside:  # a step that is run again is noted again
            beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def is_of(self, known: Path, about: dict[str, Any], force: bool) -> bool:
        """Whether the state in the folder is of this training; what is neither that nor to be replaced is refused."""
        try:
            same = bool(read_object(known) == about)
        except (OSError, ValueError) as error:
            if not force:
                raise RequestError(f"{known} cannot be used ({error}); {self.advice}") from error
            return False
        if not same and not force:
            raise RequestError(f"{self.folder} was begun with other data or options; {self.advice}")
        return same

    @property
    def advice(self) -> str:
        return "name another folder, or add --force to start over"

    def check_files(self) -> None:
        """What is written in place must be ours: no links, and of the size that this model needs."""
        size, expected = 0, 2 * self.flat.state.nbytes
        for name in ("state.bin", "cursor.json", "history.jsonl", "epochs"):
            place_inside(self.folder, name)
        path = self.folder / "state.bin"
        if path.is_file():
            size = path.stat().st_size
        if size != expected:
            raise RequestError(f"{path} has {size:,} bytes, expected {expected:,}; {self.advice}, after deleting it")

    def read_cursor(self) -> Cursor:
        path = self.folder / "cursor.json"
        try:
            cursor = typed_from_json(Cursor, read_object(path))
            if cursor.slot not in (0, 1) or min(cursor.step, cursor.epoch, cursor.batch) < 0:
                raise ValueError(f"slot {cursor.slot}, step {cursor.step}, epoch {cursor.epoch}, batch {cursor.batch}")
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} cannot be used ({error}); delete {self.folder} to start over") from error
        return cursor

    def allocate(self, file: Path, size: int) -> None:
        """Allocates the whole file at once: if the disk filled up under a memory map, the process would be killed."""
        try:
            with file.open("wb") as opened:
                opened.truncate(size)
                if hasattr(os, "posix_fallocate"):  # not everywhere
                    os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            shutil.rmtree(self.folder)
            raise OSError(error.errno, error.strerror, str(self.folder)) from error

    def save(self, cursor: Cursor) -> None:
        """Makes this the last whole step."""
        self.slots[cursor.slot] = self.flat.state.numpy()
        self.point_at(cursor)
        self.cursor = cursor

    def point_at(self, cursor: Cursor) -> None:
        with new_file(self.folder / "cursor.json") as beside:
            beside.write_text(json.dumps(dataclasses.asdict(cursor)))

    def note(self, **entry: float) -> None:
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def history(self) -> list[dict[str, float]]:
        path = self.folder / "history.jsonl"
        if not path.is_file():
            return []
        try:
            lines = read_text(path).split("\n")[:-1]  # a line without its end was cut off by a kill
            entries = [typed_from_json(dict[str, float], parse_json(line)) for line in lines]
            if lost := [name for entry in entries for name in needed_in(entry) if name not in entry]:
                raise ValueError(f"an entry without {lost[0]}")
        except ValueError as error:
            raise RequestError(f"{path} cannot be used ({error}); delete {self.folder} to start over") from error
        return entries

    def save_epoch(self, epoch: int, keep: int) -> None:
        """Keeps the weights of the last `keep` epochs."""
        with new_file(self.folder / "epochs" / f"{epoch:04d}.safetensors") as beside:
            write_weights({"weights": self.flat.state[0]}, beside)
        for old in sorted((self.folder / "epochs").glob("*.safetensors"))[:-keep]:
            old.unlink()

    def average(self) -> Tensor:
        """The mean of the kept epochs' weights."""
        kept = sorted((self.folder / "epochs").glob("*.safetensors"))
        if not kept:
            raise RequestError(f"{self.folder / 'epochs'} holds no weights; delete {self.folder} to start over")
        return torch.stack([self.weights_of(path) for path in kept]).mean(dim=0)

    def weights_of(self, path: Path) -> Tensor:
        try:
            weights = load_file(path)["weights"]
        except (SafetensorError, OSError, KeyError) as error:
            raise RequestError(f"{path} cannot be read ({error}); delete {self.folder} to start over") from error
        if weights.shape != self.flat.grads.shape:
            raise RequestError(f"{path} holds {list(weights.shape)} weights, expected {list(self.flat.grads.shape)}")
        return weights


def needed_in(entry: Mapping[str, float]) -> tuple[str, ...]:
    """What an entry of the history must have: one of a step has a loss, one of an epoch what was measured after it."""
    measured = "dev_loss" in entry or "loss" not in entry
    return ("step", "epoch", "seconds", *(("dev_loss", "exact_match") if measured else ()))
