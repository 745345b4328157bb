"""Training: teacher forcing with label-smoothed cross-entropy, Adam with the paper's schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import ConfigError, RequestError

from ..checkpoint import build_model
from ..config import ModelConfig
from ..layers import append_slots
from ..tokenizers.symbols import END, PAD, START
from ..transformer import Embedding, Transformer
from .data import Batch, Pair, batch_from_pairs, batch_order
from .state import Cursor, FlatParameters, TrainingFiles


@dataclass(frozen=True)
class TrainOptions:
    """How to train. The learning rate is the paper's, times `rate`; `average` is over that many epochs' weights.

    With a `cooldown` the learning rate falls to zero over that many last epochs, in a straight line.
    """

    epochs: int = 20
    batch_tokens: int = 8000
    warmup: int = 2000
    rate: float = 1.0
    label_smoothing: float = 0.1
    clip: float = 1.0
    average: int = 5
    cooldown: int = 0
    seed: int = 0
    minutes: float | None = None  # stop after the step that passes this, with what has been learnt by then

    def __post_init__(self) -> None:
        problems = [
            f"{name.replace('_', ' ')} {getattr(self, name)}, expected more than 0"
            for name in ("epochs", "batch_tokens", "warmup", "rate", "clip", "average")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.cooldown <= self.epochs:
            problems.append(f"cooldown {self.cooldown}, expected 0 to the epochs {self.epochs}")
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"label smoothing {self.label_smoothing}, expected 0 to below 1")
        if problems:
            raise ConfigError("training options: " + "; ".join(problems))


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
            assert isinstance(embedding, Embedding), "models of audio are imported, not trained"
            embedding.tokens.weight.normal_(0.0, config.d_model**-0.5, generator=generator)
            if isinstance(embedding.positions, nn.Parameter):
                embedding.positions.normal_(0.0, 0.02, generator=generator)
        for distances in (model.encoder_distances, model.decoder_distances):
            if distances is not None:
                distances.table.zero_()  # attention starts without a distance bias
    return model


def train_model(
    model: Transformer,
    train: Sequence[Pair],
    dev: Sequence[Pair],
    folder: Path,
    options: TrainOptions,
    progress: Progress = silent,
    force: bool = False,
) -> list[dict[str, float]]:
    """Trains a model in place and leaves it with averaged weights, ready to run; resumes what `folder` holds.

    A state of another training is refused or, with `force`, replaced.

    Returns the history: training loss every 50 steps, validation loss and exact match every epoch, each with the
    learning rate at that step.
    """
    check_batch_tokens(train, options.batch_tokens)
    flat = FlatParameters(model)
    about = {**dataclasses.asdict(options), **dataclasses.asdict(model.config), "data": fingerprint(train)}
    del about["minutes"]
    if not options.cooldown:  # without a cooldown, a run may be extended
        del about["epochs"]
    files = TrainingFiles(folder, flat, about, force)
    training = Training(model, flat, files, options, progress)
    while training.cursor.epoch < options.epochs and not training.out_of_time:
        training.epoch(train, dev)
    progress("train", 1.0, training.quality.removeprefix("; "))
    flat.state[0] = files.average()
    model.eval()
    return files.history()


class Training:
    """A training under way: its cursor is that of the last step on disk."""

    def __init__(
        self,
        model: Transformer,
        flat: FlatParameters,
        files: TrainingFiles,
        options: TrainOptions,
        progress: Progress,
    ):
        self.model, self.flat, self.files, self.options, self.progress = model, flat, files, options, progress
        self.cursor = files.cursor
        self.begun = time.monotonic() - self.cursor.seconds
        self.pace = Pace()
        self.quality = ""  # of the last epoch, for the progress line
        self.out_of_time = False

    def epoch(self, train: Sequence[Pair], dev: Sequence[Pair]) -> None:
        """The rest of an epoch, or as much as there is time for, and what it gave on the dev set."""
        order = batch_order(train, self.options.batch_tokens, self.options.seed + self.cursor.epoch)
        self.model.train()
        for i in range(self.cursor.batch, len(order)):
            self.step(batch_from_pairs([train[j] for j in order[i]]), i, len(order))
            if self.out_of_time:
                break
        cursor, files = self.cursor, self.files
        files.save_epoch(cursor.epoch, self.options.average)
        self.model.eval()
        dev_loss, exact = validate(self.model, dev)
        files.note(step=cursor.step, epoch=cursor.epoch, seconds=cursor.seconds, dev_loss=dev_loss, exact_match=exact)
        self.quality = f"; after epoch {cursor.epoch + 1}: dev loss {dev_loss:.3f}, exact match {exact:.1%}"
        self.cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, batch=0)
        files.point_at(self.cursor)

    def step(self, batch: Batch, number: int, count: int) -> None:
        """One update with a batch, by its number among those of the epoch; it is on disk afterwards."""
        options, last = self.options, self.cursor
        left = options.epochs - last.epoch - number / count
        share = min(1.0, left / options.cooldown) if options.cooldown else 1.0
        rate = learning_rate(options, self.model.config.d_model, last.step + 1, share)
        loss = train_step(self.model, self.flat, batch, last.step + 1, options, rate)
        seconds = time.monotonic() - self.begun
        self.cursor = Cursor(1 - last.slot, last.step + 1, last.epoch, number + 1, seconds)
        self.files.save(self.cursor)
        if self.cursor.step % 50 == 0:
            self.files.note(step=self.cursor.step, epoch=last.epoch, seconds=seconds, loss=loss, rate=rate)
        done = (last.epoch + (number + 1) / count) / options.epochs
        if options.minutes is not None:
            self.out_of_time = seconds > 60 * options.minutes
            done = max(done, seconds / (60 * options.minutes))
        speed = self.pace.of(batch.tokens)
        status = f"epoch {last.epoch + 1} of {options.epochs}, loss {loss:.3f}, {speed:,.0f} tokens/s"
        self.progress("train", min(done, 0.999), status + self.quality)


def fingerprint(pairs: Sequence[Pair]) -> str:
    """A hash of all ids in their order: other data makes another training."""
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(np.array([*source, -1, *target, -2], dtype=np.int32).tobytes())
    return digest.hexdigest()


class Pace:
    """Tokens per second, over the last steps rather than since the start, so that it follows the machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.seen = deque([(clock(), 0)], maxlen=50)

    def of(self, tokens: int) -> float:
        now, total = self.clock(), self.seen[-1][1] + tokens
        self.seen.append((now, total))
        then, before = self.seen[0]
        return (total - before) / max(now - then, 1e-9)


