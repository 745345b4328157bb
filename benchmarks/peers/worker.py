"""A peer in a process and an environment of its own, whose python runs this file by path: it imports nothing of ours.

One JSON object a line comes in, one goes out:
    load     folder, settings            -> seconds, version, bytes of what it read
    prepare  sources, beam, length, forced -> what is to be decoded from now on; sources of audio are a file's name
    run                                  -> decodes it
    tokens                               -> the output of the last run, without end tokens and padding
    memory                               -> peak bytes of this process
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class HuggingFacePeer:
    """`generate` of transformers, eager."""

    libraries: tuple[str, ...] = ("torch", "transformers")

    def __init__(self, folder: Path, ids: dict[str, Any], settings: dict[str, Any]):
        import torch

        self.ids = ids
        self.torch = torch
        torch.set_num_threads(settings["threads"])
        self.model = self.model_from(folder, settings)

    def model_from(self, folder: Path, settings: dict[str, Any]) -> Any:
        import transformers

        self.version = f"transformers {transformers.__version__}"
        self.read = [folder / "model.safetensors"]
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        if settings.get("compiled"):
            model.generation_config.cache_implementation = "static"
            model.forward = self.torch.compile(model.forward)
        return model

    def prepare(self, sources: Any, beam: int, length: int, forced: bool) -> None:
        """`sources` are token ids; of audio, the name of a file of features in the folder."""
        width = max(map(len, sources))
        rows = [[token + self.ids["source"] for token in source] for source in sources]
        pad = self.ids["pad"]
        self.inputs: Any = {
            "input_ids": self.torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
            "attention_mask": self.torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        }
        self.options: dict[str, Any] = {
            "num_beams": beam,
            "do_sample": False,
            "max_new_tokens": length,
            "min_new_tokens": length - 1 if forced else 0,  # the last token may be the end token
            "early_stopping": False,
            "length_penalty": 1.0,
        }

    def run(self) -> None:
        with self.torch.inference_mode():
            self.output = self.generate(**self.inputs, **self.options)

    def generate(self, **given: Any) -> Any:
        return self.model.generate(**given)

    def tokens(self) -> list[list[int]]:
        return [cut(row[1:], self.ids) for row in self.output.tolist()]


class WhisperPeer(HuggingFacePeer):
    """The same for audio: the library's search alone, without what its Whisper adds to it."""

    def __init__(self, folder: Path, ids: dict[str, Any], settings: dict[str, Any]):
        self.folder = folder
        super().__init__(folder, ids, settings)

    def model_from(self, folder: Path, settings: dict[str, Any]) -> Any:
        import transformers

        self.version = f"transformers {transformers.__version__}"
        self.read = [folder / "model.safetensors"]
        return transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()

    def prepare(self, sources: Any, beam: int, length: int, forced: bool) -> None:
        import numpy

        features = self.torch.from_numpy(numpy.load(self.folder / sources))
        super().prepare([[0]] * len(features), beam, length, forced=False)
        fed = [self.ids["start"], *self.ids["prompt"]]
        self.inputs = {"input_features": features, "decoder_input_ids": self.torch.tensor([fed] * len(features))}
        self.options["suppress_tokens"] = [self.ids["end"]] if forced else None

    def generate(self, **given: Any) -> Any:
        from transformers import GenerationMixin

        return GenerationMixin.generate(self.model, **given)

    def tokens(self) -> list[list[int]]:
        fed = 1 + len(self.ids["prompt"])
        return [cut(row[fed:], self.ids) for row in self.output.tolist()]


class OptimumPeer(HuggingFacePeer):
    """Optimum's ONNX Runtime model, exported by itself."""

    libraries = ("torch", "optimum.onnxruntime")

    def model_from(self, folder: Path, settings: dict[str, Any]) -> Any:
        import onnxruntime
        from optimum.onnxruntime import ORTModelForSeq2SeqLM

        self.version = f"optimum {distribution_version('optimum-onnx')}, onnxruntime {onnxruntime.__version__}"
        exported = folder / "optimum"
        if not (exported / "config.json").is_file():
            ORTModelForSeq2SeqLM.from_pretrained(folder, export=True).save_pretrained(exported)
        self.read = [path for path in exported.iterdir() if path.is_file()]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings["threads"]
        return ORTModelForSeq2SeqLM.from_pretrained(exported, session_options=options)


