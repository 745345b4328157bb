"""Commands on a bundle that takes audio or images: those that work, and the alternative that the others name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.rounding import rounding_from_session
from support.trocr_models import image_config
from support.whisper_models import audio_config

from seq2engine import exporting
from seq2engine.benchmarks.cases import Case, case_problems, cases_for, sources_for
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.errors import BundleError, UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.packaging.package import package_from_bundle
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.locate.locate import locate_sources
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parities_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.scoring import score_targets
from seq2engine.runtime.text.sources import random_sources


@dataclass(frozen=True)
class Kind:
    """A kind of features: how messages speak of it, and a prompt of the model's own, as Whisper has."""

    name: str
    config: ModelConfig
    corpus: str
    command: str
    whole: str
    prompt: tuple[int, ...] = ()


KINDS = [
    Kind("audio", audio_config(), "random audio features", "transcribe {} file.wav", "window of audio has 24", (7, 8)),
    Kind("images", image_config(), "random images", "read {} line.png", "an image has 25"),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def bundle(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp(kind.name)
    if kind.prompt:
        (folder / "generation.json").write_text(json.dumps({"prompt": list(kind.prompt)}))
    model = random_model(kind.config, 4)
    return exporting.onnx_from_model(model, folder / "bundle", ("fp32", "fp16", "w8a8"), companions=folder)


def test_calibration_decodes_features(kind: Kind, bundle: Bundle) -> None:
    assert bundle.manifest.calibration["corpus"] == kind.corpus
    with pytest.raises(UsageError, match=f"--calibrate reads lines of text, but this model takes {kind.name}"):
        exporting.add_precisions(bundle, ("int8",), calibrate=Path("lines.txt"))


@pytest.mark.parametrize("words", [["run", "hello"], ["score"], ["attention", "hello"]])
def test_commands_for_text_name_the_one_for_features(words, kind: Kind, bundle: Bundle, cli) -> None:
    command, *rest = words
    code, _, error = cli(command, str(bundle.root), *rest)
    assert code == 1
    assert error == f"error: this model takes {kind.name}; use: seq2engine {kind.command.format(bundle.root)}\n"


def test_a_package_is_refused(kind: Kind, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"takes {kind.name}, and the scripts of a package take tokens"):
        package_from_bundle(bundle, tmp_path / "package")


def test_parity_compares_features_at_all_levels(bundle: Bundle) -> None:
    options = ParityOptions(count=3, beam=2, max_length=8)
    for result in parities_of(bundle, ("fp32", "fp16"), options=options):
        assert result, result.reason
        assert result.sources == 3
        assert all(result.graphs)
        assert result.tensors
        assert result.invariance


def test_faults_are_located_on_features(kind: Kind) -> None:
    found = locate_sources(kind.config, random_sources(kind.config, 6), [1])
    assert len(found) == 4
    assert all(source.features.shape == kind.config.features_shape for source in found)


def test_scores_are_those_of_a_decode(kind: Kind, bundle: Bundle) -> None:
    """Behind the model's own prompt, as the decode was."""
    sources = random_sources(kind.config, 2)
    options = SearchOptions(max_length=8, prompt=kind.prompt)
    with open_session(bundle) as session:
        decoded = [best for best, *_ in generate(session, sources, options)]
        near = rounding_from_session(session, sources, kind.config.max_target).log_prob
        scores = score_targets(session, sources, [best.tokens for best in decoded])
    for best, score in zip(decoded, scores, strict=True):
        np.testing.assert_allclose(score.log_probs, best.log_probs, rtol=0, atol=near)


def test_bench_times_features(kind: Kind, bundle: Bundle) -> None:
    config = kind.config
    assert {case.source for case in cases_for(config)} == {config.max_source}
    short = Case("short", 1, 1, 4, 8)
    assert kind.whole in case_problems([short], config)[0]
    case = Case("one", 2, 2, config.max_source, 6)
    first, again = (sources_for(case, config)[1].features for _ in range(2))
    np.testing.assert_array_equal(first, again)
    result = bench_bundle(bundle, BenchOptions(backends=("onnxruntime",), cases=(case,), rounds=1, quick=True))
    assert result.cases


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("opening", "changes"),
    [
        ({"draft": "w8a8"}, {}),
        ({"draft": "quantised"}, {}),
        ({"deterministic": True}, {}),
        ({"deterministic": True}, {"beam": 3}),
        ({"attention": True}, {"alignments": True}),
        ({"attention": True}, {"coverage_penalty": 0.2, "beam": 3}),
        ({}, {"shortlist": tuple(range(60))}),
        ({}, {"prompt": (9, 8, 7), "beam": 3}),
        ({}, {"scores": False}),
        ({}, {"beam": 3}),
    ],
)
def test_kinds_of_sessions_and_searches_emit_what_pytorch_does(opening, changes, kind: Kind, bundle: Bundle) -> None:
    sources = random_sources(kind.config, 2, seed=3)
    asked = {"max_length": 16, "prompt": kind.prompt, **changes}
    plain = {name: asked[name] for name in ("max_length", "beam", "prompt", "coverage_penalty") if name in asked}
    with open_session(bundle, "torch", "fp32", attention="coverage_penalty" in changes) as session:
        expected = [best.tokens for best, *_ in generate(session, sources, SearchOptions(**plain))]
    with open_session(bundle, precision="fp32", **opening) as session:
        found = [generate(session, [source], SearchOptions(**asked))[0][0] for source in sources]
    assert [best.tokens for best in found] == expected
    if changes.get("alignments"):
        assert all(0 <= place < kind.config.max_source for best in found for place in best.alignments)