def check_batch_tokens(pairs: Sequence[Pair], batch_tokens: int) -> None:
    """Refuses batches that the longest pair does not fit: it would be trained on in a larger batch than asked for."""
    longest = max(len(source) + len(target) for source, target in pairs)
    if batch_tokens < longest:
        raise RequestError(
            f"--batch-tokens {batch_tokens}, but the longest pair has {longest} tokens; give {longest} or more, or "
            "leave long pairs out with --source-length and --max-length"
        )


def learning_rate(options: TrainOptions, d_model: int, step: int, share: float = 1.0) -> float:
    """The paper's: up in a straight line for `warmup` steps, then down with the root of the step; times a share."""
    return share * options.rate * d_model**-0.5 * min(step**-0.5, step * options.warmup**-1.5)


def train_step(
    model: Transformer, flat: FlatParameters, batch: Batch, step: int, options: TrainOptions, rate: float
) -> float:
    """One update at that learning rate. Dropout is drawn from the step's own seed, so a resumed step is the same."""
    torch.manual_seed(options.seed * 1_000_003 + step)
    loss = loss_of(model, batch, options.label_smoothing)
    loss.backward()
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
        slots = torch.arange(position + 1).expand(rows, -1) if model.config.relative else None
        logits, cache = model.decode_step(tokens, at, at, mask, source_mask, cross, cache, append_slots, slots)
        tokens = logits.argmax(dim=-1)
        chosen.append(tokens)
    return [row[: row.index(END) + 1] if END in row else row for row in torch.cat(chosen, dim=1).tolist()]