class OpenVinoPeer(HuggingFacePeer):
    """Optimum Intel's OpenVINO model, exported by itself; `precision` is float32, bf16 or int8 (weights)."""

    libraries = ("torch", "optimum.intel")

    def model_from(self, folder: Path, settings: dict[str, Any]) -> Any:
        from optimum.intel import OVModelForSeq2SeqLM

        self.version = f"openvino {distribution_version('openvino')}"
        int8 = settings["precision"] == "int8"
        exported = folder / f"openvino-{'int8' if int8 else 'float'}"
        if not (exported / "config.json").is_file():
            OVModelForSeq2SeqLM.from_pretrained(folder, export=True, load_in_8bit=int8).save_pretrained(exported)
        self.read = [path for path in exported.iterdir() if path.is_file()]
        config = {
            "INFERENCE_NUM_THREADS": str(settings["threads"]),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if settings["precision"] == "bf16" else "f32",
        }
        return OVModelForSeq2SeqLM.from_pretrained(exported, ov_config=config)


class CTranslate2Peer:
    """`translate_batch`; with several workers the batch is cut into as many parts."""

    libraries = ("ctranslate2",)

    def __init__(self, folder: Path, ids: dict[str, Any], settings: dict[str, Any]):
        import ctranslate2

        self.ids, self.version = ids, f"ctranslate2 {ctranslate2.__version__}"
        self.workers = settings["inter_threads"]
        converted = folder / f"ctranslate2-{settings['precision']}"
        if not (converted / "model.bin").is_file():
            self.convert(folder, converted, settings["precision"])
        self.read = [path for path in converted.iterdir() if path.is_file()]
        self.model = self.kind(ctranslate2)(
            str(converted),
            compute_type=settings["precision"],
            inter_threads=self.workers,
            intra_threads=settings["intra_threads"],
        )

    def kind(self, ctranslate2: Any) -> Any:
        return ctranslate2.Translator

    def convert(self, folder: Path, converted: Path, precision: str) -> None:
        loader, model = self.loader_and_model(folder)
        spec = loader.get_model_spec(model)
        loader.set_vocabulary(spec, [self.word(token) for token in range(self.ids["vocab"])])
        self.configure(spec)
        spec.validate()
        if precision != "float32":
            spec.optimize(quantization=precision)
        converted.mkdir(parents=True, exist_ok=True)
        spec.save(str(converted))

    def loader_and_model(self, folder: Path) -> tuple[Any, Any]:
        import transformers
        from ctranslate2.converters.transformers import BartLoader, T5Loader, UMT5Loader

        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        if model.config.model_type == "umt5":
            return UMT5Loader(), model
        if model.config.model_type == "t5":
            # Its converter scales the output by this flag, which the library always sets, and goes by another itself.
            model.config.tie_word_embeddings = model.config.scale_decoder_outputs
            return T5Loader(), model
        model.config.normalize_before = model.config.model_type == "pegasus"
        model.config.normalize_embedding = False
        return BartLoader(), model

    def configure(self, spec: Any) -> None:
        spec.config.eos_token, spec.config.decoder_start_token = (
            self.word(self.ids["end"]),
            self.word(self.ids["start"]),
        )
        spec.config.bos_token, spec.config.unk_token = spec.config.decoder_start_token, self.word(self.ids["pad"])

    def word(self, token: int) -> str:
        return f"t{token}"

    def prepare(self, sources: Any, beam: int, length: int, forced: bool) -> None:
        self.inputs: Any = [[self.word(token + self.ids["source"]) for token in source] for source in sources]
        self.options: dict[str, Any] = {
            "beam_size": beam,
            "max_decoding_length": length,
            "min_decoding_length": length - 1 if forced else 0,
            "max_batch_size": -(-len(sources) // self.workers),
            "return_end_token": True,
        }

    def run(self) -> None:
        self.output = self.model.translate_batch(self.inputs, **self.options)

    def tokens(self) -> list[list[int]]:
        return [cut([int(word[1:]) for word in answer.hypotheses[0]], self.ids) for answer in self.output]


class CTranslate2WhisperPeer(CTranslate2Peer):
    """`Whisper.generate`; with several workers the batch is cut into as many parts."""

    def __init__(self, folder: Path, ids: dict[str, Any], settings: dict[str, Any]):
        super().__init__(folder, ids, settings)
        self.folder = folder

    def kind(self, ctranslate2: Any) -> Any:
        self.view = ctranslate2.StorageView.from_array
        return ctranslate2.models.Whisper

    def loader_and_model(self, folder: Path) -> tuple[Any, Any]:
        import transformers
        from ctranslate2.converters.transformers import WhisperLoader

        return WhisperLoader(), transformers.WhisperForConditionalGeneration.from_pretrained(folder)

    def configure(self, spec: Any) -> None:
        spec.config.suppress_ids = spec.config.suppress_ids_begin = spec.config.lang_ids = []
        spec.config.alignment_heads = [(0, 0)]

    def word(self, token: int) -> str:
        return self.ids["words"].get(str(token), f"t{token}")

    def prepare(self, sources: Any, beam: int, length: int, forced: bool) -> None:
        import numpy

        self.inputs = numpy.array_split(numpy.load(self.folder / sources), self.workers)
        self.options = {
            "beam_size": beam,
            "max_length": 2 * length,  # it decodes half of what it is asked for, the other half being for a prompt
            "suppress_blank": False,
            "suppress_tokens": [self.ids["end"]] if forced else [],
            "asynchronous": True,
        }

    def run(self) -> None:
        fed = [self.ids["start"], *self.ids["prompt"]]
        parts = [
            self.model.generate(self.view(part), [fed] * len(part), **self.options) for part in self.inputs if len(part)
        ]
        self.output = [waiting.result() for part in parts for waiting in part]

    def tokens(self) -> list[list[int]]:
        # The end token is not among them. What stops before the asked length has ended.
        longest = self.options["max_length"] // 2
        rows = [list(answer.sequences_ids[0]) for answer in self.output]
        return [cut(row if len(row) == longest else [*row, self.ids["end"]], self.ids) for row in rows]


PEERS: dict[str, Any] = {
    "ctranslate2": CTranslate2Peer,
    "hugging_face": HuggingFacePeer,
    "optimum": OptimumPeer,
    "openvino": OpenVinoPeer,
}
AUDIO_PEERS: dict[str, Any] = {"ctranslate2": CTranslate2WhisperPeer, "hugging_face": WhisperPeer}


def peer_for(name: str, folder: Path) -> Any:
    """The peer of that name for the model in a folder."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "whisper":
        return PEERS[name]
    if name not in AUDIO_PEERS:
        raise ValueError(f"{name} is not asked for audio here")
    return AUDIO_PEERS[name]


def cut(tokens: list[int], ids: dict[str, Any]) -> list[int]:
    """A peer's output in our ids, up to and with its end token."""
    if ids["end"] in tokens:
        tokens = tokens[: tokens.index(ids["end"]) + 1]
    return [token - ids["target"] for token in tokens]


def distribution_version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most memory this process has had.

    Where the kernel keeps it for the program alone, it is read there: getrusage counts what the parent had before exec.
    """
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bring_in(peer: Any, folder: Path, settings: dict[str, Any]) -> None:
    """Imports what the peer needs, as importing a library is not loading a model.

    CTranslate2 imports torch for its converters if it can: a model that is converted needs neither, and their memory
    would be charged to it.
    """
    if issubclass(peer, CTranslate2Peer) and (folder / f"ctranslate2-{settings['precision']}" / "model.bin").is_file():
        sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]
    for name in peer.libraries:
        importlib.import_module(name)


def answer_to(request: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    verb = request.pop("do")
    if verb == "load":
        folder = Path(request["folder"])
        ids = json.loads((folder / "ids.json").read_text())
        peer = peer_for(request["peer"], folder)
        bring_in(peer, folder, request["settings"])
        started = time.perf_counter()
        it = peers["it"] = peer(folder, ids, request["settings"])
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "version": it.version, "bytes": sum(path.stat().st_size for path in it.read)}
    if verb == "prepare":
        peers["it"].prepare(**request)
    elif verb == "run":
        peers["it"].run()
    elif verb == "tokens":
        return {"tokens": peers["it"].tokens()}
    elif verb == "memory":
        return {"bytes": peak_bytes()}
    return {}


def main() -> None:
    # Libraries may print; only our responses may reach the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peers: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = answer_to(json.loads(line), peers)
        except Exception as error:  # any error of a peer is sent to the benchmark
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
