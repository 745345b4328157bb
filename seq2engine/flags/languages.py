"""The flags for languages, the same for every command that decodes or scores."""

from __future__ import annotations

import argparse


def add_languages(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--from", dest="source_language", metavar="LANG", help="source language, as the model names it")
    sub.add_argument("--to", dest="target_language", metavar="LANG", help="target language, as the model names it")


def add_strict(sub: argparse.ArgumentParser) -> None:
    what = "report a line with unknown characters as an error, instead of decoding them as <unk> with a warning"
    sub.add_argument("--strict", action="store_true", help=what)
