"""How a picture becomes the pixels that a model takes: its size, resampling filter and normalisation.

It is image.json of a checkpoint or a bundle. The size of the pixels is in the model's config.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.json_files import read_object, shortened, typed_from_json
from seq2engine.errors import CheckpointError, RequestError

from .config import LARGEST, ModelConfig

IMAGES = "image.json"  # inside a checkpoint and inside a bundle
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's, in the order of its numbers
CHANNELS = {1: "L", 3: "RGB"}  # what a picture is converted to


@dataclass(frozen=True)
class ImageConfig:
    """A picture is resized to `height` and `width`, cut around its middle to the model's size where that is smaller,
    multiplied by `scale` and normalised: less `mean`, over `std`, in every channel."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    filter: str = "bilinear"
    scale: float = 1 / 255

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def problems_with_images(images: ImageConfig, config: ModelConfig) -> list[str]:
    """Everything because of which pictures cannot become pixels of this model."""
    found = []
    if not config.takes_images:
        return ["the model takes no images"]
    if config.channels not in CHANNELS:
        found.append(f"images have {config.channels} channels, supported are {' and '.join(map(str, CHANNELS))}")
    for name, least in (("height", config.image_height), ("width", config.image_width)):
        if not least <= getattr(images, name) <= LARGEST[f"image_{name}"]:
            most = LARGEST[f"image_{name}"]
            found.append(f"{name} is {getattr(images, name)}, expected the model's {least}, or more up to {most}")
    if images.filter not in FILTERS:
        found.append(f"filter is {shortened(images.filter)}, expected one of {', '.join(FILTERS)}")
    for name in ("mean", "std"):
        if len(getattr(images, name)) != config.channels:
            found.append(f"{name} has {len(getattr(images, name))} numbers, expected {config.channels}")
    if not all(images.std):
        found.append("std has a 0, expected other numbers")
    return found


def read_images(root: Path, config: ModelConfig) -> ImageConfig:
    """The image.json of a checkpoint or bundle folder."""
    path = root / IMAGES
    if not config.takes_images:
        raise RequestError(f"{root} takes {config.source_kind}, no images; {command_for(config, root)}")
    if not path.is_file():
        raise CheckpointError(
            f"{root} has no {IMAGES}, so it takes pixels only; copy preprocessor_config.json beside the model, then "
            "import and export it again"
        )
    try:
        images = typed_from_json(ImageConfig, read_object(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); import the checkpoint again") from error
    if problems := problems_with_images(images, config):
        raise CheckpointError(f"{path}: {'; '.join(problems)}; import the checkpoint again")
    return images


def command_for(config: ModelConfig, bundle: object) -> str:
    """The command that decodes what this model takes."""
    command, example = {"mel": ("transcribe", "file.wav"), "image": ("read", "line.png")}.get(
        config.front_end, ("run", "TEXT")
    )
    return f"use: seq2engine {command} {bundle} {example}"
