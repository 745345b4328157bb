"""Cases by number: which material, which file of it, what is wrong with it, and the command that reads it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from .arguments import random_arguments
from .byte_mutations import mutated_bytes, mutated_path, planted_folder
from .cluster import CLUSTER
from .hashes import TRAINING, mend_hashes
from .json_mutations import mutated_json, mutated_json_line
from .message_mutations import KINDS as MESSAGES
from .message_mutations import mutated_message
from .safetensors_mutations import mutated_safetensors

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
    (1, "run bundle abc --shortlist '4 5 6 7' --quiet"),
    (1, "run bundle abc --backend tensorrt --quiet"),
    (5, "inspect bundle"),
    (3, "inspect bundle --json"),
    (2, "inspect bundle --check"),
    (1, "inspect bundle --html"),
    (2, "score bundle --input ../texts/pairs.tsv --quiet"),
    (1, "attention bundle abc --quiet"),
    (1, "plan ../texts/corpus.txt bundle --count 2 --quiet"),
    (1, "push bundle hf:a/b --dry-run --quiet"),
    (1, "triton bundle made --instances 1 --quiet"),
    (0.5, "triton bundle made --backend tensorrt --instances 1 --quiet"),
    (1, "serve bundle --host 203.0.113.1 --quiet"),  # of no machine: it ends where it would begin to listen
    (0.5, "refit bundle ../text/bundle --quiet"),
    (0.5, "run bundle --input ../cluster/corpus --out made --cluster local --shard 2 --quiet"),
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
    (0.05, "parity bundle --precision fp32 --against ../text/bundle --count 2 --max-length 4 --quiet"),
    (0.03, "inspect bundle --foreign-step ../foreign/decoder_model.onnx"),
)
TOKENIZER = (
    (3, "run bundle abc --quiet"),
    (1, "inspect bundle --check"),
    (1, "score bundle --input ../texts/pairs.tsv --quiet"),
)
SOUND = ((1, "transcribe bundle sound.wav --quiet"),)
IMPORT = ((1.0, "import . made --quiet"), (0.03, "export . made --precision fp32 --quiet"))
MATERIALS = (
    Material("text", 30, ("bundle/**/*",), (*BUNDLE, *HEAVY)),
    Material("text", 8, ("bundle/*.json", "bundle/engines/*/*.json", "bundle/tokenizer/*"), BUNDLE),
    Material("text", 1.5, ("checkpoint/**/*",), ((1, "export checkpoint made --precision fp32 --quiet"),)),
    Material("pieces", 5, ("bundle/tokenizer/*",), (*TOKENIZER, (1, "run bundle abc --from eng --to fra --quiet"))),
    *(Material(name, 1.5, ("bundle/tokenizer/*",), TOKENIZER) for name in ("words", "letters", "bytes")),
    Material("speech", 3, ("bundle/*.json", "bundle/tokenizer/*"), SOUND),
    Material("speech", 1, ("bundle/model.safetensors", "bundle/onnx/**/*"), SOUND),
    Material("speech", 4, ("sound.*",), ((1, "transcribe bundle FILE --quiet"),)),
    Material("speech/library", 4, ("*",), IMPORT),
    *(Material(name, 4, ("*",), IMPORT) for name in ("marian", "bart", "t5", "shards", "fairseq", "opennmt", "torch")),
    *(Material(name, 2, ("*",), IMPORT) for name in ("pegasus", "mbart", "pickled", "merges", "openai")),
    Material("hub-model", 2, ("*",), ((1, "import hf:a/b made --quiet"),)),
    Material("hub-bundle", 2, ("*", "tokenizer/*", "onnx/**/*"), (
        (1, "run hf:a/b abc --quiet"),
        (1, "push . hf:a/c --quiet"),
    )),
    Material("cluster", 3, ("corpus/*", "out/*.json", "out/shards/*/*"), (
        (1, f"run ../text/bundle --input corpus --out out {CLUSTER}"),
        (1, f"run ../text/bundle --input corpus --out made {CLUSTER}"),
    )),
    Material("triton", 1, ("repo/text/*",), (
        (1, "triton ../text/bundle repo --name text --instances 1 --force --quiet"),
    )),
    Material("images", 3, ("bundle/*.json", "bundle/tokenizer/*"), ((1, "read bundle line.png --quiet"),)),
    Material("images", 4, ("line.*",), ((1, "read bundle FILE --quiet"),)),
    Material("images/library", 4, ("*",), IMPORT),
    Material("foreign", 2, ("*.onnx*",), ((1, "parity bundle --graph FILE --count 2 --max-length 3 --quiet"),)),
    Material("texts", 3, ("before.json", "after.json"), ((1, "bench compare before.json after.json"),)),
    Material("texts", 2, ("gate.*",), ((1, "parity ../text/bundle --precision fp32 --count 2 --gate FILE"),)),
    Material("texts", 1, ("pairs.tsv",), (
        (1, "score ../text/bundle --input FILE --quiet"),
        (0.2, "parity ../text/bundle --precision fp32 --references FILE --max-length 4 --quiet"),
        (0.05, "bench ../text/bundle --quick --rounds 1 --natural 1x1 --precision fp32 --references FILE --quiet"),
    )),
    Material("texts", 2, ("corpus.txt",), (
        (1, "run ../text/bundle --input FILE --quiet"),
        (1, "run ../text/bundle abc --trie FILE --quiet"),
        (1, "run ../text/bundle --input corpus.txt --prefixes FILE --quiet"),
        (1, "plan FILE ../text/bundle --count 2 --quiet"),
        (0.1, "export ../text/checkpoint made --precision fp16 --calibrate FILE --quiet"),
        (0.05, "package ../text/bundle made --precision fp32 --texts FILE --quiet"),
    )),
    Material("texts", 0.5, ("*.token",), (
        (1, "serve ../text/bundle --host 203.0.113.1 --token-file FILE --quiet"),
    )),
    Material("texts", 1, ("aligned.*",), (
        (1, f"train aligned made --dev pairs.tsv {TRAINING} --quiet"),
    )),
    Material("foreign", 0.3, ("decoder_model.onnx",), (
        (1, "inspect ../text/bundle --foreign-step FILE"),
    )),
    Material("training", 4, ("model.training/*",), (
        (1, f"train ../texts/pairs.tsv model --dev ../texts/pairs.tsv {TRAINING} --quiet"),
    )),
    Material("texts", 2, ("pairs.tsv",), ((1, f"train FILE made --dev pairs.tsv {TRAINING} --quiet"),)),
)  # fmt: skip
LIGHT = ((1, "inspect ../text/bundle"),)  # where a material has no other command than slow ones
SLOW = ("parity", "export", "build", "package", "bench bundle", "bench ../text", "train", "inspect bundle --foreign")
SLOW += ("inspect ../text/bundle --foreign",)
# Refused whatever the files are: these need a GPU, or an address that no machine has.
NEVER = ("run bundle abc --backend tensorrt", "refit", "serve")
ARGUMENTS = 0.15  # share of cases that mutate the command line instead of a file


def prepared_case(seed: int, number: int, materials: Path, folder: Path, light: bool = False) -> Case:
    """Makes `folder`/in with the files of a case, `folder`/outside and `folder`/home beside it.

    `light` cases are milliseconds each: bundles and checkpoints are read, but no model is exported, built or measured.
    """
    rng = Random(f"{seed} {number}")
    for name in ("in", "outside", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "outside" / "kept").write_text("kept")
    if rng.random() < ARGUMENTS:
        argv, what = random_arguments(rng)
        for name in ("text", "texts", *(["speech"] if argv[0] == "transcribe" else [])):
            shutil.copytree(materials / name, folder / "in" / name)
        return Case(number, what, tuple(argv), of_file=False)
    chosen = rng.choices(MATERIALS, [material.weight for material in MATERIALS])[0]
    if light:
        chosen = replace(chosen, commands=tuple(c for c in chosen.commands if not c[1].startswith(SLOW)) or LIGHT)
    return mutated_material(rng, number, chosen, materials, folder)


def unchanged_cases(materials: Path, root: Path) -> Iterator[Case]:
    """Every command over its files as they were made, in folders of their own. All of these are answered: a command
    that is refused here would never come to what the mutations are."""
    pairs = {(m.name, command): m for m in MATERIALS for _, command in m.commands if not command.startswith(NEVER)}
    for number, ((_, command), material) in enumerate(pairs.items()):
        folder = root / str(number)
        for name in ("in", "outside", "home"):
            (folder / name).mkdir(parents=True)
        place, files = copied_material(material, command, materials, folder)
        yield Case(number, "unchanged", argv_of(material, command, files[-1].relative_to(place)))


def mutated_material(rng: Random, number: int, material: Material, materials: Path, folder: Path) -> Case:
    command = rng.choices([argv for _, argv in material.commands], [weight for weight, _ in material.commands])[0]
    place, files = copied_material(material, command, materials, folder)
    file = chosen_file(rng, files)
    if (place / "bundle").is_dir() and rng.random() < 0.02:
        what = planted_folder(rng, place / "bundle", folder / "outside")
    else:
        what = f"{file.relative_to(folder / 'in')}: {mutated_file(rng, file, folder / 'outside')}"
    if (place / "bundle").is_dir() and rng.random() < 0.9:
        mend_hashes(place / "bundle")
    return Case(number, f"{material.name}: {what}", argv_of(material, command, file.relative_to(place)))


def copied_material(material: Material, command: str, materials: Path, folder: Path) -> tuple[Path, list[Path]]:
    """Copies a material and those that its command names beside it; returns its place and the files that mutate."""
    named = [word.split("/")[1] for word in command.split() if word.startswith("../")]
    for name in dict.fromkeys((material.name, *named)):
        if not (folder / "in" / name).exists():
            shutil.copytree(materials / name, folder / "in" / name)
    place = folder / "in" / material.name
    return place, sorted(path for pattern in material.patterns for path in place.glob(pattern) if path.is_file())


def argv_of(material: Material, command: str, file: Path) -> tuple[str, ...]:
    return ("--in", material.name, *(str(file) if word == "FILE" else word for word in shlex.split(command)))


def chosen_file(rng: Random, files: Sequence[Path]) -> Path:
    """JSON more often than others, engines (which are not loaded here) rarely."""
    weights = [4.0 if f.suffix == ".json" else 0.2 if f.suffix == ".engine" else 1.5 for f in files]
    return rng.choices(files, weights)[0]


def mutated_file(rng: Random, file: Path, outside: Path) -> str:
    """Changes a file in place; returns how. Lines to decode stay a file: from a pipe they may be read, too."""
    if rng.random() < 0.07 and file.suffix not in (".txt", ".tsv", ".source", ".target"):
        return mutated_path(rng, file, outside)
    content = file.read_bytes()
    if file.suffix in MESSAGES and rng.random() < 0.6:
        file.write_bytes(mutated_message(rng, content, file.suffix))
        return mutated_message.__name__
    if file.suffix == ".safetensors" and rng.random() < 0.7:
        file.write_bytes(mutated_safetensors(rng, content))
        return mutated_safetensors.__name__
    if file.suffix == ".json" and rng.random() < 0.9:
        change: Callable[[Random, bytes], bytes] = mutated_json
    elif file.suffix in (".jsonl", ".problems") and content and rng.random() < 0.7:
        change = mutated_json_line
    elif (file.suffix == ".pt" or file.match("pytorch_model*.bin")) and rng.random() < 0.25:
        from .pickle_mutations import mutated_pickle as change
    else:
        change = mutated_bytes
    file.write_bytes(change(rng, content))
    return change.__name__
