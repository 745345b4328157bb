"""Training: teacher forcing with label-smoothed cross-entropy, Adam with the paper's schedule, nothing lost to a kill.

All weights and both moments of Adam live in flat arrays. After every step they are copied into one of two slots of a
file that is mapped into memory, and a small cursor file is then replaced to point at that slot: killed at any moment,
training goes on from the last whole step, and to the same result as if it had never stopped.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from seq2engine.folders import new_file
from seq2engine.progress import Progress, silent

from ..errors import ConfigError, RequestError
from .checkpoint import build_model
from .config import ModelConfig
from .data import Batch, Pair, batch_from_pairs, batch_order
from .layers import append_slots
from .tokenizers.symbols import END, PAD, START
from .transformer import Transformer

BETAS, EPSILON = (0.9, 0.98), 1e-9  # the paper's


@dataclass(frozen=True)
class TrainOptions:
    """How to train. The learning rate is the paper's, times `rate`; `average` is over that many epochs' weights."""

    epochs: int = 20
    batch_tokens: int = 8000
    warmup: int = 2000
    rate: float = 1.0
    label_smoothing: float = 0.1
    clip: float = 1.0
    average: int = 5
    seed: int = 0
    minutes: float | None = None  # stop after the step that passes this, with what has been learnt by then

    def __post_init__(self) -> None:
        problems = [
            f"{name.replace('_', ' ')} {getattr(self, name)}, expected more than 0"
            for name in ("epochs", "batch_tokens", "warmup", "rate", "clip", "average")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"label smoothing {self.label_smoothing}, expected 0 to below 1")
        if problems:
            raise ConfigError("training options: " + "; ".join(problems))


@dataclass(frozen=True)
class Cursor:
    """Where training stands: the slot that holds the last whole step, and the batch that comes next."""

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
    """The files of one training in a folder: state.bin (two slots), cursor.json, history.jsonl, epochs/."""

    def __init__(self, folder: Path, flat: FlatParameters, about: dict[str, Any]):
        self.folder, self.flat = folder, flat
        known = folder / "about.json"
        if known.is_file():
            if json.loads(known.read_text()) != about:
                raise RequestError(f"{folder} was begun with other data or options; name another folder or add --force")
        else:
            (folder / "epochs").mkdir(parents=True, exist_ok=True)
            np.memmap(folder / "state.bin", np.float32, "w+", shape=(2, *flat.state.shape))[0] = flat.state.numpy()
            self.point_at(Cursor())
            with new_file(known) as beside:  # last: from here on the folder can be resumed
                beside.write_text(json.dumps(about))
        self.slots = np.memmap(folder / "state.bin", np.float32, "r+", shape=(2, *flat.state.shape))
        self.cursor = Cursor(**json.loads((folder / "cursor.json").read_text()))
        flat.state.copy_(torch.from_numpy(np.array(self.slots[self.cursor.slot])))
        kept = [entry for entry in self.history() if entry["step"] <= self.cursor.step]
        with new_file(folder / "history.jsonl") as beside:  # a step that is run again is noted again
            beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

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
        lines = path.read_text().split("\n")[:-1]  # a line without its end was cut off by a kill
        return [json.loads(line) for line in lines]

    def save_epoch(self, epoch: int, keep: int) -> None:
        """Keeps the weights of the last `keep` epochs."""
        with new_file(self.folder / "epochs" / f"{epoch:04d}.safetensors") as beside:
            save_file({"weights": self.flat.state[0]}, beside)
        for old in sorted((self.folder / "epochs").glob("*.safetensors"))[:-keep]:
            old.unlink()

    def average(self) -> Tensor:
        """The mean of the kept epochs' weights."""
        kept = sorted((self.folder / "epochs").glob("*.safetensors"))
        return torch.stack([load_file(path)["weights"] for path in kept]).mean(dim=0)


