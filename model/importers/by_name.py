"""Opens a model by name: a folder of ours, a checkpoint of another library or of the hub, a shipped one, or
random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from seq2engine.common.hub import hub_hint
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import CheckpointError, RequestError

from ..checkpoint import copy_companions, load_checkpoint, random_model, write_origin
from ..hub_files import located
from ..shipped import shipped_checkpoint
from ..transformer import Transformer
from .detect import KNOWN, import_located, is_foreign


@contextmanager
def opened_checkpoint(
    name: str, progress: Progress = silent, note: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Transformer, Path | None]]:
    """The model, and the folder of its companions (generation.json, tokenizer) for as long as the block lasts.

    `note` is called with what an importer could not carry over, one line each.
    """
    scheme, _, rest = name.partition(":")
    if scheme == "random":
        yield random_from_name(name), None
        return
    if scheme == "shipped":
        folder = shipped_checkpoint(rest)
        yield load_checkpoint(folder), folder
        return
    source = located(name, progress, note)
    if not source.path.exists():
        wanted = f"a checkpoint folder of ours, or {KNOWN}"
        raise CheckpointError(f"no checkpoint at {name}; expected {wanted}{hub_hint(Path(name))}")
    if is_foreign(source.path):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "checkpoint"
            result = import_located(source, folder, force=False, progress=progress)
            for text in result.notes:
                note(text)
            if not result.takes_text:
                note("takes token ids only: there is no usable tokenizer next to the weights")
            yield load_checkpoint(folder), folder
    elif source.origin:  # one of ours, in the hub's cache, which is not ours to write to
        with tempfile.TemporaryDirectory() as made:
            copy_companions(source.path, Path(made))
            write_origin(source.origin, Path(made))
            yield load_checkpoint(source.path), Path(made)
    else:
        yield load_checkpoint(name), Path(name)


def random_from_name(name: str) -> Transformer:
    _, preset, *seed = name.split(":")
    if len(seed) > 1 or not all(part.isdigit() for part in seed):
        raise RequestError(f"{name!r} is not random:PRESET or random:PRESET:SEED, such as random:tiny:7")
    return random_model(preset, int(seed[0]) if seed else 0)
