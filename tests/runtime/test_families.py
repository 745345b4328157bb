"""Every family with every feature of the runtime: a new family is one more row, a new feature one more test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fast_cases import rest_slow
from support.hugging_face_models import saved, small_model
from support.mutations import Mutation, put, values_of, wrong_copy
from support.trocr_models import saved_trocr, small_trocr
from support.whisper_models import audio_config

import seq2engine
from seq2engine.model.checkpoint import random_model
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.importers.trocr import checkpoint_from_trocr
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.attention.view import attention_view
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.ort.speculative import SpeculativeSession
from seq2engine.runtime.parity.locate.locate import LocateOptions, locate
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.report.tables import level_row
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.text.scoring import score_targets
from seq2engine.runtime.text.sources import random_sources
from seq2engine.runtime.torch_session import TorchSession

TINY = dataclasses.replace(PRESETS["tiny"], source_vocab=60, target_vocab=60, max_source=24, max_target=24)
T5_V11 = {"tied": False, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
# name -> a config of ours, or a family of the library and its changes
FAMILIES: dict[str, Any] = {
    "post-norm": TINY,
    "pre-norm, rotary": dataclasses.replace(TINY, norm="pre", positions="rotary", activation="gelu"),
    "relative": dataclasses.replace(TINY, positions="relative", max_distance=9),
    "marian": ("marian", {"biased": True}),
    "bart": ("bart", {}),
    "mbart": ("mbart", {"tie_word_embeddings": False}),
    "m2m_100": ("m2m_100", {}),
    "t5": ("t5", {}),
    "t5 v1.1": ("t5", T5_V11),
    "umt5": ("umt5", {"tied": False}),
    "audio": audio_config(encoder_layers=2),
    "trocr": ("trocr", {"kind": "deit", "activation_function": "relu"}),
    "trocr, projected": ("trocr", {"use_learned_position_embeddings": False, "cross_attention_hidden_size": None}),
}
GREEDY, BEAM = SearchOptions(max_length=12), SearchOptions(max_length=12, beam=4)
NORM = "encoder.1.feed_residual.norm"
LIMITS = {"count": 16, "max_length": 6, "beam": 2, "threads": 1}


# A family of each kind of positions and of each front end: the others run in `make test-slow`.
FAST = ("pre-norm, rotary", "marian", "t5", "audio", "trocr, projected")


@pytest.fixture(scope="module", params=rest_slow(FAMILIES, FAST))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    given = FAMILIES[request.param]
    if isinstance(given, tuple):
        family, changes = given
        folder = tmp_path_factory.mktemp("theirs")
        if family == "trocr":
            return checkpoint_from_trocr(saved_trocr(small_trocr(2, **changes), folder)).model
        folder = saved(small_model(family, 2, **changes), folder)
        return checkpoint_from_hugging_face(folder).model
    return random_model(given, 3)


@pytest.fixture(scope="module")
def bundle(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return seq2engine.onnx_from_model(model, tmp_path_factory.mktemp("family") / "bundle", ("fp32", "w8a8"))


@pytest.fixture(scope="module")
def half(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In fp16: with the calibration as much work as all else that is made here, and only a slow test needs it."""
    return seq2engine.onnx_from_model(model, tmp_path_factory.mktemp("half") / "bundle", ("fp32", "fp16"))


def sources_of(bundle: Any, count: int, longest: int = 10) -> list[Any]:
    if bundle.config.takes_features:
        return random_sources(bundle.config, count, seed=count)
    random = np.random.default_rng(count)
    return [random.integers(8, 59, length).tolist() for length in random.integers(1, longest + 1, count)]


def decoded(session: Any, sources: list[Any], options: SearchOptions) -> list[tuple[int, ...]]:
    return [best.tokens for best, *_ in generate(session, sources, options)]


def test_long_decodes_with_compaction(bundle: Any) -> None:
    """To the model's last position, or 60 tokens: slots move several times, in a static and in a growing cache."""
    longest = min(60, bundle.config.max_target)
    options = SearchOptions(max_length=longest, min_length=longest, beam=4)
    model = open_session(bundle, "torch", "fp32").model
    expected = decoded(TorchSession(model), sources_of(bundle, 3), options)
    assert all(len(row) == longest for row in expected)
    with OrtSession.from_bundle(bundle, "fp32", threads=1) as session:
        assert decoded(session, sources_of(bundle, 3), options) == expected
    assert decoded(TorchSession(model, cache_form="growing"), sources_of(bundle, 3), options) == expected


