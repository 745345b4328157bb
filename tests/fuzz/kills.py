"""Kills commands that write, at random instants: what they wrote is the old state or the new, whole, and the next
command cleans up.

    .venv/bin/python tests/fuzz/kills.py --kills 200 --seed 3

The slow test makes SEQ2ENGINE_KILLS kills (12 by default).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fuzzing.hashes import TRAINING
from support.fuzzing.loaded import load_commands, materials_in

Run = Callable[[list[str]], int]
TRAIN = f"train texts/pairs.tsv made --dev texts/pairs.tsv {TRAINING} --force --quiet"


@dataclass(frozen=True)
class Victim:
    """A command that writes into a folder, how often it is chosen, and what shows that the folder is whole."""

    argv: str
    weight: float
    folder: str
    whole: Callable[[Path], bool]
    before: str = ""  # a command that puts the old state there


def whole_checkpoint(folder: Path) -> bool:
    from seq2engine.model.checkpoint import load_checkpoint

    load_checkpoint(folder)
    return True


def whole_bundle(folder: Path) -> bool:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.files import file_problems

    reports = [path for path in (folder / "reports").glob("*.json") if not path.name.startswith(".")]
    return not file_problems(open_bundle(folder), hashed=True) and all(json.loads(p.read_text()) for p in reports)


def whole_package(folder: Path) -> bool:
    from seq2engine.common.atomic_folders import sha256_of

    values = json.loads((folder / "package.json").read_text())
    return all(sha256_of(folder / name) == sha256 for name, sha256 in values["files"].items())


VICTIMS = {
    "import": Victim("import marian made --force --quiet", 4, "made", whole_checkpoint, "import bart made --quiet"),
    "train": Victim(TRAIN, 4, "made", whole_checkpoint),
    "export": Victim(
        "export text/checkpoint made --precision fp32 --force --quiet",
        2,
        "made",
        whole_bundle,
        "export text/checkpoint made --precision fp16 --quiet",
    ),
    "export --add": Victim("export --add fp16 text/bundle --quiet", 1, "text/bundle", whole_bundle),
    "build": Victim(
        "build text/bundle --precision fp32 --gpu sm89 --name mine --force --quiet",
        2,
        "text/bundle",
        whole_bundle,
    ),
    "build --rebuild": Victim(
        "build text/bundle --precision fp32 --gpu sm89 --name mine --batch 1 --beam 1 --rebuild --force --quiet",
        0.7,
        "text/bundle",
        whole_bundle,
    ),
    "package": Victim(
        "package text/bundle made --precision fp32 --force --quiet",
        0.5,
        "made",
        whole_package,
        "package text/bundle made --precision fp32 --batch 1 --beam 1 --quiet",
    ),
    "bench": Victim(
        "bench text/bundle --quick --rounds 1 --case 1x1x3x3 --precision fp32 --quiet",
        0.8,
        "text/bundle",
        whole_bundle,
    ),
}


def forked(run: Run, argv: str, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            silent = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.environ["XDG_CACHE_HOME"] = os.environ["TMPDIR"] = str(folder)
            tempfile.tempdir = None
            os.chdir(folder)
            code = run(argv.split())
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_once(rng: Random, name: str, seconds: float, materials: Path, root: Path, run: Run) -> str:
    """Kills a command after part of the time it takes; returns what it left: old, new or what is wrong."""
    victim, folder = VICTIMS[name], prepared(VICTIMS[name], materials, root, run)
    place = folder / victim.folder
    before = content_of(place)
    pid = forked(run, victim.argv, folder)
    time.sleep(rng.uniform(0, 1.1 * seconds))
    os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
    code = ended(pid)
    left = content_of(place)
    state = "finished" if code == 0 else "old" if left == before else "new"
    if place.exists() and not victim.whole(place):
        return "broken"
    if (again := ended(forked(run, victim.argv, folder))) != 0:
        return f"the next command failed with {again}: {(folder / 'output').read_text(errors='replace')[-300:]}"
    if not victim.whole(place):
        return "broken by the next command"
    if leftovers := [str(p.relative_to(folder)) for p in folder.rglob(".*.new-*")]:
        return f"left behind: {leftovers[:3]}"
    shutil.rmtree(folder)
    return state


def prepared(victim: Victim, materials: Path, root: Path, run: Run) -> Path:
    folder = Path(tempfile.mkdtemp(dir=root))
    for name in ("text", "texts", "marian", "bart"):
        shutil.copytree(materials / name, folder / name)
    if victim.before:
        assert ended(forked(run, victim.before, folder)) == 0
    return folder


def content_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files but those that are being written."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".new-" not in str(path))
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def kill_commands(kills: int, seed: int, materials: Path, root: Path, log: Callable[[str], None]) -> Counter[str]:
    """How many kills of each command left the old state, the new one, or something wrong."""
    run, rng = load_commands(), Random(seed)
    seconds = {}
    root.mkdir(parents=True, exist_ok=True)
    for name, victim in VICTIMS.items():  # how long each takes
        folder = prepared(victim, materials, root, run)
        started = time.monotonic()
        assert ended(forked(run, victim.argv, folder)) == 0, (folder / "output").read_text()
        seconds[name] = time.monotonic() - started
        shutil.rmtree(folder)
    log(f"seconds of each command: { {name: round(taken, 1) for name, taken in seconds.items()} }")
    counts: Counter[str] = Counter()
    for _ in range(kills):
        name = rng.choices(list(VICTIMS), [victim.weight for victim in VICTIMS.values()])[0]
        state = kill_once(rng, name, seconds[name], materials, root, run)
        counts[f"{name}: {state}"] += 1
        if state not in ("old", "new", "finished"):
            log(f"{name}: {state}")
        if sum(counts.values()) % 20 == 0:
            log(f"{sum(counts.values())} kills: {dict(counts)}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--materials", type=Path, help="folder to keep the files in that commands start from")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as made:
        materials = materials_in(args.materials or Path(made) / "materials")
        counts = kill_commands(args.kills, args.seed, materials, Path(made) / "work", lambda t: print(t, flush=True))
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")
    return 0 if all(name.endswith((": old", ": new", ": finished")) for name in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
