"""`seq2engine score`: log-probabilities and perplexity of given targets, line by line and of the whole corpus."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.commands.run import lines_from_input, print_precision, progress_of_file
from seq2engine.flags.languages import add_languages, add_strict
from seq2engine.flags.precision import print_default_precision
from seq2engine.flags.shared import Commands, add_backend, add_bundle, add_command, backend_settings

if TYPE_CHECKING:
    from seq2engine.runtime.text.scoring import ScoredLine
    from seq2engine.runtime.translator import Translator


def add_parser(commands: Commands) -> None:
    summary = "score given outputs: log-probability and perplexity of lines of source<TAB>target"
    sub = add_command(commands, "score", run_score, summary)
    add_bundle(sub)
    add_backend(sub)
    add_score_flags(sub)


def add_score_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--input", type=Path, help="file of lines in UTF-8 (default: standard input)")
    sub.add_argument("--ids", action="store_true", help="both sides are token ids, although the bundle takes text")
    add_languages(sub)
    add_strict(sub)
    sub.add_argument("--batch", type=int, default=32, help="maximum lines scored together (default: %(default)s)")
    sub.add_argument("--json", action="store_true", help="print one JSON object per line, token by token")


def run_score(args: argparse.Namespace) -> int:
    """Prints total log-probability, tokens and perplexity of every line, and of the corpus to the error output.

    A target of text is scored with its end token, after the forced first token where the model has one; ids
    are taken as they are. An empty line, or one that cannot be scored, is an empty line of the output.
    """
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.profiles import Workload
    from seq2engine.model.tokenizers.base import unknown_text
    from seq2engine.runtime.encoder_inputs import check_takes_text
    from seq2engine.runtime.translator import load

    bundle = open_bundle(args.bundle)
    check_takes_text(bundle.config, bundle.root)
    failed, scored, tokens, total = False, 0, 0, 0.0
    with (
        lines_from_input(args.input, instead="--input FILE") as lines,
        load(bundle, **backend_settings(args), workload=Workload(beam=1), ids=args.ids) as model,
    ):
        print_default_precision(args, bundle, model.session.precision, f"{args.backend} runs")
        print_precision(args, model)
        progress, size = progress_of_file(args.input, args.quiet)
        for one in model.score_lines(
            lines,
            source_language=args.source_language,
            target_language=args.target_language,
            batch=args.batch,
            strict=args.strict,
        ):
            if one.error is not None:
                failed = True
                print(f"line {one.line.number}: {one.error}", file=sys.stderr)
            elif one.unknown:
                print(f"line {one.line.number}: {unknown_text(one.unknown)}", file=sys.stderr)
            if one.score is not None:
                scored, tokens, total = scored + 1, tokens + len(one.score.tokens), total + one.score.total
            shown = json_of(one, model) if args.json else plain_of(one)
            sys.stdout.buffer.write(f"{shown}\n".encode())
            sys.stdout.buffer.flush()
            progress("score", one.line.end / size)
    print(corpus_text(scored, tokens, total), file=sys.stderr)
    return 1 if failed else 0


def plain_of(one: ScoredLine) -> str:
    if one.score is None:
        return ""
    return f"{one.score.total:.6f}\t{len(one.score.tokens)}\t{one.score.perplexity:.6f}"


def json_of(one: ScoredLine, model: Translator) -> str:
    values: dict[str, Any] = {"line": one.line.number, **({"unknown": one.unknown} if one.unknown else {})}
    if one.error is not None:
        return json.dumps({**values, "error": one.error}, ensure_ascii=False)
    if one.score is None:
        return json.dumps({**values, "tokens": []})
    ids = one.score.tokens
    values |= {"total": one.score.total, "perplexity": one.score.perplexity}
    values["tokens"] = [{"id": token, "log_prob": value} for token, value in zip(ids, one.score.log_probs, strict=True)]
    if model.takes_text:
        for token, text in zip(values["tokens"], model.tokens([ids])[0], strict=True):
            token["token"] = text
    return json.dumps(values, ensure_ascii=False)


def corpus_text(scored: int, tokens: int, total: float) -> str:
    from seq2engine.runtime.text.scoring import perplexity_of

    if not tokens:
        return "corpus: nothing was scored"
    perplexity = perplexity_of(total, tokens)
    return f"corpus: {scored} lines, {tokens} tokens, log-probability {total:.6f}, perplexity {perplexity:.6f}"
