"""A process that has imported all commands once and forks for every case; and the files that cases start from."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path


def materials_in(folder: Path) -> Path:
    """The files that cases start from, made in that folder if they are not there.

    In a process of its own: this one stays without threads and sessions, so that it can fork.
    """
    if folder.exists():
        return folder
    from support.fuzzing.materials import write_materials

    process = multiprocessing.get_context("spawn").Process(target=write_materials, args=(folder,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the files to start from could not be made: exit code {process.exitcode}")
    return folder


def load_commands() -> Callable[[Sequence[str]], int]:
    """Everything that commands import, imported once; returns what a forked process runs."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import huggingface_hub.hf_api  # noqa: F401
    import onnx.reference  # noqa: F401
    import onnxruntime  # noqa: F401
    import PIL.ImageOps  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import sentencepiece  # noqa: F401
    import soundfile  # noqa: F401
    import tokenizers  # noqa: F401
    import torch

    torch.set_num_threads(1)
    import seq2engine.export.to_onnx
    import seq2engine.exporting
    import seq2engine.inspection.page
    import seq2engine.model.importers.by_name
    import seq2engine.model.training.text
    import seq2engine.runtime.attention.report
    import seq2engine.runtime.ort.opening
    import seq2engine.runtime.parity.run
    import seq2engine.runtime.speech.transcriber
    import seq2engine.runtime.torch_session
    import seq2engine.runtime.translator
    import seq2engine.serving.server
    import seq2engine.triton.repository  # noqa: F401
    from seq2engine.cli.main import main
    from support.fuzzing import arguments as of_parser
    from support.fuzzing.cluster import one_worker
    from support.hub_server import TOKEN, hub_of_this_process

    of_parser.parsers()
    gc.collect()
    gc.freeze()

    def run(argv: Sequence[str]) -> int:
        if argv[0] == "--in":
            os.chdir(argv[1])
            argv = argv[2:]
        with one_worker():
            if not any(word.startswith("hf:") for word in argv):
                return main(argv)
            with hub_of_this_process(Path(os.environ["HOME"]), TOKEN) as hub:
                hub.add("a/b", Path())
                return main(argv)

    return run
