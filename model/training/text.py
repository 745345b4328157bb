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
from .delivered import delivered_from_model
from .loop import TrainOptions, initial_model, train_model
from .report import training_html

# What training starts from where a user says nothing; vocabularies come from the data.
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
    """What a training has come to. `dev_loss` and `exact_match` are of the delivered weights, the averaged ones."""

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
    texts = {"train": read_pairs(train), "dev": read_pairs(dev)}
    for name, pairs in texts.items():
        if not pairs:
            raise RequestError(
                f"the {name} data ({train if name == 'train' else dev}) is empty; expected pairs of lines"
            )
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
    dev_texts = [text for text, pair in zip(texts["dev"], numbered["dev"], strict=True) if fits(pair, config)]
    for name, kept in fitting.items():
        if not kept:
            limits = f"{config.max_source} source and {config.max_target} target tokens"
            raise RequestError(f"no pair of the {name} data fits {limits}; raise --source-length and --max-length")
    state = out.with_name(out.name + ".training")
    model = initial_model(config, options.seed)
    history = train_model(model, fitting["train"], fitting["dev"], state, options, progress)
    progress("measure the averaged weights", 0.0)
    delivered = delivered_from_model(model, tokenizer, dev_texts, fitting["dev"])
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
        left_out=len(numbered["train"]) - len(fitting["train"]),
    )
    with new_folder(out, force, marker=CONFIG) as beside:
        write_checkpoint(model, beside)
        (beside / TOKENIZER).mkdir()
        tokenizer.write(beside / TOKENIZER)
        reports = beside / "reports"
        reports.mkdir()
        shape = f"{config.shape}, {result.parameters:,} parameters"
        about = about_rows(out.name, shape, sha256_of(beside / WEIGHTS), command)
        page = training_html(history, out.name, config, options, delivered, about)
        (reports / "training.html").write_text(page, encoding="utf-8")
        values = {
            "about": dict(about),
            "options": dataclasses.asdict(options),
            "delivered": dataclasses.asdict(delivered),
            "history": history,
        }
        (reports / "training.json").write_text(json.dumps(values, indent=1))
    return result


def numbered_pairs(pairs: Sequence[tuple[str, str]], tokenizer: SymbolTokenizer) -> list[Pair]:
    return [(tokenizer.encode_source(source), tokenizer.encode_target(target)) for source, target in pairs]


def fits(pair: Pair, config: ModelConfig) -> bool:
    return len(pair[0]) <= config.max_source and len(pair[1]) <= config.max_target
