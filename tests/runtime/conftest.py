"""What several tests of sessions share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.stand_in_bench import Bench
from support.stand_in_engines import BEAMS, copied, exported, put_engines

from seq2engine.export.artifact.profiles import Range


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model's bundles by cache form, without engines: not to be written to."""
    return exported(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def folders(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of the stand-in by cache form and flavour, the static ones with two profiles; not to be written to."""
    where, made = tmp_path_factory.mktemp("engines"), {}
    for form in ("static", "growing"):
        bundle = copied(bundles[form], where / form)
        narrower = (dataclasses.replace(BEAMS, batch=Range(1, 2, 2)),) if form == "static" else ()
        for flavour in ("tensorrt_rtx", "tensorrt"):
            made[f"{form} {flavour}"] = put_engines(bundle, BEAMS, flavour=flavour, name=flavour, narrower=narrower)
    return made


@pytest.fixture
def bench(folders: dict[str, Path]) -> Bench:
    return Bench(folders["static tensorrt"], "tensorrt")
