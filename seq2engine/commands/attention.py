"""`seq2engine attention`: the cross-attention weights of one decode, as a page of heat maps."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from seq2engine.flags.languages import add_languages, add_strict
from seq2engine.flags.lists import MOST_PRECISE
from seq2engine.flags.shared import Commands, add_bundle, add_command, add_json, add_threads, progress_for


def add_parser(commands: Commands) -> None:
    summary = "show the cross-attention weights of one decode, every layer and head, as HTML"
    sub = add_command(commands, "attention", run_attention, summary)
    add_bundle(sub)
    sub.add_argument("text", help='a line of text, or of token ids such as "17 4 250" where the model takes no text')
    sub.add_argument("--target", metavar="TEXT", help="output to show the weights for (default: the decoded one)")
    sub.add_argument("--ids", action="store_true", help="lines are token ids, although the bundle takes text")
    add_languages(sub)
    sub.add_argument("--beam", type=int, help="beams; 1 is greedy (default: the model's own, else 1)")
    sub.add_argument("--precision", help=f"one of the bundle's (default: {MOST_PRECISE})")
    sub.add_argument("--max-length", type=int, help="maximum output tokens (default: the model's maximum)")
    add_strict(sub)
    sub.add_argument("--out", type=Path, help="folder or file of the report (default: BUNDLE/reports)")
    add_threads(sub)
    add_json(sub)


def run_attention(args: argparse.Namespace) -> int:
    from seq2engine.common.about import about_rows
    from seq2engine.common.reports import report_files
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.model.tokenizers.base import unknown_text
    from seq2engine.runtime.attention.report import attention_html, attention_text
    from seq2engine.runtime.encoder_inputs import check_takes_text
    from seq2engine.runtime.translator import load

    bundle = open_bundle(args.bundle)
    check_takes_text(bundle.config, bundle.root)
    files = report_files(bundle.root, "attention", out=args.out)
    import_module("torch")  # the weights are compared with PyTorch's; without it, nothing is decoded first
    with load(bundle, precision=args.precision, threads=args.threads, ids=args.ids) as model:
        view = model.attention(
            args.text,
            args.target,
            source_language=args.source_language,
            target_language=args.target_language,
            strict=args.strict,
            progress=progress_for(args),
            beam=args.beam,
            max_length=args.max_length,
        )
    if view.unknown:
        print(f"the text has {unknown_text(view.unknown)}", file=sys.stderr)
    about = about_rows(
        bundle.root.resolve().name, bundle.config.shape, bundle.manifest.checkpoint_sha256, args.command_line
    )
    files.write(attention_html(view, about), view.to_json())
    print(view.to_json().rstrip() if args.json else f"{attention_text(view)}\nreport: {files.page}")
    return 0 if view else 1
