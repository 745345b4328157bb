"""Cases by number: which material, which file of it, what is wrong with it, and the command that reads it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from .arguments import random_arguments
from .byte_mutations import mutated_bytes, mutated_path, planted_folder
from .hashes import TRAINING, mend_hashes
from .json_mutations import mutated_json

Argv = list[str]


@dataclass(frozen=True)
class Case:
    """One command over mutated files. `of_file`: whether a file is mutated, or only the command line is random."""

    number: int
    what: str
    argv: tuple[str, ...]
    of_file: bool = True


@dataclass(frozen=True)
class Material:
    """Files that belong together, and the commands that read them: (weight, argv) with paths relative to them."""

    name: str
    weight: float
    patterns: tuple[str, ...]  # of the files that are mutated
    commands: tuple[tuple[float, str], ...]


BUNDLE = (
    (8, "run bundle abc --quiet"),
    (2, "run bundle abc --deterministic --quiet"),
    (1, "run bundle abc --beam 3 --nbest 2 --scores --alignments --json --quiet"),
    (1, "run bundle abc --backend torch --quiet"),
    (1, "run bundle abc --shortlist 4,5,6,7 --quiet"),
    (1, "run bundle abc --backend tensorrt --quiet"),
    (5, "inspect bundle"),
    (3, "inspect bundle --json"),
    (2, "inspect bundle --check"),
    (1, "inspect bundle --html"),
    (2, "score bundle --input ../texts/pairs.tsv --quiet"),
    (1, "attention bundle abc --quiet"),
    (1, "plan ../texts/corpus.txt bundle --count 2 --quiet"),
)
HEAVY = (  # seconds each
    (0.10, "run bundle abc --precision auto --quiet"),
    (0.05, "run bundle abc --precision fp32 --draft w8a8 --quiet"),
    (0.05, "run bundle abc --precision fp32 --draft quantised --quiet"),
    (0.12, "parity bundle --precision fp32 --count 2 --max-length 4 --quiet"),
    (0.05, "parity bundle --precision fp32 --backend torch --count 2 --max-length 4 --quiet"),
    (0.05, "parity bundle --precision fp32 --count 2 --max-length 4 --locate --quiet"),
    (0.06, "export --add fp16 bundle --quiet"),
    (0.05, "export checkpoint bundle --force --quiet"),
    (0.03, "build bundle --precision fp32 --gpu sm89 --no-engine-cache --name new --quiet"),
    (0.03, "package bundle made --precision fp32 --quiet"),
    (0.03, "bench bundle --quick --rounds 1 --case 1x1x4x4 --precision fp32 --quiet"),
    (0.3, "bench compare bundle bundle"),
)
IMPORT = ((1.0, "import . made --quiet"), (0.03, "export . made --precision fp32 --quiet"))
MATERIALS = (
    Material("text", 30, ("bundle/**/*",), (*BUNDLE, *HEAVY)),
    Material("text", 8, ("bundle/*.json", "bundle/engines/*/*.json", "bundle/tokenizer/*"), BUNDLE),
    Material("text", 1.5, ("checkpoint/**/*",), ((1, "export checkpoint made --precision fp32 --quiet"),)),
    Material("pieces", 6, ("bundle/tokenizer/*",), ((3, "run bundle abc --quiet"), (1, "inspect bundle --check"))),
    Material("speech", 3, ("bundle/*.json", "bundle/tokenizer/*"), ((1, "transcribe bundle sound.wav --quiet"),)),
    Material("speech", 3, ("sound.wav",), ((1, "transcribe bundle sound.wav --quiet"),)),
    Material("speech/library", 4, ("*",), IMPORT),
    Material("images", 3, ("bundle/*.json", "bundle/tokenizer/*"), ((1, "read bundle line.png --quiet"),)),
    Material("images", 4, ("line.*",), ((1, "read bundle FILE --quiet"),)),
    Material("images/library", 4, ("*",), IMPORT),
    *(Material(name, 5, ("*",), IMPORT) for name in ("marian", "bart", "t5", "shards", "fairseq", "opennmt", "torch")),
    Material("foreign", 2, ("*.onnx*",), ((1, "parity bundle --graph FILE --count 2 --max-length 3 --quiet"),)),
    Material("texts", 3, ("before.json", "after.json"), ((1, "bench compare before.json after.json"),)),
    Material("texts", 2, ("gate.*",), ((1, "parity ../text/bundle --precision fp32 --count 2 --gate FILE"),)),
    Material("texts", 2, ("*.tsv", "*.txt"), (
        (1, "score ../text/bundle --input FILE --quiet"),
        (1, "run ../text/bundle --input FILE --quiet"),
        (1, "run ../text/bundle abc --trie FILE --quiet"),
        (1, "run ../text/bundle --input corpus.txt --prefixes FILE --quiet"),
        (1, "plan FILE ../text/bundle --count 2 --quiet"),
    )),
    Material("training", 4, ("model.training/*",), (
        (1, f"train ../texts/pairs.tsv model --dev ../texts/pairs.tsv {TRAINING} --quiet"),
    )),
    Material("texts", 2, ("pairs.tsv",), ((1, f"train FILE made --dev pairs.tsv {TRAINING} --quiet"),)),
)  # fmt: skip
LIGHT = ((1, "inspect ../text/bundle"),)  # where a material has no other command than slow ones
SLOW = ("parity", "export", "build", "package", "bench bundle", "train")
ARGUMENTS = 0.15  # share of cases that mutate the command line instead of a file


def prepared_case(seed: int, number: int, materials: Path, folder: Path, light: bool = False) -> Case:
    """Makes `folder`/in with the files of a case, `folder`/outside and `folder`/home beside it.

    `light` cases are milliseconds each: bundles and checkpoints are read, but no model is exported, built or measured.
    """
    rng = Random(f"{seed} {number}")
    for name in ("in", "outside", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "outside" / "kept").write_text("kept")
    shutil.copytree(materials / "texts", folder / "in" / "texts")
    if rng.random() < ARGUMENTS:
        shutil.copytree(materials / "text", folder / "in" / "text")
        argv, what = random_arguments(rng)
        return Case(number, what, tuple(argv), of_file=False)
    chosen = rng.choices(MATERIALS, [material.weight for material in MATERIALS])[0]
    if light:
        chosen = replace(chosen, commands=tuple(c for c in chosen.commands if not c[1].startswith(SLOW)) or LIGHT)
    return mutated_material(rng, number, chosen, materials, folder)


def mutated_material(rng: Random, number: int, material: Material, materials: Path, folder: Path) -> Case:
    place = folder / "in" / material.name
    if not place.exists():
        shutil.copytree(materials / material.name, place)
    if not (folder / "in" / "text").exists():
        shutil.copytree(materials / "text", folder / "in" / "text")
    command = rng.choices([argv for _, argv in material.commands], [weight for weight, _ in material.commands])[0]
    files = sorted(path for pattern in material.patterns for path in place.glob(pattern) if path.is_file())
    file = chosen_file(rng, files)
    if (place / "bundle").is_dir() and rng.random() < 0.02:
        what = planted_folder(rng, place / "bundle", folder / "outside")
    else:
        what = f"{file.relative_to(folder / 'in')}: {mutated_file(rng, file, folder / 'outside')}"
    if (place / "bundle").is_dir() and rng.random() < 0.9:
        mend_hashes(place / "bundle")
    name = str(file.relative_to(place))
    words = [name if word == "FILE" else word for word in command.split()]
    return Case(number, f"{material.name}: {what}", ("--in", material.name, *words))


def chosen_file(rng: Random, files: Sequence[Path]) -> Path:
    """JSON more often than others, engines (which are not loaded here) rarely."""
    weights = [4.0 if f.suffix == ".json" else 0.2 if f.suffix == ".engine" else 1.5 for f in files]
    return rng.choices(files, weights)[0]


def mutated_file(rng: Random, file: Path, outside: Path) -> str:
    """Changes a file in place; returns how. Lines to decode stay a file: from a pipe they may be read, too."""
    if rng.random() < 0.07 and file.suffix not in (".txt", ".tsv"):
        return mutated_path(rng, file, outside)
    content = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.9:
        change: Callable[[Random, bytes], bytes] = mutated_json
    elif file.name.endswith(("model.bin", ".pt")) and rng.random() < 0.25:
        from .pickle_mutations import mutated_pickle as change
    else:
        change = mutated_bytes
    file.write_bytes(change(rng, content))
    return change.__name__
