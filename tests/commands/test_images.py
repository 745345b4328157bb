"""Commands on a bundle that takes images: those that work, and the alternative that the others name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.rounding import rounding_from_session
from support.trocr_models import image_config

from seq2engine import exporting
from seq2engine.benchmarks.cases import Case, case_problems, cases_for, sources_for
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.peers.hugging_face_from_model import hugging_face_from_model
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.errors import BundleError, RequestError, UsageError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.checkpoint import random_model
from seq2engine.packaging.model_card import usage_text
from seq2engine.packaging.package import package_from_bundle
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.locate.locate import locate_sources
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parities_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.scoring import score_targets
from seq2engine.runtime.text.sources import random_sources, sources_of
from seq2engine.runtime.translator import load

CONFIG = image_config()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("images")
    return exporting.onnx_from_model(random_model(CONFIG, 4), folder / "bundle", ("fp32", "fp16", "w8a8"))


def test_calibration_decodes_images(bundle: Bundle) -> None:
    assert bundle.manifest.calibration["corpus"] == "random images"
    with pytest.raises(UsageError, match="--calibrate reads lines of text, but this model takes images"):
        exporting.add_precisions(bundle, ("int8",), calibrate=Path("lines.txt"))


@pytest.mark.parametrize("words", [["run", "hello"], ["score"], ["attention", "hello"]])
def test_commands_for_text_name_the_one_for_images(words, bundle, cli) -> None:
    command, *rest = words
    code, _, error = cli(command, str(bundle.root), *rest)
    assert code == 1
    assert error == f"error: this model takes images; use: seq2engine read {bundle.root} line.png\n"


def test_audio_is_refused(bundle: Bundle) -> None:
    with load(bundle) as model, pytest.raises(RequestError, match=r"takes images; use: seq2engine read .* line.png"):
        model.transcribe("talk.wav")


def test_a_package_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="takes images, and the scripts of a package take tokens"):
        package_from_bundle(bundle, tmp_path / "package")


def test_peers_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the peers cannot run this model: it takes images"):
        hugging_face_from_model(random_model(CONFIG, 4), tmp_path)


def test_its_model_card_shows_how_to_read(bundle: Bundle) -> None:
    shown = usage_text(bundle, "me/lines")
    assert "It takes images." in shown
    assert "seq2engine read hf:me/lines line.png" in shown
    assert 'model.read("line.png")' in shown


def test_parity_compares_images_at_all_levels(bundle: Bundle) -> None:
    options = ParityOptions(count=3, beam=2, max_length=8)
    for result in parities_of(bundle, ("fp32", "fp16"), options=options):
        assert result, result.reason
        assert result.sources == 3
        assert all(result.graphs)
        assert result.tensors
        assert result.invariance


def test_texts_are_refused_as_sources(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="texts were given, but this model takes images; leave them out"):
        sources_of(bundle, ["hello"], 1, 0)


def test_faults_are_located_on_images() -> None:
    found = locate_sources(CONFIG, random_sources(CONFIG, 6), [1])
    assert len(found) == 4
    assert all(source.features.shape == CONFIG.features_shape for source in found)


def test_scores_are_those_of_a_decode(bundle: Bundle) -> None:
    sources = random_sources(CONFIG, 2)
    with open_session(bundle) as session:
        decoded = [best for best, *_ in generate(session, sources, SearchOptions(max_length=8))]
        near = rounding_from_session(session, sources, CONFIG.max_target).log_prob
        scores = score_targets(session, sources, [best.tokens for best in decoded])
    for best, score in zip(decoded, scores, strict=True):
        np.testing.assert_allclose(score.log_probs, best.log_probs, rtol=0, atol=near)


def test_bench_times_images(bundle: Bundle) -> None:
    assert {case.source for case in cases_for(CONFIG)} == {CONFIG.max_source}
    short = Case("short", 1, 1, 4, 8)
    assert "an image has 25" in case_problems([short], CONFIG)[0]
    case = Case("one", 2, 2, CONFIG.max_source, 6)
    first, again = (sources_for(case, CONFIG)[1].features for _ in range(2))
    np.testing.assert_array_equal(first, again)
    result = bench_bundle(bundle, BenchOptions(backends=("onnxruntime",), cases=(case,), rounds=1, quick=True))
    assert result.cases


@pytest.mark.parametrize(
    "wrong",
    [
        ([3, 4, 5], "source 0 is a list, expected features .channels, height, width.: this model takes images"),
        (np.zeros((3, 4), np.float32), "source 0 is an array .3, 4., expected features"),
        (np.zeros((3, 8, 8), np.float32), "source 0 is features of .3, 8, 8., expected .3, 32, 48.: resize the image"),
        (np.full((3, 32, 48), np.nan, np.float32), "has features that are not finite numbers"),
    ],
)
def test_sources_that_are_no_pixels_are_refused(wrong, bundle: Bundle) -> None:
    source, message = wrong
    with open_session(bundle) as session, pytest.raises(RequestError, match=message):
        generate(session, [source], SearchOptions(max_length=4))


def test_rules_on_tokens_of_the_source_are_refused(bundle: Bundle) -> None:
    options = SearchOptions(max_length=4, source_no_repeat_ngram=2)
    with open_session(bundle) as session, pytest.raises(RequestError, match="sources of images have no tokens"):
        generate(session, random_sources(CONFIG, 1), options)


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
        ({}, {"prompt": (7, 8), "beam": 3}),
        ({}, {"scores": False}),
        ({}, {"beam": 3}),
    ],
)
def test_kinds_of_sessions_and_searches_emit_what_pytorch_does(opening, changes, bundle: Bundle) -> None:
    sources = random_sources(CONFIG, 2, seed=3)
    same = {name: changes[name] for name in ("beam", "prompt", "coverage_penalty") if name in changes}
    attended = "coverage_penalty" in changes
    with open_session(bundle, "torch", "fp32", attention=attended) as session:
        expected = [best.tokens for best, *_ in generate(session, sources, SearchOptions(max_length=16, **same))]
    with open_session(bundle, precision="fp32", **opening) as session:
        asked = SearchOptions(**{"max_length": 16, **changes})
        found = [generate(session, [source], asked)[0][0] for source in sources]
    assert [best.tokens for best in found] == expected
    if changes.get("alignments"):
        assert all(0 <= place < CONFIG.max_source for best in found for place in best.alignments)
