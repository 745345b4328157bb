"""The process of one load: opens a model, decodes, and prints times and memory. It needs no seq2engine for CTranslate2.

Started by loading.py as `python loading_process.py REQUEST`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MARKS = ("import", "load", "first token", "sentence", "32 sentences, 4 beams")
SENTENCES, BEAMS = 32, 4


def peak_bytes() -> int:
    """VmHWM: getrusage counts what the parent had before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: the kernel does not keep peak memory")


class Marks:
    """Seconds, CPU seconds and peak memory when a stage is complete; what reads the memory is not timed."""

    def __init__(self, started: float):
        self.started, self.seconds, self.cpu, self.peak = started, {}, {}, {}  # type: ignore[var-annotated]

    def __call__(self, mark: str) -> None:
        self.seconds[mark] = time.perf_counter() - self.started
        self.cpu[mark] = time.process_time()
        self.peak[mark] = peak_bytes()


def load_ours(request: dict[str, Any], texts: list[str], mark: Marks) -> str:
    import onnxruntime  # noqa: F401 - importing a library is not loading a model

    import seq2engine
    from seq2engine.runtime.ort import opening  # noqa: F401

    load = seq2engine.load
    mark("import")
    with load(request["model"], precision=request["precision"], threads=request["threads"]) as model:
        mark("load")
        model.translate(texts[0], beam=1, max_length=1)
        mark("first token")
        text = model.translate(texts[0], beam=1)
        mark("sentence")
        if request["batch"]:
            model.translate(texts[:SENTENCES], beam=BEAMS)
            mark(MARKS[-1])
    return str(text)


def load_theirs(request: dict[str, Any], texts: list[str], mark: Marks) -> str:
    sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]  # only its converters need them
    import ctranslate2
    import sentencepiece

    mark("import")
    pieces = sentencepiece.SentencePieceProcessor(request["spm"])
    workers = request["threads"]  # its own threads are slower than decodes in parallel on few cores
    model = ctranslate2.Translator(
        request["model"], compute_type=request["precision"], inter_threads=workers, intra_threads=1
    )
    mark("load")
    sources = [[*pieces.encode(text, out_type=str), "</s>"] for text in texts[:SENTENCES]]
    model.translate_batch(sources[:1], beam_size=1, max_decoding_length=1)
    mark("first token")
    tokens = model.translate_batch(sources[:1], beam_size=1)[0].hypotheses[0]
    mark("sentence")
    if request["batch"]:
        model.translate_batch(sources, beam_size=BEAMS, max_batch_size=-(-SENTENCES // workers))
        mark(MARKS[-1])
    return str(pieces.decode(tokens))


def convert(request: dict[str, Any]) -> None:
    from ctranslate2.converters import TransformersConverter

    precision = request["precision"]
    quantisation = None if precision == "float32" else precision
    TransformersConverter(request["hf"]).convert(request["model"], quantization=quantisation, force=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["do"] == "convert":
        convert(request)
        print("{}")
        return
    sys.path.pop(0)  # the folder of this file
    texts = [line.split("\t")[0] for line in Path(request["pairs"]).read_text(encoding="utf-8").splitlines()]
    mark = Marks(request["started"])
    text = (load_ours if request["library"] == "seq2engine" else load_theirs)(request, texts, mark)
    print(json.dumps({"seconds": mark.seconds, "cpu": mark.cpu, "peak": mark.peak, "text": text}))


if __name__ == "__main__":
    main()
