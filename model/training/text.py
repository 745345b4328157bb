"""Text to a trained checkpoint: reads pairs of lines, numbers their symbols, trains, writes model and report.

OUT.training/   the state after the last whole step; the same command goes on from it
OUT/            config.json  model.safetensors  tokenizer/  reports/training.{html,json}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.about import about_rows
from seq2engine.common.atomic_folders import check_replaceable, new_folder, sha256_of
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError

from ..checkpoint import CONFIG, WEIGHTS, write_checkpoint
from ..config import ModelConfig
from ..pairs import read_pairs
from ..tokenizers.base import FOLDER as TOKENIZER
from ..tokenizers.symbols import SymbolTokenizer, table_from_texts
from .data import Pair
from .delivered import Delivered, delivered_from_model
from .loop import TrainOptions, initial_model, train_model
from .report import History, training_html

# Defaults of a training; vocabularies come from the data.
DEFAULTS: dict[str, Any] = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "heads": 4,
    "d_model": 256,
    "d_ff": 1024,
    "norm": "pre",
    "positions": "sinusoidal",
    "activation": "relu",
    "dropout": 0.1,
    "max_source": 128,
    "max_target": 128,
}


@dataclass(frozen=True)
class TextOptions:
    """How a line becomes symbols, on each side."""

    source_split: str = "words"
    target_split: str = "words"
    lower: bool = False  # of the source


@dataclass(frozen=True)
class Trained:
    """The result of a training. `dev_loss` and `exact_match` are those of the averaged weights."""

    checkpoint: Path
    state: Path
    parameters: int
    epochs: int
    minutes: float
    dev_loss: float
    exact_match: float
    last_epoch_dev_loss: float  # before averaging
    last_epoch_exact_match: float
    averaged: int  # epochs
    left_out: int  # pairs longer than the model's limits

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "checkpoint": str(self.checkpoint), "state": str(self.state)})


@dataclass(frozen=True)
class TextData:
    """Parallel text as a training takes it: what fits the model, numbered."""

    tokenizer: SymbolTokenizer
    config: ModelConfig
    train: list[Pair]
    dev: list[Pair]
    dev_texts: list[tuple[str, str]]  # of the pairs of `dev`
    left_out: int  # pairs of the training data that are too long


def train_from_text(
    train: Path,
    dev: Path,
    out: Path,
    sizes: Mapping[str, Any],
    text: TextOptions,
    options: TrainOptions,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
) -> Trained:
    """Trains a model on parallel text. `sizes` are fields of ModelConfig to be other than DEFAULTS.

    `command` is the command line that asked for it, for the report.
    """
    check_replaceable(out, force, CONFIG)
    data = data_from_files(train, dev, sizes, text)
    state = out.with_name(out.name + ".training")
    model = initial_model(data.config, options.seed)
    history = train_model(model, data.train, data.dev, state, options, progress, force)
    progress("measure the averaged weights", 0.0)
    delivered = delivered_from_model(model, data.tokenizer, data.dev_texts, data.dev)
    progress("measure the averaged weights", 1.0, f"exact match {delivered.exact_match:.1%}")
    last = [entry for entry in history if "dev_loss" in entry][-1]
    result = Trained(
        checkpoint=out,
        state=state,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=int(last["epoch"]) + 1,
        minutes=last["seconds"] / 60,
        dev_loss=delivered.dev_loss,
        exact_match=delivered.exact_match,
        last_epoch_dev_loss=last["dev_loss"],
        last_epoch_exact_match=last["exact_match"],
        averaged=min(options.average, int(last["epoch"]) + 1),
        left_out=data.left_out,
    )
    with new_folder(out, force, marker=CONFIG) as beside:
        write_checkpoint(model, beside)
        (beside / TOKENIZER).mkdir()
        data.tokenizer.write(beside / TOKENIZER)
        shape = f"{data.config.shape}, {result.parameters:,} parameters"
        about = about_rows(out.name, shape, sha256_of(beside / WEIGHTS), command)
        page = training_html(history, out.name, data.config, options, delivered, about)
        write_reports(beside / "reports", page, about, options, delivered, history)
    return result


def data_from_files(train: Path, dev: Path, sizes: Mapping[str, Any], text: TextOptions) -> TextData:
    """Reads both files; symbols of the training data become the vocabularies."""
    texts = {"train": read_pairs(train), "dev": read_pairs(dev)}
    for name, path in (("train", train), ("dev", dev)):
        if not texts[name]:
            raise RequestError(f"the {name} data ({path}) is empty; expected pairs of lines")
    tokenizer = SymbolTokenizer(
        table_from_texts((source for source, _ in texts["train"]), text.source_split, text.lower),
        table_from_texts((target for _, target in texts["train"]), text.target_split),
    )
    config = ModelConfig(
        **{**DEFAULTS, **sizes},
        source_vocab=len(tokenizer.source.symbols),
        target_vocab=len(tokenizer.target.symbols),
        share_embeddings=False,
    )
    numbered = {name: numbered_pairs(pairs, tokenizer) for name, pairs in texts.items()}
    fitting = {name: [pair for pair in pairs if fits(pair, config)] for name, pairs in numbered.items()}
    for name, kept in fitting.items():
        if not kept:
            limits = f"{config.max_source} source and {config.max_target} target tokens"
            raise RequestError(f"no pair of the {name} data fits {limits}; raise --source-length and --max-length")
    dev_texts = [text for text, pair in zip(texts["dev"], numbered["dev"], strict=True) if fits(pair, config)]
    left_out = len(numbered["train"]) - len(fitting["train"])
    return TextData(tokenizer, config, fitting["train"], fitting["dev"], dev_texts, left_out)


def write_reports(
    folder: Path,
    page: str,
    about: Sequence[tuple[str, str]],
    options: TrainOptions,
    delivered: Delivered,
    history: History,
) -> None:
    """training.html, and training.json with its numbers."""
    folder.mkdir()
    (folder / "training.html").write_text(page, encoding="utf-8")
    values = {
        "about": dict(about),
        "options": dataclasses.asdict(options),
        "delivered": dataclasses.asdict(delivered),
        "history": history,
    }
    (folder / "training.json").write_text(json.dumps(values, indent=1))


def numbered_pairs(pairs: Sequence[tuple[str, str]], tokenizer: SymbolTokenizer) -> list[Pair]:
    return [(tokenizer.encode_source(source), tokenizer.encode_target(target)) for source, target in pairs]


def fits(pair: Pair, config: ModelConfig) -> bool:
    return len(pair[0]) <= config.max_source and len(pair[1]) <= config.max_target
