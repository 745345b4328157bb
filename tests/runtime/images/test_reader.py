"""Pictures in, text out: what the library's model and processor make of the same files, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.trocr_models import PROCESSOR, letters_json, library_outputs, pictures, saved_trocr, small_trocr
from tokenizers import Tokenizer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from seq2engine.errors import CheckpointError, RequestError, UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.exporting import export_checkpoint
from seq2engine.model.images import IMAGES
from seq2engine.runtime.images.reader import Reading
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.translator import Translator, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reader")
    for number, picture in enumerate(pictures(6)):
        Image.fromarray(picture).save(root / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = small_trocr(8)
    saved_trocr(model, folder / "theirs")
    return model


@pytest.fixture(scope="module")
def bundle(theirs: Any, folder: Path) -> Bundle:
    return export_checkpoint(folder / "theirs", folder / "bundle", precisions=("fp32",))


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Translator:
    return load(bundle, threads=1)


def files(folder: Path) -> list[Path]:
    return [folder / f"{number}.png" for number in range(6)]


def library_texts(theirs: Any, folder: Path, beams: int) -> list[str]:
    processor, tokenizer = ViTImageProcessorPil(**PROCESSOR), Tokenizer.from_str(letters_json())
    given = [processor(Image.open(path), return_tensors="np")["pixel_values"][0] for path in files(folder)]
    return [tokenizer.decode(row).strip() for row in library_outputs(theirs, given, num_beams=beams)]


@pytest.mark.parametrize("beams", [1, 4])
def test_texts_are_the_library_s(beams: int, theirs: Any, folder: Path, model: Translator) -> None:
    expected = library_texts(theirs, folder, beams)
    assert len(set(expected)) >= 5
    assert model.read(files(folder), beam=beams) == expected
    assert [model.read(path, beam=beams) for path in map(str, files(folder))] == expected
    assert model.read(pictures(6), beam=beams, batch=4) == expected
    assert model.read(Image.fromarray(pictures(6)[2]), SearchOptions(max_length=31, beam=beams)) == expected[2]


def test_bad_pictures_do_not_stop_the_others(folder: Path, model: Translator) -> None:
    """In their order, each with its error, in the middle of a batch and at its ends."""
    good = files(folder)
    given = [folder / "no.png", good[0], good[1], folder / "bundle", good[2], np.zeros((3, 3)), None]
    found = list(model.read_iter(given, batch=2, beam=1))
    assert [reading.error is None for reading in found] == [False, True, True, False, True, False, False]
    assert [reading.text for reading in found if reading.error is None] == model.read(good[:3], beam=1)
    assert found[0] == Reading(
        str(folder / "no.png"), error=f"cannot read {folder / 'no.png'}: No such file or directory"
    )
    assert found[5].name == "picture 6"
    assert found[1].outputs[0].tokens
    with pytest.raises(RequestError, match="No such file"):
        model.read([good[0], folder / "no.png"])


def test_only_bad_pictures(folder: Path, model: Translator) -> None:
    assert [reading.error is None for reading in model.read_iter([folder / "no.png"] * 3)] == [False] * 3
    assert list(model.read_iter([])) == []
    assert model.read([]) == []


def test_progress_counts_pictures(folder: Path, model: Translator) -> None:
    seen: list[tuple[str, float]] = []
    model.read(files(folder), batch=2, beam=1, progress=lambda stage, share, note="": seen.append((stage, share)))
    assert seen == [("read", (number + 1) / 6) for number in range(6)]


def test_outputs_begin_with_their_prefixes(folder: Path, model: Translator) -> None:
    prefixes = [[10, 11], [], [12]]
    found = list(model.read_iter(files(folder)[:4], prefixes=prefixes, beam=1))
    assert [reading.outputs[0].tokens[: len(prefix)] for reading, prefix in zip(found, prefixes, strict=False)] == [
        (10, 11),
        (),
        (12,),
    ]
    assert found[3].error == "no prefix for it, there are 3; give one for every picture"


def test_wrong_calls_are_refused(folder: Path, model: Translator) -> None:
    with pytest.raises(UsageError, match="options together with beam"):
        model.read(files(folder)[0], SearchOptions(max_length=5), beam=2)
    with pytest.raises(RequestError, match="batch 0, expected at least 1"):
        model.read(files(folder)[0], batch=0)
    with pytest.raises(RequestError, match="sources of images have no tokens"):
        model.read(files(folder)[0], source_no_repeat_ngram=2)


def test_a_bundle_without_settings_for_pictures_names_what_is_missing(theirs: Any, tmp_path: Path) -> None:
    saved_trocr(theirs, tmp_path / "theirs")
    (tmp_path / "theirs" / "preprocessor_config.json").unlink()
    bundle = export_checkpoint(tmp_path / "theirs", tmp_path / "bundle", precisions=("fp32",))
    assert not (bundle.root / IMAGES).exists()
    with (
        load(bundle) as model,
        pytest.raises(CheckpointError, match=r"has no image.json, so it takes pixels only; copy"),
    ):
        model.read(np.zeros((4, 4), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be used .* import the checkpoint again"),
        ("{}", "cannot be used .* import the checkpoint again"),
        (
            '{"height": 1, "width": 48, "mean": [0], "std": [0]}',
            "height is 1, expected the model's 32, .*mean has 1 numbers, .*std has a 0",
        ),
        ('{"height": 32, "width": 48, "mean": [0, 0, 0], "std": [1, 1, 1], "filter": "x"}', "filter is 'x', expected"),
    ],
)
def test_a_damaged_image_json_is_refused(content: str, message: str, bundle: Bundle, tmp_path: Path) -> None:
    from seq2engine.model.images import read_images

    (tmp_path / IMAGES).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_images(tmp_path, bundle.config)
