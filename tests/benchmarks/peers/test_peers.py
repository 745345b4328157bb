"""Peers output what we output: the real libraries of this environment, in processes of their own, on our weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hugging_face_models import in_double
from support.rounding import double_error

from seq2engine.benchmarks.cases import Case, sources_for
from seq2engine.benchmarks.peers.hugging_face_from_model import hugging_face_from_model
from seq2engine.benchmarks.peers.ids import ids_of
from seq2engine.benchmarks.peers.processes import Peer, PeerKind, open_worker, peer_kinds, peers_from_names
from seq2engine.errors import RequestError, SessionError, UsageError
from seq2engine.model.checkpoint import build_model, fill_randomly, random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.presets import PRESETS
from seq2engine.model.transformer import Transformer
from seq2engine.runtime.encoder_inputs import FeatureSource
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession

SOURCES = [[5, 9, 30, 7], [11, 4, 8, 25, 31, 6, 17], [3]]
SMALL = {"encoder_layers": 1, "decoder_layers": 2, "heads": 2, "d_model": 16, "d_ff": 24}
LENGTHS = {"max_source": 12, "max_target": 12}
MODELS = {
    "post, shared": ModelConfig(**SMALL, **LENGTHS, source_vocab=40, target_vocab=40, tie_output=False),
    "post, tied": ModelConfig(**SMALL, **LENGTHS, source_vocab=40, target_vocab=40, activation="gelu"),
    "pre, two vocabularies": ModelConfig(
        **SMALL,
        **LENGTHS,
        source_vocab=35,
        target_vocab=52,
        share_embeddings=False,
        norm="pre",
        positions="learned",
        activation="silu",
        output_bias=True,
    ),
}

T5 = {  # with as many layers on both sides: the library's T5 counts those of its cache by the encoder's
    **SMALL,
    "encoder_layers": 2,
    "norm": "pre",
    "norm_kind": "rms",
    "positions": "relative",
    "biases": False,
    "scale_attention": False,
    "scale_embeddings": False,
    "norm_epsilon": 1e-6,
    "source_vocab": 40,
    "target_vocab": 40,
    "start_id": 0,
    "end_id": 1,
}
MODELS |= {
    "T5 v1.0": ModelConfig(**LENGTHS, **T5, max_distance=5, d_kv=6, scale_output=True),
    "T5 v1.1": ModelConfig(**LENGTHS, **T5, max_distance=20, activation="gelu_tanh", gated=True, tie_output=False),
    "UMT5": ModelConfig(**LENGTHS, **T5, max_distance=5, distances_per_layer=True, scale_output=True),
}


def wandering(config: ModelConfig) -> Transformer:
    return random_model(config, seed=3)


def ours(model: Transformer, beam: int, forced: bool, beam_style: str) -> list[tuple[int, ...]]:
    options = SearchOptions(max_length=10, min_length=10 if forced else 0, beam=beam, beam_style=beam_style)
    with TorchSession(model, "fp32") as session:
        return [nbest[0].tokens for nbest in generate(session, SOURCES, options)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("peer", ["ctranslate2 float32", "transformers"])
def test_a_peer_s_tokens_are_ours(peer: str, name: str, tmp_path: Path, environments: Path) -> None:
    model = wandering(MODELS[name])
    hugging_face_from_model(model, tmp_path)
    kind = peer_kinds(1)[peer]
    with open_worker(peer, kind, kind.settings[0], tmp_path, environments) as worker:
        for beam in (1, 4):
            for forced in (False, True):
                worker.prepare(SOURCES, beam, 10, forced)
                worker.run()
                assert worker.tokens() == ours(model, beam, forced, kind.beam_style), (beam, forced)
        assert worker.load_seconds > 0
        assert worker.peak_bytes() > 1e7


def test_the_folder_is_read_back_as_the_model_it_was(tmp_path: Path) -> None:
    model = wandering(MODELS["post, tied"])
    hugging_face_from_model(model, tmp_path)
    again = checkpoint_from_hugging_face(tmp_path).model
    ids, mask, outputs = torch.tensor([SOURCES[1]]), torch.ones(1, 7, dtype=torch.bool), torch.tensor([[1, 30, 12]])
    assert torch.equal(model(ids, mask, outputs), again(ids, mask, outputs))


@pytest.mark.parametrize("name", ["T5 v1.0", "T5 v1.1", "UMT5"])
def test_distances_have_buckets_of_their_own(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = wandering(MODELS[name]).double()
    hugging_face_from_model(model, tmp_path)
    theirs = in_double(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)).eval()
    ids, mask, outputs = torch.tensor([SOURCES[1]]), torch.ones(1, 7, dtype=torch.bool), torch.arange(3, 15)[None]
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=outputs).logits
        found = model(ids, mask, outputs)
        assert (found - wanted).abs().max() <= double_error(model.float()(ids, mask, outputs), wanted)


AUDIO = dataclasses.replace(PRESETS["whisper-tiny.en"], **SMALL, mels=8, max_source=20, max_target=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "batch"), [("ctranslate2 float32", 2), ("ctranslate2 float32", 1), ("transformers", 2)]
)
def test_a_peer_s_tokens_of_audio_are_ours(peer: str, batch: int, tmp_path: Path, environments: Path) -> None:
    model = wandering(AUDIO)
    ids = hugging_face_from_model(model, tmp_path)
    kind = peer_kinds(1)[peer]
    made = sources_for(Case("audio", batch, 1, 20, 8), AUDIO)
    sources = [
        FeatureSource(np.asfortranarray(source.features), len(source)) for source in made
    ]  # large ones come in that order
    with open_worker(peer, kind, kind.settings[0], tmp_path, environments) as worker:
        for beam in (1, 4):
            for forced in (False, True):
                worker.prepare(sources, beam, 8, forced)
                worker.run()
                rules = {"banned": ((AUDIO.end_id,),), "ignore_eos": True} if forced else {}
                options = SearchOptions(max_length=8, beam=beam, beam_style=kind.beam_style, prompt=ids.prompt, **rules)
                with TorchSession(model, "fp32") as session:
                    outputs = [nbest[0].tokens for nbest in generate(session, sources, options)]
                assert worker.tokens() == outputs, (beam, forced)


def test_peers_know_only_the_vocabularies_of_openai(tmp_path: Path) -> None:
    model = build_model(dataclasses.replace(AUDIO, target_vocab=51000))
    with pytest.raises(RequestError, match="its vocabulary is 51000, a Whisper's 51864, 51865 or 51866; leave out"):
        hugging_face_from_model(model, tmp_path)


def test_two_vocabularies_stand_one_behind_the_other() -> None:
    ids = ids_of(MODELS["pre, two vocabularies"])
    assert (ids.vocab, ids.target, ids.start, ids.end) == (87, 35, 36, 37)


def test_what_no_peer_can_run_is_refused_at_once(tmp_path: Path) -> None:
    config = ModelConfig(**SMALL, positions="rotary", max_source=10, norm_epsilon=1e-6)
    model = build_model(config)
    fill_randomly(model, torch.Generator().manual_seed(0))
    with pytest.raises(RequestError) as refused:
        hugging_face_from_model(model, tmp_path)
    assert str(refused.value) == (
        "the peers cannot run this model: it has rotary positions; its norm_epsilon is 1e-06, theirs 1e-05; "
        "its position tables have 10 and 512 rows, theirs one length; leave out --peers"
    )
    assert not list(tmp_path.iterdir())


def test_peers_are_chosen_by_name_and_must_be_installed(environments: Path) -> None:
    chosen = peers_from_names(["transformers", "ctranslate2 int8"], 2, environments)
    assert [kind.worker for kind in chosen.values()] == ["hugging_face", "ctranslate2"]
    assert {(way["inter_threads"], way["intra_threads"]) for way in chosen["ctranslate2 int8"].settings} == {
        (1, 1),
        (1, 2),
        (2, 1),
    }
    with pytest.raises(UsageError, match="unknown peer marian, expected all or some of ctranslate2 float32, "):
        peers_from_names(["marian"], 2, environments)
    with pytest.raises(UsageError, match="has no openvino, optimum; install the peers with: make peers"):
        peers_from_names(["all"], 2, environments)


def test_a_peer_that_fails_or_dies_is_reported_with_its_error(tmp_path: Path, environments: Path) -> None:
    kind = peer_kinds(1)["transformers"]
    with pytest.raises(SessionError, match=r"transformers failed: FileNotFoundError: .*ids\.json"):
        open_worker("transformers", kind, kind.settings[0], tmp_path, environments)
    broken = environments / "broken" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SessionError, match="dead died: no such library"):
        open_worker(
            "dead", PeerKind("hugging_face", "broken", "float32", "huggingface", ({},)), {}, tmp_path, environments
        )


class TimedWorker:
    """Runs take these seconds, one after the other."""

    def __init__(self, *costs: float):
        self.costs, self.runs = costs, 0

    def run(self) -> float:
        self.runs += 1
        return self.costs[self.runs - 1]


@pytest.mark.parametrize(
    ("workers", "best", "runs"),
    [
        (
            [TimedWorker(0.3, 0.4, 0.3), TimedWorker(1.9, 0.5, 0.1), TimedWorker(0.2, 0.2, 0.2)],
            1,
            [3, 3, 3],
        ),  # the last try counts as the first does
        ([TimedWorker(30.0), TimedWorker(10.0), TimedWorker(20.0)], 1, [1, 1, 1]),  # long decodes are tried once
        ([TimedWorker(1.0)], 0, [1]),  # nothing to choose, but its output is wanted
    ],
)
def test_the_best_setting_is_the_fastest_one(workers: list[TimedWorker], best: int, runs: list[int]) -> None:
    peer = Peer(peer_kinds(2)["transformers"], workers)  # type: ignore[arg-type]
    assert peer.best_for(lambda run: run()) is workers[best]  # type: ignore[arg-type,return-value,comparison-overlap]
    assert [worker.runs for worker in workers] == runs


def test_settings_are_tried_in_turns() -> None:
    """One after the other, a slow minute would be the fault of one of them."""
    order: list[str] = []

    class Named(TimedWorker):
        def __init__(self, name: str):
            super().__init__(1.0, 1.0, 1.0)
            self.name = name

        def run(self) -> float:
            order.append(self.name)
            return super().run()

    peer = Peer(peer_kinds(2)["transformers"], [Named("a"), Named("b")])  # type: ignore[list-item]
    peer.best_for(lambda run: run())  # type: ignore[arg-type,return-value]
    assert order == ["a", "b"] * 3
