"""Random command lines from the parser itself: every command, every option, right and wrong values."""

from __future__ import annotations

import argparse
from functools import cache
from random import Random

from seq2engine.cli.main import make_parser

from .hashes import TRAINING

PATHS = (
    "text/bundle",
    "text/checkpoint",
    "texts/pairs.tsv",
    "texts/corpus.txt",
    "texts/gate.json",
    "nowhere",
    "made",
    ".",
    "",
)
VALUES = (
    "0", "1", "2", "3", "-1", "4,5", "4 5", "1:2:3", "3:2:1", "0.5", "nan", "inf", "1e999", "abc", "", " ", "é",
    "a\udcffb", "fp32", "w8a8", "fp16", "auto", "torch", "onnxruntime", "tensorrt", "cpu", "cuda", "sm89", "true",
    "never", "999999999", "99999999999999999999", "1x1x4x4", "shipped:g2p", "random:tiny", "x" * 3000, "../x", "--",
    "512M", "characters", "errors", "huggingface", "ctranslate2",
)  # fmt: skip
# Options that keep a case short come last, so that they win; the demo is minutes whatever it is given.
SHORT = {
    "train": f"{TRAINING} --epochs 1 --minutes 0.02 --batch-tokens 64",
    "parity": "--count 2 --max-length 3 --beam 2",
    "bench": "--rounds 1 --quick --case 1x1x3x3",
    "plan": "--count 2",
    "package": "--batch 1 --beam 1",
    "serve": "--host 203.0.113.1",  # of no machine (RFC 5737): it ends where it would begin to listen
    "build": "--batch 1 --beam 1 --source-length 1:4:4 --max-length 1:4:4",
}  # fmt: skip
LEFT_OUT = ("demo",)
RARE = {"package": 0.05, "bench": 0.1, "export": 0.15, "parity": 0.15, "build": 0.2}  # seconds each


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    found = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: parser for name, parser in found.choices.items() if name not in LEFT_OUT}


def random_arguments(rng: Random) -> tuple[list[str], str]:
    names = list(parsers())
    name = rng.choices(names, [RARE.get(n, 1.0) for n in names])[0]
    words: list[str] = []
    actions = parsers()[name]._actions
    options = [action for action in actions if action.option_strings and action.dest not in ("help", "version")]
    for action in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3, 5)))):
        words += [rng.choice(action.option_strings), *values_of(rng, action)]
    places = [word for action in actions if not action.option_strings for word in places_of(rng, action)]
    words = [*places, *words] if rng.random() < 0.7 else [*words, *places]
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice((*VALUES, "--nonsense", "-x")))
    argv = [name, *words, "--quiet", *SHORT.get(name, "").split()]
    return argv, "arguments"


def values_of(rng: Random, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.choices and rng.random() < 0.7:
        return [str(rng.choice(list(action.choices)))]
    pool = PATHS if "Path" in repr(action.type) and rng.random() < 0.8 else VALUES
    many = rng.choice((1, 1, 1, 2, 0)) if action.nargs in ("+", "*") else 1
    return [rng.choice(pool) for _ in range(many)]


def places_of(rng: Random, action: argparse.Action) -> list[str]:
    """What stands without a flag: mostly what the command wants."""
    right = {"bundle": "text/bundle", "checkpoint": "made", "source": "text/checkpoint", "data": "texts/pairs.tsv"}
    right |= {"corpus": "texts/corpus.txt", "out": "made", "text": "abc", "bundles": "text/bundle"}
    right |= {"repository": "made", "name": "hf:a/b"}
    if action.metavar == "AUDIO":
        right["text"] = "speech/sound.wav"
    if action.nargs in ("?", "*") and rng.random() < 0.3:
        return []
    known = right.get(action.dest, "text/bundle")
    return [known if rng.random() < 0.85 else rng.choice((*PATHS, *VALUES))]
