"""`seq2engine train`: its flags, and the summary it prints at the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seq2engine.common.terminal import fresh_line
from seq2engine.flags.shared import Commands, add_command, add_threads, progress_for


def add_parser(commands: Commands) -> None:
    renamed = {"--max-source": "--source-length", "--max-target": "--max-length"}
    summary = "train a model on parallel text: TSV, or two aligned files"
    add_train_flags(add_command(commands, "train", run_train, summary, renamed))


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    where = "TSV of source and target, or PATH of two aligned files PATH.source and PATH.target"
    parser.add_argument("data", type=Path, help=where)
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    parser.add_argument(
        "--dev", type=Path, required=True, help="validation data in the same format, used after each epoch"
    )
    for side in ("source", "target"):
        help_text = "a token is a word between spaces, or a character (default: words)"
        parser.add_argument(f"--{side}-split", choices=("words", "characters"), default="words", help=help_text)
    parser.add_argument("--lower", action="store_true", help="lower-case the source, now and whenever it is decoded")
    for flag, kind, help_text in (
        ("--encoder-layers", int, "layers of the encoder (default: 3)"),
        ("--decoder-layers", int, "layers of the decoder (default: 3)"),
        ("--heads", int, "attention heads (default: 4)"),
        ("--d-model", int, "width (default: 256)"),
        ("--d-ff", int, "width of the feed-forward (default: 1024)"),
        ("--norm", str, "pre or post (default: pre)"),
        ("--positions", str, "sinusoidal, learned, rotary or relative (default: sinusoidal)"),
        ("--activation", str, "relu, gelu, gelu_tanh or silu (default: relu)"),
        ("--dropout", float, "share of activations dropped in training (default: 0.1)"),
    ):
        parser.add_argument(flag, type=kind, help=help_text)
    longest = "tokens that the model takes; longer pairs are left out (default: 128)"
    parser.add_argument("--source-length", dest="max_source", type=int, metavar="N", help=f"maximum source {longest}")
    parser.add_argument("--max-length", dest="max_target", type=int, metavar="N", help=f"maximum output {longest}")
    for flag, kind, help_text in (
        ("--epochs", int, "passes over the data (default: 20)"),
        ("--minutes", float, "stop after this many minutes and keep what was learnt"),
        ("--batch-tokens", int, "source and target tokens of a batch (default: 8000)"),
        ("--warmup", int, "steps until the learning rate is highest (default: 2000)"),
        ("--rate", float, "factor on the learning rate of the paper (default: 1)"),
        ("--label-smoothing", float, "probability spread over all tokens in the loss (default: 0.1)"),
        ("--clip", float, "gradient norm that is clipped to (default: 1)"),
        ("--average", int, "epochs whose weights are averaged (default: 5)"),
        (
            "--cooldown",
            int,
            "last epochs over which the learning rate falls to zero (default: 0, the paper's schedule)",
        ),
        ("--seed", int, "random seed (default: 0)"),
    ):
        parser.add_argument(flag, type=kind, help=help_text)
    add_threads(parser, "all cores")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run_train(args: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from seq2engine.model.training.loop import TrainOptions
    from seq2engine.model.training.text import DEFAULTS, TextOptions, train_from_text

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    given = {name: value for name, value in vars(args).items() if value is not None}
    fields = {field.name for field in dataclasses.fields(TrainOptions)}
    try:
        result = train_from_text(
            args.data,
            args.dev,
            args.checkpoint,
            sizes={name: given[name] for name in DEFAULTS if name in given},
            text=TextOptions(args.source_split, args.target_split, args.lower),
            options=TrainOptions(**{name: given[name] for name in fields if name in given}),
            force=args.force,
            progress=progress_for(args),
            command=args.command_line,
        )
    except KeyboardInterrupt:
        print(f"{fresh_line(sys.stderr)}interrupted; the same command resumes from the last step", file=sys.stderr)
        return 130
    if args.json:
        print(result.to_json())
        return 0
    left_out = f", {result.left_out} pairs too long and left out" if result.left_out else ""
    print(f"{result.parameters:,} parameters, {result.epochs} epochs in {result.minutes:.1f} minutes{left_out}")
    print(
        f"dev loss {result.dev_loss:.3f}, exact match {result.exact_match:.1%} (the weights of the checkpoint: mean of "
        f"the last {result.averaged} epochs; last epoch alone {result.last_epoch_exact_match:.1%})"
    )
    print(f"checkpoint: {result.checkpoint}\nreport: {result.checkpoint / 'reports' / 'training.html'}")
    print(f"state: {result.state} (to train further: more --epochs and --force; delete it when you are done)")
    return 0