def initial_model(config: ModelConfig, seed: int) -> Transformer:
    """A model to start training from: variance-keeping weights, the same for a seed on every machine."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for embedding in (
            model.source_embedding,
            model.target_embedding,
        ):  # after the linear ones: the head may be tied
            embedding.tokens.weight.normal_(0.0, config.d_model**-0.5, generator=generator)
            if isinstance(embedding.positions, nn.Parameter):
                embedding.positions.normal_(0.0, 0.02, generator=generator)
    return model


def train_model(
    model: Transformer,
    train: Sequence[Pair],
    dev: Sequence[Pair],
    folder: Path,
    options: TrainOptions,
    progress: Progress = silent,
) -> list[dict[str, float]]:
    """Trains a model in place and leaves it with averaged weights, ready to run; resumes what `folder` holds.

    Returns the history: training loss every 50 steps, validation loss and exact match every epoch.
    """
    flat = FlatParameters(model)
    about = {**dataclasses.asdict(options), "minutes": None, "pairs": len(train), "weights": flat.state.shape[1]}
    files = TrainingFiles(folder, flat, about)
    cursor = files.cursor
    begun = time.monotonic() - cursor.seconds
    out_of_time = False
    while cursor.epoch < options.epochs and not out_of_time:
        order = batch_order(train, options.batch_tokens, options.seed + cursor.epoch)
        model.train()
        for i in range(cursor.batch, len(order)):
            batch = batch_from_pairs([train[j] for j in order[i]])
            loss = train_step(model, flat, batch, cursor.step + 1, options)
            seconds = time.monotonic() - begun
            cursor = Cursor(1 - cursor.slot, cursor.step + 1, cursor.epoch, i + 1, seconds)
            files.save(cursor)
            if cursor.step % 50 == 0:
                files.note(step=cursor.step, epoch=cursor.epoch, seconds=seconds, loss=loss)
            done = (cursor.epoch + (i + 1) / len(order)) / options.epochs
            if options.minutes is not None:
                out_of_time = seconds > 60 * options.minutes
                done = max(done, seconds / (60 * options.minutes))
            progress(f"train: epoch {cursor.epoch + 1} of {options.epochs}, loss {loss:.3f}", min(done, 0.999))
            if out_of_time:
                break
        files.save_epoch(cursor.epoch, options.average)
        model.eval()
        dev_loss, exact = validate(model, dev)
        files.note(step=cursor.step, epoch=cursor.epoch, seconds=cursor.seconds, dev_loss=dev_loss, exact_match=exact)
        progress(f"train: epoch {cursor.epoch + 1}: dev loss {dev_loss:.3f}, exact match {exact:.1%}", 1.0)
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, batch=0)
        files.point_at(cursor)
    flat.state[0] = files.average()
    model.eval()
    return files.history()


def train_step(model: Transformer, flat: FlatParameters, batch: Batch, step: int, options: TrainOptions) -> float:
    """One update. Dropout is drawn from the step's own seed, so a resumed step is the same step."""
    torch.manual_seed(options.seed * 1_000_003 + step)
    loss = loss_of(model, batch, options.label_smoothing)
    loss.backward()
    rate = options.rate * model.config.d_model**-0.5 * min(step**-0.5, step * options.warmup**-1.5)
    flat.adam(rate, step, options.clip)
    return float(loss.detach())


def loss_of(model: Transformer, batch: Batch, label_smoothing: float) -> Tensor:
    """Mean cross-entropy over the target tokens of a batch."""
    logits = model(batch.source, batch.source_mask, batch.inputs)
    return functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=PAD, label_smoothing=label_smoothing
    )


@torch.inference_mode()
def validate(model: Transformer, pairs: Sequence[Pair], batch: int = 256) -> tuple[float, float]:
    """Mean loss per token (no smoothing) and the share of pairs whose greedy decode is exactly the target."""
    loss = tokens = exact = 0.0
    for part in length_batches(pairs, batch):
        made = batch_from_pairs(part)
        count = int((made.targets != PAD).sum())
        loss += float(loss_of(model, made, 0.0)) * count
        tokens += count
        decoded = greedy_ids(model, made.source, made.source_mask, made.targets.shape[1] + 5)
        exact += sum(ids == target for ids, (_, target) in zip(decoded, part, strict=True))
    return loss / tokens, exact / len(pairs)


def length_batches(pairs: Sequence[Pair], size: int) -> Iterator[list[Pair]]:
    ordered = sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def greedy_ids(model: Transformer, source: Tensor, source_mask: Tensor, most: int) -> list[list[int]]:
    """Greedy decodes for validation, end token included where it was reached: plain PyTorch, growing cache."""
    rows = len(source)
    _, cross = model.encode(source, source_mask)
    empty = cross[0][0][:, :, :0]
    cache = [(empty, empty)] * len(model.decoder)
    tokens = torch.full((rows, 1), START)
    chosen = []
    for position in range(min(most, model.config.max_target)):
        mask = torch.ones(rows, 1, position + 1, dtype=torch.bool)
        at = torch.full((rows,), position)
        logits, cache = model.decode_step(tokens, at, at, mask, source_mask, cross, cache, append_slots)
        tokens = logits.argmax(dim=-1)
        chosen.append(tokens)
    return [row[: row.index(END) + 1] if END in row else row for row in torch.cat(chosen, dim=1).tolist()]
