"""Hugging Face's image processor as our ImageConfig: preprocessor_config.json, or its part of processor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object
from seq2engine.errors import CheckpointError

from ...config import ModelConfig
from ...images import FILTERS, ImageConfig, problems_with_images

OWN, OF_PROCESSOR = "preprocessor_config.json", "processor_config.json"
# Class of the library, without its ending -> what it takes where a file does not name it
VIT = {"resample": 2, "size": 224, "do_center_crop": False}
DEIT = {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224}
CLASSES: dict[str, dict[str, Any]] = {
    "ViTImageProcessor": VIT,
    "DeiTImageProcessor": DEIT,
    "ViTFeatureExtractor": VIT,  # of older files, and the next
    "DeiTFeatureExtractor": DEIT,
}
KINDS = ("image_processor_type", "feature_extractor_type")
REQUIRED = {"do_resize": True, "do_pad": False}  # where a file has them
MEAN = STD = 0.5


def images_from_folder(source: Path, config: ModelConfig) -> tuple[ImageConfig | None, list[str]]:
    """What pictures become before the model takes them; without the library's file a note, and None."""
    values, where = processor_fields(source)
    if values is None:
        return None, [f"takes pixels, no pictures, because there is no {OWN}: copy it beside the model, import again"]
    images = images_from_fields(values, config, where)
    if problems := problems_with_images(images, config):
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return images, []


def processor_fields(source: Path) -> tuple[dict[str, Any] | None, str]:
    path = next((source / name for name in (OWN, OF_PROCESSOR) if (source / name).is_file()), None)
    if path is None:
        return None, ""
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy the model again") from error
    found = values if path.name == OWN else values.get("image_processor")
    return (found if isinstance(found, dict) else None), str(path)


def images_from_fields(given: Mapping[str, Any], config: ModelConfig, where: str) -> ImageConfig:
    """The settings; everything that cannot be ours is listed."""
    kind = next((given[name] for name in KINDS if isinstance(given.get(name), str)), "ViTImageProcessor")
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    values = {**CLASSES.get(kind, VIT), **{name: value for name, value in given.items() if value is not None}}
    problems = [
        f"{name} is {values[name]!r}, supported is {wanted!r}"
        for name, wanted in REQUIRED.items()
        if values.get(name, wanted) != wanted
    ]
    if kind not in CLASSES:
        problems.append(f"the image processor is {kind}, supported are {' and '.join(list(CLASSES)[:2])}")
    size = size_of(values["size"])
    if size is None:
        problems.append(f"size is {values['size']!r}, expected a number or height and width")
    crop = size_of(values.get("crop_size")) if values["do_center_crop"] else size
    wanted_size = (config.image_height, config.image_width)
    if crop is not None and crop != wanted_size:
        problems.append(
            f"pixels would be {crop[0]}x{crop[1]}, expected the encoder's {wanted_size[0]}x{wanted_size[1]}"
        )
    elif crop is None and size is not None:
        problems.append(f"crop_size is {values.get('crop_size')!r}, expected a number or height and width")
    resample = values["resample"]
    if type(resample) is not int or not 0 <= resample < len(FILTERS):
        problems.append(f"resample is {resample!r}, expected a number from 0 to {len(FILTERS) - 1}")
    scale = values.get("rescale_factor", 1 / 255) if values.get("do_rescale") is not False else 1.0
    normalises = values.get("do_normalize") is not False
    mean = per_channel(values.get("image_mean", MEAN) if normalises else 0.0, config.channels)
    std = per_channel(values.get("image_std", STD) if normalises else 1.0, config.channels)
    if mean is None or std is None or type(scale) not in (int, float):
        problems.append("image_mean, image_std or rescale_factor is not a number, or not one for each channel")
    if problems or size is None or mean is None or std is None:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return ImageConfig(size[0], size[1], mean, std, FILTERS[resample], float(scale))


def size_of(value: Any) -> tuple[int, int] | None:
    """Height and width, from an object, a list or one number."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    pair = value if isinstance(value, list) else [value, value]
    return (pair[0], pair[1]) if len(pair) == 2 and all(type(one) is int for one in pair) else None


def per_channel(value: Any, channels: int) -> tuple[float, ...] | None:
    numbers = value if isinstance(value, list) else [value] * channels
    fits = len(numbers) == channels and all(type(number) in (int, float) for number in numbers)
    return tuple(map(float, numbers)) if fits else None
