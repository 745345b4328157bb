"""`seq2engine import`: a checkpoint of another library becomes one of ours."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from seq2engine.flags.shared import Commands, add_command, add_json, print_note, progress_for


def add_parser(commands: Commands) -> None:
    summary = "convert a checkpoint of Hugging Face, fairseq, OpenNMT-py or torch.nn"
    sub = add_command(commands, "import", run_import, summary)
    sub.add_argument("source", help="folder or file to read, or hf:NAME[@REVISION]: a model of the hub")
    sub.add_argument("checkpoint", type=Path, help="folder to write")
    sub.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    add_json(sub)


def run_import(args: argparse.Namespace) -> int:
    from seq2engine.model.importers.detect import import_checkpoint

    result = import_checkpoint(args.source, args.checkpoint, args.force, progress_for(args), partial(print_note, args))
    if args.json:
        print(result.to_json())
        return 0
    print(f"{result.kind}, {result.parameters:,} parameters: {result.checkpoint}")
    print(f"takes {'text' if result.takes_text else 'token ids only: no tokenizer was found beside the weights'}")
    if result.generation:
        print("decoding defaults: " + ", ".join(f"{name} {value}" for name, value in result.generation.items()))
    for note in result.notes:
        print(f"note: {note}")
    print(f"next: seq2engine export {result.checkpoint} BUNDLE")
    return 0
