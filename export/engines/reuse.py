"""Engines that need no build: those of the bundle itself, and those of the cache. Only what is missing is built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from seq2engine.common.progress import Progress
from seq2engine.errors import BundleError

from ..artifact.engines import engine_folders
from ..artifact.passport import PASSPORT, EngineEntry, Passport, read_passport
from .build_options import BuildOptions
from .cache import EngineCache, EngineFacts
from .jobs import EngineJob, build_jobs


def passport_with(folder: Path, keys: Mapping[str, str]) -> Passport | None:
    """The passport of a folder of engines, if they are sound and those of the keys."""
    if not (folder / PASSPORT).is_file():
        return None
    with suppress(BundleError):  # unreadable, or of another version of ours: as good as none
        passport = read_passport(folder / PASSPORT)
        if passport.keys == keys and all(
            facts_of(entry).describe(folder / entry.file) for entry in passport.engines.values()
        ):
            return passport
    return None


def engines_of_jobs(
    trt: Any,
    jobs: Mapping[str, EngineJob],
    bundle: Path,
    options: BuildOptions,
    progress: Progress,
    check: Callable[[str, Path], None],
) -> dict[str, EngineFacts]:
    """Fills the file of every job, by its key: from the engines of the `bundle`, the cache, or by a build.

    `check` raises if an engine is not the requested one, whatever its origin; then nothing is kept.
    """
    cache = None if options.cache is None else EngineCache(Path(options.cache))
    facts: dict[str, EngineFacts] = {}
    with ExitStack() as locks:
        for key, job in jobs.items():
            if not options.rebuild and (found := found_in_bundle(bundle, key, job.file)):
                facts[key] = found
                progress(job.stage, 1.0, "from the bundle")
            elif cache is not None:
                waiting = partial(progress, job.stage, 0.0, "another process is building it")
                locks.enter_context(cache.building(key, waiting))
                if not options.rebuild and (found := cache.find(key, job.file)):
                    facts[key] = found
                    progress(job.stage, 1.0, "from the cache")
        missing = [key for key in jobs if key not in facts]
        built = build_jobs(trt, [jobs[key] for key in missing], options.workers, progress)
        facts |= dict(zip(missing, built, strict=True))
        for key, job in jobs.items():
            check(key, job.file)
        if cache is not None:
            for key in missing:
                cache.keep(key, jobs[key].file, facts[key])
    return facts


def found_in_bundle(bundle: Path, key: str, into: Path) -> EngineFacts | None:
    """Copies an engine of that key from another folder of the bundle: the encoder is the same for all beams."""
    for folder in engine_folders(bundle):
        with suppress(BundleError):
            for entry in read_passport(folder / PASSPORT).engines.values():
                if entry.key == key and facts_of(entry).describe(folder / entry.file):
                    shutil.copyfile(folder / entry.file, into)
                    return facts_of(entry)
    return None


def facts_of(entry: EngineEntry) -> EngineFacts:
    return EngineFacts(entry.bytes, entry.sha256, entry.build_seconds, entry.peak_memory)


def timings_path(trt: Any, device: str, cache: str | os.PathLike[str] | None) -> Path | None:
    """The file of `tensorrt`'s timing cache for this GPU. TensorRT-RTX times nothing while it builds."""
    if cache is None or trt.__name__ != "tensorrt":
        return None
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return Path(cache) / "timings" / f"{trt.__version__}-{name}.cache"
