"""Pictures as the pixels that a model takes: read by Pillow, resized and normalised as image.json of the model says.

    file -> 8 bits, one or three channels, as people see it -> resize -> cut -> * scale -> (x - mean) / std

The arithmetic is that of Hugging Face's image processors, number for number. What they do not do is done before: paper
shines through where a picture is transparent, 16 bits become 8, and a photograph is turned as its camera was.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import RequestError, imported_package
from seq2engine.model.config import ModelConfig
from seq2engine.model.images import CHANNELS, FILTERS, ImageConfig


class Picture(Protocol):
    """A picture of Pillow's, PIL.Image.Image."""

    @property
    def mode(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]: ...


ImageInput = str | os.PathLike[str] | np.ndarray | Picture

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP", "GIF", "PPM")  # Pillow reads others, too, some by running a program
MOST_PIXELS = 89_478_485  # of a picture before it is resized, as in Pillow: 256 MB of colours
EXPECTED = "expected png, jpeg, tiff, bmp, webp, gif or ppm"
# What Pillow raises for damaged files; most of it is not documented.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error, zlib.error)


def pixels_from(source: Any, images: ImageConfig, config: ModelConfig) -> np.ndarray:
    """A file, an array of bytes [height, width] or [height, width, channels], or a picture of Pillow's ->
    float32 [channels, height, width]."""
    pillow = imported_package("PIL.Image", "reading pictures")
    if isinstance(source, np.ndarray):
        picture = picture_from_array(source, pillow)
    elif isinstance(source, pillow.Image):
        check_size("the picture", source.size)
        picture = plain(source, "the picture", config.channels)
    elif isinstance(source, str | os.PathLike):
        picture = picture_from_file(Path(source), pillow, config.channels)
    else:
        raise RequestError(
            f"a picture is a {type(source).__name__}, expected a file, an array or a picture of Pillow's"
        )
    picture = converted(picture, CHANNELS[config.channels])
    resized = picture.resize((images.width, images.height), resample=FILTERS.index(images.filter))
    array = np.asarray(resized).reshape(images.height, images.width, config.channels)
    top, left = (images.height - config.image_height) // 2, (images.width - config.image_width) // 2
    array = array[top : top + config.image_height, left : left + config.image_width]
    scaled = (array.astype(np.float64) * images.scale).astype(np.float32)
    normal = (scaled - np.array(images.mean, np.float32)) / np.array(images.std, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


def picture_from_array(array: np.ndarray, pillow: Any) -> Any:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if not fits or array.dtype != np.uint8 or not array.size:
        raise RequestError(
            f"a picture is an array {list(array.shape)} of {array.dtype}, expected uint8 [height, width] or "
            "[height, width, channels] with 1, 3 or 4 channels"
        )
    check_size("the picture", (array.shape[1], array.shape[0]))
    return pillow.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def picture_from_file(path: Path, pillow: Any, channels: int) -> Any:
    """The first picture of a file; one that cannot be opened, or is no picture, is refused."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write to it
            raise RequestError(f"{path} is not a regular file, {EXPECTED}")
        with path.open("rb") as file, warnings.catch_warnings():  # the system's error names the reason
            warnings.simplefilter("ignore")  # of oddities that do not matter
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            return picture_from_open_file(file, path, pillow, channels)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def picture_from_open_file(file: Any, path: Path, pillow: Any, channels: int) -> Any:
    try:
        picture = pillow.open(file, formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise RequestError(
            f"{path} has more than {MOST_PIXELS:,} pixels, the most that is read; make it smaller"
        ) from error
    except DAMAGED as error:
        raise RequestError(f"{path} is not a picture that can be read, {EXPECTED}") from error
    check_size(str(path), picture.size)
    try:
        picture.load()
        return plain(picture, str(path), channels)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning, *DAMAGED) as error:
        raise RequestError(f"{path} is damaged: {' '.join(str(error).split())}; create the file again") from error


def check_size(name: str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise RequestError(
            f"{name} has {width:,} x {height:,} pixels, expected at most {MOST_PIXELS:,}; make it smaller"
        )
    if not width * height:
        raise RequestError(f"{name} has {width} x {height} pixels, expected at least one")


def plain(picture: Any, name: str, channels: int) -> Any:
    """The picture as people see it: turned as its camera was, with 8 bits, on white paper where it is transparent."""
    turned = imported_package("PIL.ImageOps", "reading pictures").exif_transpose(picture)
    if turned.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        return eight_bits(turned)
    if turned.mode == "F":
        raise RequestError(f"{name} has pixels of floating-point numbers, expected 8 or 16 bits; convert it")
    return converted(turned, CHANNELS[channels])


def eight_bits(picture: Any) -> Any:
    pillow = imported_package("PIL.Image", "reading pictures")
    values = np.asarray(picture).astype(np.int64)
    shades = values // 257 if values.max() > 255 else values
    return pillow.fromarray(shades.clip(0, 255).astype(np.uint8))


def converted(picture: Any, mode: str) -> Any:
    """Gray or RGB, on white paper where a picture is transparent."""
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        above = picture.convert("RGBA")
        pillow = imported_package("PIL.Image", "reading pictures")
        paper = pillow.new("RGBA", above.size, "white")
        picture = pillow.alpha_composite(paper, above)
    return picture.convert(mode)
