"""Pictures become the pixels that the library's image processors make of them; bad files are refused in one line."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.trocr_models import HEIGHT, PROCESSOR, WIDTH, image_config
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from seq2engine.errors import CheckpointError, MissingPackageError, RequestError
from seq2engine.model.images import FILTERS
from seq2engine.model.importers.conversion.image_processor import images_from_fields, images_from_folder
from seq2engine.runtime.images import pixels as module
from seq2engine.runtime.images.pixels import pixels_from

CONFIG = image_config()
SETTINGS = images_from_fields(PROCESSOR, CONFIG, "here")


def picture(height: int = 50, width: int = 130, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth colours, edges and noise."""
    rng = np.random.default_rng(seed)
    coarse = np.kron(rng.integers(0, 256, (height // 10 + 1, width // 10 + 1, channels)), np.ones((10, 10, 1)))
    noisy = coarse[:height, :width] + rng.integers(-20, 21, (height, width, channels))
    return noisy.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("resample", range(len(FILTERS)))
@pytest.mark.parametrize("size", [(50, 130), (7, 5), (HEIGHT, WIDTH), (200, 31)])
def test_pixels_are_the_library_s_to_the_last_bit(resample: int, size: tuple[int, int]) -> None:
    fields = {
        **PROCESSOR,
        "resample": resample,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    given = picture(*size)
    theirs = ViTImageProcessorPil(**fields)(Image.fromarray(given), return_tensors="np")["pixel_values"][0]
    ours = pixels_from(given, images_from_fields(fields, CONFIG, "here"), CONFIG)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_center_crop": True, "size": {"height": 40, "width": 51}, "crop_size": {"height": HEIGHT, "width": WIDTH}},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [127.0] * 3, "image_std": [64.0] * 3},
        {"rescale_factor": 0.01},
    ],
)
def test_every_step_may_be_left_out(changes: dict[str, Any]) -> None:
    fields = {**PROCESSOR, "image_processor_type": "DeiTImageProcessor", "do_center_crop": False, **changes}
    theirs = DeiTImageProcessorPil(**fields)(Image.fromarray(picture()), return_tensors="np")["pixel_values"][0]
    ours = pixels_from(picture(), images_from_fields(fields, CONFIG, "here"), CONFIG)
    np.testing.assert_array_equal(ours, theirs.astype(np.float32))


def test_a_folder_of_the_library_has_the_same_settings(tmp_path: Path) -> None:
    """As it writes them, with its own defaults; also where a file names none."""
    ViTImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}).save_pretrained(tmp_path)
    images, notes = images_from_folder(tmp_path, CONFIG)
    assert (images, notes) == (SETTINGS, [])
    short = {"feature_extractor_type": "ViTFeatureExtractor", "size": [HEIGHT, WIDTH]}
    assert images_from_fields(short, CONFIG, "here") == SETTINGS
    square = image_config(image_height=224, image_width=224, max_source=1 + 28 * 28)
    for theirs, kind in (
        (ViTImageProcessorPil, "ViTImageProcessor"),
        (DeiTImageProcessorPil, "DeiTImageProcessorFast"),
    ):
        ours = pixels_from(picture(), images_from_fields({"image_processor_type": kind}, square, "here"), square)
        expected = theirs()(Image.fromarray(picture()), return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize is False, supported is True"),
        ({"size": {"shortest_edge": 32}}, "size is .*, expected a number or height and width"),
        ({"size": 384}, "pixels would be 384x384, expected the encoder's 32x48"),
        ({"do_center_crop": True}, "crop_size is None, expected"),
        ({"size": None}, "pixels would be 224x224, expected the encoder's 32x48"),
        (
            {"image_processor_type": "DeiTImageProcessor"},  # which cuts, unless a file says that it does not
            "pixels would be 224x224, expected the encoder's 32x48",
        ),
        ({"resample": 9}, "resample is 9, expected a number from 0 to 5"),
        ({"image_mean": [0.5]}, "not one for each channel"),
        ({"image_std": "x"}, "not one for each channel"),
        (
            {"image_processor_type": "DonutImageProcessor"},
            "is DonutImageProcessor, supported are ViTImageProcessor and",
        ),
    ],
)
def test_settings_that_cannot_be_ours_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        images_from_fields({**PROCESSOR, **changes}, CONFIG, "here")


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_kinds_of_files_give_one_picture(tmp_path: Path) -> None:
    """Gray pixels in every mode that holds them without a loss."""
    gray = picture(channels=1)[:, :, 0]
    expected = pixels_from(gray, SETTINGS, CONFIG)
    image = Image.fromarray(gray)
    colours = image.convert("RGB")
    opaque = colours.copy()
    opaque.putalpha(255)
    sixteen = Image.fromarray(gray.astype(np.uint16) * 257)
    files = [
        saved(image, tmp_path / "gray.png"),
        saved(colours, tmp_path / "rgb.png"),
        saved(opaque, tmp_path / "rgba.png"),
        saved(image.convert("LA"), tmp_path / "la.png"),
        saved(image.convert("P"), tmp_path / "palette.png"),
        saved(sixteen, tmp_path / "sixteen.png"),
        saved(sixteen, tmp_path / "sixteen.tif"),
        saved(colours, tmp_path / "a.bmp"),
        saved(colours, tmp_path / "a.tiff", compression="tiff_lzw"),
        saved(image, tmp_path / "a.pgm"),
        saved(colours, tmp_path / "a.webp", lossless=True),
        saved(image, tmp_path / "a.gif"),
    ]
    for file in files:
        np.testing.assert_array_equal(pixels_from(file, SETTINGS, CONFIG), expected, err_msg=file.name)
    np.testing.assert_array_equal(pixels_from(str(files[0]), SETTINGS, CONFIG), expected)
    np.testing.assert_array_equal(pixels_from(colours, SETTINGS, CONFIG), expected)
    np.testing.assert_array_equal(pixels_from(gray[:, :, None], SETTINGS, CONFIG), expected)


