"""Decodes text with the engines of this package: a line in, a line out.

    python decode.py "some text" "more"      or      python decode.py < lines.txt > outputs.txt

Beam search, if the model's own default is one or --beam asks for it, is that of the library the model comes from.
A package without a tokenizer takes and gives token ids, such as `17 4 250`. Exit code 1: a line could not be decoded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from package_files import PackageError, load_for, read_engines, read_package

# First: it reports in one line what is not installed.
# isort: split
from beam import beams_for, decoded_by_beam
from cuda_memory import Cuda, CudaError
from model_engines import ModelEngines
from tokenizer import Tokenizer, read_tokenizer
from trt_engine import EngineFailed


def main(argv: Sequence[str] | None = None, cudart: Any = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Decodes text with the engines of this package.")
    parser.add_argument("text", nargs="*", help="(default: the lines of the standard input)")
    parser.add_argument("--flavour", help="which engines, where there are several (see the folder engines)")
    parser.add_argument("--beam", type=int, metavar="K", help="beams; 1 is greedy (default: the model's own)")
    parser.add_argument("--max-length", type=int, help="tokens of an output at most (default: the model's own)")
    parser.add_argument("--from", dest="source_language", metavar="LANG", help="the text's language")
    parser.add_argument("--to", dest="target_language", metavar="LANG", help="the language to translate to")
    args = parser.parse_args(argv)
    for name in ("beam", "max_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}, expected at least 1")
    try:
        package = read_package()
        beams, note = beams_for(package, args.beam)
        if note:
            print(note, file=sys.stderr)
        tokenizer = read_tokenizer(package)
        first = None if args.target_language is None else tokenizer.language_id(args.target_language)
        folder, built = read_engines(package, args.flavour)
        trt = load_for(built)
        sources, wrong = read_sources(args.text or sys.stdin.buffer, tokenizer, package, args.source_language)
        with Cuda(cudart) as cuda, ModelEngines(package, cuda, trt, folder, built) as model:
            outputs = decoded_by_beam(model, [one for one in sources if one], beams, first, args.max_length)
            for source in sources:
                print(tokenizer.decode(next(outputs)) if source else "", flush=True)
    except (PackageError, EngineFailed, CudaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if wrong else 0


def read_sources(
    lines: Iterable[str | bytes], tokenizer: Tokenizer, package: Any, language: str | None
) -> tuple[list[list[int]], int]:
    """The ids of every line, none of one that is empty or wrong; and how many were wrong, each reported on stderr."""
    sources: list[list[int]] = []
    wrong, empty = 0, tokenizer.encode("", language)
    for number, line in enumerate(lines, 1):
        sources.append([])
        try:
            text = line if isinstance(line, str) else text_from_bytes(line)
            ids = tokenizer.encode(text, language) if text.strip() else empty
            if ids == empty:  # the tokenizer found no token in it
                continue
            sources[-1] = checked_source(ids, package)
            if tokenizer.unknown in ids:
                print(f"line {number}: the model has no token for some of it, decoded as <unk>", file=sys.stderr)
        except PackageError as error:
            print(f"error: line {number}: {error}", file=sys.stderr)
            wrong += 1
    return sources, wrong


def text_from_bytes(line: bytes) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise PackageError(f"byte {error.start + 1} is not UTF-8; save the input as UTF-8") from error


def checked_source(ids: list[int], package: Any) -> list[int]:
    longest, vocab = package["ranges"][0]["source"]["max"], package["model"]["source_vocab"]
    if len(ids) > longest:
        raise PackageError(f"{len(ids)} tokens, at most {longest} are supported; shorten it")
    if wrong := [token for token in ids if not 0 <= token < vocab]:
        raise PackageError(f"token {wrong[0]}, but the vocabulary has 0 to {vocab - 1}")
    return ids


if __name__ == "__main__":
    sys.exit(main())
