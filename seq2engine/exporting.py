"""Model to bundle, calibrated: the one function behind the command, Python, the demo and the GPU check.

It is above export and runtime, because calibration decodes with ONNX Runtime, and export cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import UsageError
from seq2engine.export import to_onnx
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.contract import DEFAULT_PRECISIONS, check_choices
from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.by_name import opened_checkpoint
from seq2engine.model.tokenizers.base import FOLDER, Coder
from seq2engine.model.tokenizers.ids import IdsTokenizer
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.model.transformer import Transformer
from seq2engine.runtime.ort.calibration import calibration_of, sources_from_corpus


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    cache_form: str = "static",
    force: bool = False,
    progress: Progress = silent,
    calibrate: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Bundle:
    """Writes a bundle of a checkpoint by name: a folder of ours, anything that `import_checkpoint` reads, shipped:g2p,
    or random:PRESET. The rest is as in `onnx_from_model`. `note` is called with what the import could not carry over.
    """
    with opened_checkpoint(os.fspath(checkpoint), progress, note) as (model, companions):
        return onnx_from_model(model, folder, precisions, cache_form, force, progress, companions, calibrate)


def onnx_from_model(
    model: Transformer,
    folder: str | os.PathLike[str],
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    cache_form: str = "static",
    force: bool = False,
    progress: Progress = silent,
    companions: Path | None = None,
    calibrate: Path | None = None,
) -> Bundle:
    """Writes a bundle with both graphs in each precision and the reference weights, and opens it.

    `companions` is the checkpoint's folder: its generation.json and its tokenizer go into the bundle. Where a precision
    computes in fp16 or rounds activations to int8, the fp32 graphs decode the source lines of `calibrate` (None: random
    sources). Nodes whose values fp16 cannot hold stay in fp32; channels that are too large for int8 are
    smoothed.
    """
    calibration = calibration_for(model.config, precisions, cache_form, progress, companions, calibrate)
    return to_onnx.onnx_from_model(model, folder, precisions, cache_form, force, progress, companions, calibration)


def add_precisions(
    bundle: Bundle | str | os.PathLike[str],
    precisions: Sequence[str],
    progress: Progress = silent,
    calibrate: Path | None = None,
) -> Bundle:
    """Adds graphs in further precisions to a bundle, from its own reference weights, calibrated as above."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    calibration = calibration_for(opened.config, precisions, opened.cache_form, progress, opened.root, calibrate)
    return to_onnx.add_precisions(opened, precisions, progress, calibration)


def calibration_for(
    config: ModelConfig,
    precisions: Sequence[str],
    cache_form: str,
    progress: Progress,
    companions: Path | None,
    calibrate: Path | None,
) -> to_onnx.Calibrate | None:
    """The calibration, which decodes a corpus with the model's tokenizer, or random sources; None if not needed."""
    for precision in precisions:
        check_choices(precision, cache_form)
    if not to_onnx.needs_calibration(precisions):
        if calibrate is not None:
            raise UsageError(
                f"--calibrate measures numbers for fp16 and w8a8, but {' '.join(precisions)} is neither; "
                "leave it out, or add fp16 or w8a8 to --precision"
            )
        return None
    if calibrate is not None and config.takes_features:
        raise UsageError(f"--calibrate reads lines of text, but this model takes {config.source_kind}; leave it out")
    if calibrate is None:
        random = {"tokens": "random sources", "mel": "random audio features", "image": "random images"}
        return calibration_of(None, random[config.front_end], config, cache_form, progress)
    takes_text = companions is not None and (companions / FOLDER).is_dir()
    coder: Coder = read_tokenizer(companions) if companions is not None and takes_text else IdsTokenizer()
    return calibration_of(sources_from_corpus(calibrate, coder), calibrate.name, config, cache_form, progress)
