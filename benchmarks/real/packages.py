"""Files of the package registry: downloaded once by pip, used only if their hash matches."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import ConfigError


@dataclass(frozen=True)
class Package:
    """One file of the registry. `source`: it is a source archive, else a wheel."""

    name: str
    version: str
    file: str
    sha256: str
    source: bool = False


def downloaded(package: Package, folder: Path) -> Path:
    """The package's file in the folder, downloaded if it is not there yet."""
    path = folder / package.file
    if not path.is_file():
        kind = "--no-binary=:all:" if package.source else "--only-binary=:all:"
        asked = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, "--dest", str(folder), asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not path.is_file():
            reason = (done.stderr.strip() or f"pip wrote no {package.file}").splitlines()[-1]
            raise ConfigError(f"cannot download {asked}: {reason}; look at the network and pip's index, and repeat")
    found = sha256_of(path)
    if found != package.sha256:
        raise ConfigError(f"{path} has sha256 {found}, expected {package.sha256}; delete it and repeat")
    return path
