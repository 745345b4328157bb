"""From audio to text, timed: samples in, text out, for our arms, CTranslate2 and Hugging Face in turns.

Every arm computes features and encoder, decodes greedily without timestamps to the end, with the same tokens
suppressed, and gives mean log-probability and probability of no speech as `transcribe` needs them; the library's
`generate` gives neither. Peers get the library's features. One thread or all: of CTranslate2 the faster counts.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.common.tables import text_table
from seq2engine.errors import UsageError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.speech import SpeechConfig, read_speech
from seq2engine.runtime.quality.metrics import edit_distance
from seq2engine.runtime.speech.audio import audio_from
from seq2engine.runtime.speech.features import RATE
from seq2engine.runtime.threads import usable_cores
from seq2engine.runtime.translator import load

from ..machine import environment, load_of_others
from ..peers.hugging_face_from_model import hugging_face_from_model
from ..timing import Samples, interleaved, ratio_interval

REST = 0.2  # seconds before a call: threads of the arm before may still be awake
ARMS = {"onnxruntime fp32": "ctranslate2 float32", "onnxruntime w8a8": "ctranslate2 int8"}  # ours -> their like
LIBRARY = "transformers"
Call = Callable[[], Sequence[int]]  # of the audio: the tokens of its text


def measured_speech(bundle: Path, wav: Path, said: str, rounds: int, arms: Sequence[str] = ()) -> dict[str, Any]:
    """Times every arm, or the ones named, so many times in turns. `said` are the words of the audio."""
    known = [*ARMS, *ARMS.values(), LIBRARY]
    if unknown := [name for name in arms if name not in known]:
        raise UsageError(f"unknown arm {', '.join(unknown)}, expected some of {', '.join(known)}")
    wave = np.concatenate([*audio_from(wav).blocks()])[: 30 * RATE]
    load_before, threads = load_of_others(), usable_cores()
    with ExitStack() as stack:
        calls: dict[str, Call] = {}
        for name in arms or known:
            calls |= stack.enter_context(opened_arm(name, bundle, wave, threads))
        tokens = {name: list(call()) for name, call in calls.items()}
        times = interleaved(calls, rounds, rest=REST)
    text = open_bundle(bundle).tokenizer().decode_target
    return {
        "audio_seconds": len(wave) / RATE,
        "said": said,
        "arms": {
            name: {"ns": list(times[name].nanoseconds), "tokens": tokens[name], "text": text(tokens[name])}
            for name in calls
        },
        "environment": dataclasses.asdict(environment(threads, load_before)),
    }


@contextmanager
def opened_arm(name: str, bundle: Path, wave: np.ndarray, threads: int) -> Iterator[dict[str, Call]]:
    """An arm by name; of CTranslate2 one with one thread and one with all."""
    if name in ARMS:
        with load(bundle, precision=name.split()[1], draft=None, threads=threads) as model:
            end = model.session.config.end_id

            def ours() -> Sequence[int]:
                (segment,) = model.transcribe(wave, temperatures=(0.0,)).segments
                return [token for token in segment.tokens if token < end]

            yield {name: ours}
        return
    speech, reference = read_speech(bundle), load_checkpoint(bundle)
    with tempfile.TemporaryDirectory() as folder:
        hugging_face_from_model(reference, Path(folder))
        fed = [reference.config.start_id, *speech.prompt()]
        if name == LIBRARY:
            yield {name: library_call(Path(folder), wave, fed, speech, threads)}
        else:
            ways = sorted({1, threads})
            made = ctranslate2_calls(Path(folder), name.split()[1], wave, fed, speech, ways)
            yield {f"{name}, {way} threads": call for way, call in zip(ways, made, strict=True)}


def ctranslate2_calls(
    folder: Path, precision: str, wave: np.ndarray, fed: list[int], speech: SpeechConfig, threads: Sequence[int]
) -> list[Call]:
    import ctranslate2

    from ..peers.worker import CTranslate2WhisperPeer

    ids = json.loads((folder / "ids.json").read_text())
    features = feature_extractor()

    def call_with(way: int) -> Call:
        settings = {"precision": precision, "inter_threads": 1, "intra_threads": way}
        peer = CTranslate2WhisperPeer(folder, ids, settings)

        def call() -> Sequence[int]:
            view = ctranslate2.StorageView.from_array(features(wave))
            (found,) = peer.model.generate(
                view,
                [fed],
                beam_size=1,
                max_length=448,
                suppress_blank=False,
                suppress_tokens=[*speech.suppressed],
                return_scores=True,
                return_no_speech_prob=True,
            )
            return list(found.sequences_ids[0])

        return call

    return [call_with(way) for way in threads]


def library_call(folder: Path, wave: np.ndarray, fed: list[int], speech: SpeechConfig, threads: int) -> Call:
    import torch
    from transformers import GenerationMixin, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features, end = feature_extractor(), model.config.eos_token_id

    def call() -> Sequence[int]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            row = GenerationMixin.generate(
                model,
                input_features=torch.from_numpy(features(wave)),
                decoder_input_ids=torch.tensor([fed]),
                max_new_tokens=224,
                do_sample=False,
                suppress_tokens=[*speech.suppressed],
            )[0, len(fed) :].tolist()
        return [token for token in row if token != end]

    return call


def feature_extractor() -> Callable[[np.ndarray], np.ndarray]:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()

    def features(wave: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(extractor(wave, sampling_rate=RATE, return_tensors="np").input_features)

    return features


def speech_table(result: dict[str, Any]) -> str:
    """Every arm's median, tokens and wrong words, and how many times as fast ours are as the best peer of a kind."""
    taken = {name: Samples(tuple(arm["ns"])) for name, arm in result["arms"].items()}
    first = next(iter(result["arms"].values()))
    head, rows = ("arm", "ms", "tokens", "text of the first arm", "wrong words", "times as fast"), []
    for name, arm in result["arms"].items():
        same = "yes" if arm["tokens"] == first["tokens"] else "no"
        wrong = f"{word_error_rate(result['said'], arm['text']):.1%}"
        rows.append([name, f"{taken[name].median:.0f}", str(len(arm["tokens"])), same, wrong, fastness(name, taken)])
    return text_table(head, rows)


def word_error_rate(said: str, heard: str) -> float:
    """Substitutions, deletions and insertions per word of the audio."""
    words, found = (re.findall(r"[a-z']+", text.lower()) for text in (said, heard))
    return edit_distance(words, found) / len(words)


def fastness(name: str, taken: dict[str, Samples]) -> str:
    like = ARMS.get(name)
    peers = [peer for peer in taken if like is not None and (peer.startswith(like) or peer == LIBRARY)]
    if not peers:
        return ""
    best = min(peers, key=lambda peer: taken[peer].median)
    ratio = ratio_interval(taken[best], taken[name])
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{interval} than {best}"
