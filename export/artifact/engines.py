"""The engines of a bundle: their names and passports, and whether they were built from its current graphs."""

from __future__ import annotations

from pathlib import Path

from ..contract import GRAPHS
from .bundle import Bundle
from .passport import PASSPORT, Passport, read_passport

ENGINES = "engines"


def engine_folders(root: Path) -> list[Path]:
    """The folders of a bundle's engines, by name. A leading dot marks one of a running or killed build."""
    return sorted(path for path in (root / ENGINES).glob("[!.]*") if path.is_dir())


def engine_names(bundle: Bundle) -> list[str]:
    return [folder.name for folder in engine_folders(bundle.root)]


def open_passport(bundle: Bundle, name: str) -> tuple[Path, Passport]:
    folder = bundle.root / ENGINES / name
    return folder, read_passport(folder / PASSPORT)


def passports_of(bundle: Bundle) -> dict[str, Passport]:
    """The passport of every engine, by its name. A folder of engines without one is an error."""
    return {name: open_passport(bundle, name)[1] for name in engine_names(bundle)}


def listed_passports(bundle: Bundle) -> dict[str, Passport]:
    """The same for display: a folder without a passport is not ours and is left out."""
    there = [folder for folder in engine_folders(bundle.root) if (folder / PASSPORT).exists()]
    return {folder.name: read_passport(folder / PASSPORT) for folder in there}


def is_current(bundle: Bundle, passport: Passport) -> bool:
    """Whether an engine was built from the graphs that the bundle holds now."""
    graphs = bundle.manifest.graphs.get(passport.precision)
    return graphs is not None and all(
        passport.engines[name].onnx_fingerprint == graphs[name].fingerprint for name in GRAPHS
    )