def test_speculative_decoding(bundle: Any) -> None:
    with open_session(bundle, precision="fp32", threads=1) as alone:
        expected = [decoded(alone, [source], GREEDY) for source in sources_of(bundle, 6)]
        beams = decoded(alone, sources_of(bundle, 6), BEAM)
    with SpeculativeSession.from_bundle(bundle, "fp32", "w8a8", threads=1) as session:
        assert [decoded(session, [source], GREEDY) for source in sources_of(bundle, 6)] == expected
        assert decoded(session, sources_of(bundle, 6), BEAM) == beams


def test_shortlist(bundle: Any) -> None:
    options = dataclasses.replace(BEAM, shortlist=tuple(range(8, 40)))
    with open_session(bundle, "torch", "fp32") as session:
        expected = decoded(session, sources_of(bundle, 8), options)
    with open_session(bundle, precision="fp32", threads=1) as session:
        assert decoded(session, sources_of(bundle, 8), options) == expected


@pytest.mark.each_value
@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_continuous_batching(bundle: Any, options: SearchOptions) -> None:
    """Rows are given to other sources in the middle of a decode."""
    sources = sources_of(bundle, 12)
    with open_session(bundle, precision="fp32", threads=1) as session:
        expected = decoded(session, sources, options)
        found = dict(translate_many(session, sources, options, batch=3))
    assert [found[place][0].tokens for place in range(len(sources))] == expected


def test_scores(bundle: Any) -> None:
    """Of outputs of greedy search: ONNX Runtime errs no more than PyTorch in fp32."""
    sources = sources_of(bundle, 8)
    found: dict[tuple[str, str], np.ndarray] = {}
    with open_session(bundle, "torch", "fp32") as session:
        targets = decoded(session, sources, GREEDY)
    for backend, precision in (("torch", "fp64"), ("torch", "fp32"), ("onnxruntime", "fp32")):
        with open_session(bundle, backend, precision) as session:
            scores = score_targets(session, sources, targets)
            found[backend, precision] = np.concatenate([score.log_probs for score in scores])
    exact, rounded, ours = found.values()
    unit = np.finfo(np.float32).eps * (1 + np.abs(exact).max())
    assert np.abs(ours - exact).max() <= 16 * max(np.abs(rounded - exact).max(), unit)


def test_attention_view(bundle: Any) -> None:
    view = attention_view(bundle, "fp32", sources_of(bundle, 1)[0], [9, 10, 11], GREEDY, threads=1)
    assert all(view.checks)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "w8a8"])
def test_parity(request: pytest.FixtureRequest, model: Any, precision: str) -> None:
    bundle = request.getfixturevalue("half" if precision == "fp16" else "bundle")
    result = parity_of(bundle, precision=precision, options=ParityOptions(**LIMITS, sources=sources_of(bundle, 16)))
    # Random layers amplify what int8 rounds off the activations, so that outputs may differ; no tensor may.
    assert all(result.tensors) if precision == "w8a8" else result, result.reason
    verdict, words = level_row(result, "graphs")
    assert verdict == "pass"
    assert ("warning: ONNX Runtime's CPU computes" in words) == (precision == "fp16")  # it does not really round


def scaled_norm(graph: Any) -> None:
    name = next(one.input[1] for one in graph.node if one.name.startswith(f"{NORM}/"))
    put(graph, name, values_of(graph, name) * np.float32(1.01))


@pytest.mark.slow
def test_a_norm_whose_scale_was_changed_is_located(bundle: Any, tmp_path: Path) -> None:
    wrong = wrong_copy(bundle, tmp_path / "wrong", Mutation("encoder", scaled_norm, NORM, ("weight",)))
    found = locate(wrong, LocateOptions("fp32", sources_of(bundle, 16), beam=2, longest=4, threads=1))
    assert found is not None
    assert NORM in found.text


@pytest.mark.slow
def test_nothing_is_located_in_a_good_bundle(bundle: Any) -> None:
    assert locate(bundle, LocateOptions("fp32", sources_of(bundle, 16), beam=2, longest=4, threads=1)) is None
