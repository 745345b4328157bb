"""The content of this package: package.json, the hash of every file, and the engines that were built of it."""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036  (a package is not installed by pip, so nothing else checks)
    sys.exit("error: Python 3.10 or later is needed, this is " + sys.version.split()[0])
try:
    import numpy  # noqa: F401  (every script needs it: checked here once)
except ModuleNotFoundError:
    sys.exit("error: numpy is not installed; install all that is needed with: pip install -r requirements.txt")

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FLAVOURS = ("tensorrt", "tensorrt_rtx")
INSTALLED_BY = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx-cu13"}
COPY_AGAIN = "copy the package again"
CHUNK = 1 << 22  # bytes that are hashed at a time: weights may be larger than memory


class PackageError(Exception):
    """An error of this folder or of a request, in one line."""


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackageError(f"{path} cannot be read ({error.strerror}); {COPY_AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path} is damaged ({error}); {COPY_AGAIN}") from error


def read_package() -> Any:
    """package.json, after the hash of every listed file was checked."""
    package = read_json(HERE / "package.json")
    for name, expected in package["files"].items():
        check_file(HERE / name, expected, COPY_AGAIN)
    return package


def check_file(path: Path, expected: str, mend: str) -> None:
    if not path.is_file():
        raise PackageError(f"{path} is missing; {mend}")
    if sha256_of(path) != expected:
        raise PackageError(f"{path} is damaged (its hash differs); {mend}")


def sha256_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def built_flavours() -> list[str]:
    return sorted(path.parent.name for path in (HERE / "engines").glob("[!.]*/engines.json"))


def read_engines(package: Any, flavour: str | None) -> tuple[Path, Any]:
    """The folder of the engines to run and its engines.json, after their files were checked."""
    there = built_flavours()
    if not there or (flavour is not None and flavour not in there):
        which = f"{flavour} engines here; build them with: python build.py --flavour {flavour}"
        raise PackageError(f"no {which if flavour else 'engines here; build them with: python build.py'}")
    if flavour is None and len(there) > 1:
        raise PackageError(f"engines of {' and '.join(there)}; choose with: --flavour {there[0]}")
    folder = HERE / "engines" / (flavour or there[0])
    built = read_json(folder / "engines.json")
    if built["made_from"] != package["fingerprint"]:
        raise PackageError(f"{folder} was built from other graphs than these; {rebuild(built)}")
    for entry in built["engines"].values():
        check_file(folder / entry["file"], entry["sha256"], rebuild(built))
    return folder, built


def rebuild(built: Any) -> str:
    target = " ".join(["", "--gpu", *built["targets"]]) if built["targets"] else ""
    return f"rebuild with: python build.py --force --flavour {built['flavour']}{target}"


def load_tensorrt(flavour: str | None) -> Any:
    """The module of that name; without a name, the first that is installed."""
    wanted = (flavour,) if flavour else FLAVOURS
    for name in wanted:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error  # reported below when there is no other
    install = f"install it with: pip install {INSTALLED_BY.get(wanted[0], wanted[0])}"
    raise PackageError(f"{' or '.join(wanted)} cannot be imported ({reason}); {install}")


def load_for(built: Any) -> Any:
    """TensorRT as the engines were built with: engines of another version do not open."""
    trt = load_tensorrt(built["flavour"])
    if trt.__version__ != built["version"]:
        built_with = f"the engines were built with {trt.__name__} {built['version']}"
        raise PackageError(f"{built_with}, installed is {trt.__version__}; {rebuild(built)}")
    return trt