def test_transparent_paper_is_white(tmp_path: Path) -> None:
    """Not black, as Pillow's conversion has it: black writing would vanish."""
    ink = picture(channels=1)[:, :, 0] < 128
    written = np.zeros((*ink.shape, 4), dtype=np.uint8)
    written[..., 3] = np.where(ink, 255, 0)
    expected = pixels_from(np.where(ink, 0, 255).astype(np.uint8), SETTINGS, CONFIG)
    np.testing.assert_array_equal(pixels_from(written, SETTINGS, CONFIG), expected)
    np.testing.assert_array_equal(
        pixels_from(saved(Image.fromarray(written), tmp_path / "a.png"), SETTINGS, CONFIG), expected
    )
    palette = Image.fromarray(np.where(ink, 1, 0).astype(np.uint8)).convert("P")
    palette.putpalette([0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        pixels_from(saved(palette, tmp_path / "p.png", transparency=0), SETTINGS, CONFIG), expected
    )


def test_a_photograph_is_turned_as_its_camera_was(tmp_path: Path) -> None:
    image = Image.fromarray(picture())
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = saved(image, tmp_path / "a.png", exif=exif)
    expected = pixels_from(np.rot90(picture(), -1).copy(), SETTINGS, CONFIG)
    np.testing.assert_array_equal(pixels_from(turned, SETTINGS, CONFIG), expected)


def test_a_model_of_gray_images_gets_one_channel() -> None:
    config = image_config(channels=1)
    fields = {**PROCESSOR, "image_mean": 0.5, "image_std": 0.5}
    made = pixels_from(picture(), images_from_fields(fields, config, "here"), config)
    assert made.shape == (1, HEIGHT, WIDTH)


def test_one_pixel_is_a_picture() -> None:
    made = pixels_from(np.full((1, 1), 255, dtype=np.uint8), SETTINGS, CONFIG)
    np.testing.assert_array_equal(made, np.ones((3, HEIGHT, WIDTH), dtype=np.float32))


def png_of_size(width: int, height: int) -> bytes:
    """The header of a huge picture, and nothing else."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good = io.BytesIO()
    Image.fromarray(picture()).save(good, "PNG")
    whole = good.getvalue()
    broken = bytearray(whole)
    broken[len(broken) // 2] ^= 255
    files = {
        "text.png": (b"hello", "is not a picture that can be read, expected png, jpeg"),
        "empty.png": (b"", "is not a picture that can be read"),
        "short.png": (whole[: len(whole) // 2], "is damaged: .*; create the file again"),
        "broken.png": (bytes(broken), "is damaged: .*; create the file again"),
        "header.png": (whole[:20], "is not a picture that can be read|is damaged"),
        "huge.png": (png_of_size(60_000, 60_000), "pixels, .*; make it smaller"),
        "large.png": (png_of_size(10_000, 10_000), "pixels, .*; make it smaller"),
        "wide.png": (png_of_size(2**31 - 1, 1), "pixels, .*; make it smaller|damaged"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a picture that can be read"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=message) as caught:
            pixels_from(tmp_path / name, SETTINGS, CONFIG)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    for path, message in ((tmp_path / "no.png", "No such file"), (tmp_path, "is not a regular file")):
        with pytest.raises(RequestError, match=message):
            pixels_from(path, SETTINGS, CONFIG)
    real = saved(Image.fromarray(picture(channels=1)[:, :, 0].astype(np.float32)), tmp_path / "real.tif")
    with pytest.raises(RequestError, match="floating-point numbers, expected 8 or 16 bits"):
        pixels_from(real, SETTINGS, CONFIG)


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((4, 4)),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((0, 4), np.uint8),
        17,
        None,
        b"x",
    ],
)
def test_bad_arrays_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="a picture is a"):
        pixels_from(given, SETTINGS, CONFIG)


def test_an_array_may_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 100)
    with pytest.raises(RequestError, match="the picture has 130 x 50 pixels, expected at most 100; make it smaller"):
        pixels_from(picture(), SETTINGS, CONFIG)


def test_damaged_files_never_end_in_another_error(tmp_path: Path) -> None:
    """Bytes are changed and cut off in every format that is read."""
    rng = np.random.default_rng(7)
    image = Image.fromarray(picture(20, 30))
    for kind in ("PNG", "JPEG", "TIFF", "BMP", "WEBP", "GIF", "PPM"):
        good = io.BytesIO()
        image.save(good, kind)
        for _ in range(60):
            content = bytearray(good.getvalue())
            for place in rng.integers(0, len(content), rng.integers(1, 6)):
                content[place] = rng.integers(0, 256)
            cut = len(content) if rng.random() < 0.5 else int(rng.integers(0, len(content)))
            (tmp_path / "a").write_bytes(content[:cut])
            made = pixels_or_error(tmp_path / "a")
            if isinstance(made, str):
                assert "\n" not in made
            else:
                assert made.shape == (3, HEIGHT, WIDTH)
                assert np.isfinite(made).all()


def pixels_or_error(path: Path) -> np.ndarray | str:
    try:
        return pixels_from(path, SETTINGS, CONFIG)
    except RequestError as error:
        return str(error)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIL", "PIL.Image", "PIL.ImageOps"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"reading pictures needs PIL, .* pip install 'seq2engine\[images\]'"):
        pixels_from(tmp_path / "a.png", SETTINGS, CONFIG)
