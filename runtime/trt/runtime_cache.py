"""What TensorRT-RTX compiles for a GPU when an engine is opened there, kept in a file beside the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from seq2engine.common.atomic_folders import new_file

log = logging.getLogger("seq2engine")


class RuntimeCache:
    """The compiled kernels of one engine. Lives longer than the contexts that use it."""

    def __init__(self, config: Any, engine_path: Path):
        self.path = engine_path.with_suffix(".runtime_cache")
        self.cache = config.create_runtime_cache()
        self.saved = self.path.read_bytes() if self.path.is_file() else b""
        if self.saved and not self.cache.deserialize(self.saved):
            log.warning("%s is damaged, or of another GPU or driver: it is not used, and written anew", self.path)
            self.saved = b""
        config.set_runtime_cache(self.cache)

    def save(self) -> None:
        """Writes the file if there is anything new. A bundle that cannot be written to costs time, not the session."""
        content = self.cache.serialize()
        if content is None or bytes(content) == self.saved:
            return
        self.saved = bytes(content)
        try:
            with new_file(self.path) as beside:
                beside.write_bytes(self.saved)
        except OSError as error:
            log.warning("%s not written (%s): the next start compiles its kernels again", self.path, error.strerror)
