"""Faults are located: planted defects are found where they are, with their cause; good exports have none.

The more exports the surer: SEQ2ENGINE_PROOF=200 pytest <this file>.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex

import numpy as np
import pytest
import torch
from support.mutations import MUTATIONS, good_bundles, wrong_copy
from support.parity_cases import SMALL
from support.weight_mutations import WEIGHT_MUTATIONS

from seq2engine.common.reports import latest_report
from seq2engine.errors import RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import CHOICES
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.parity.locate.locate import PLACES, LocateOptions, Locator, locate, locate_sources
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.text.sources import random_sources

PROOF = int(os.environ.get("SEQ2ENGINE_PROOF", "20"))  # good exports
FLAGS = {"count": 4, "max_length": 5, "beam": 2, "batch": 16, "threads": 1}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return good_bundles(SMALL, tmp_path_factory)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 3), tmp_path_factory.mktemp("right") / "bundle", ("fp32", "fp16"))


@pytest.fixture(scope="module")
def wrong(good, tmp_path_factory):
    mutation = MUTATIONS["one bias element"]
    return wrong_copy(good(mutation), tmp_path_factory.mktemp("wrong") / "bundle", mutation)


@pytest.mark.slow
@pytest.mark.parametrize("name", {**MUTATIONS, **WEIGHT_MUTATIONS})
def test_a_planted_defect_is_flagged_found_and_named(good, tmp_path, name):
    mutation = {**MUTATIONS, **WEIGHT_MUTATIONS}[name]
    result = parity_of(
        wrong_copy(good(mutation), tmp_path / "wrong", mutation),
        precision=mutation.precision,
        options=ParityOptions(**FLAGS),
    )
    assert not result
    assert result.finding.graph == mutation.graph
    assert result.finding.layer == mutation.layer, result.finding.text
    assert result.finding.cause in mutation.causes, result.finding.text
    assert json.loads(result.to_json())["finding"]["layer"] == mutation.layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "form"), [("heads innermost", "int8", "growing"), ("softmax over queries", "int4", "static")]
)
def test_a_defect_in_graphs_of_quantised_weights_is_found_too(tmp_path, name, precision, form):
    mutation = dataclasses.replace(MUTATIONS[name], precision=precision)
    bundle = onnx_from_model(random_model(SMALL, 3), tmp_path / "right", (precision,), form)
    assert locate(bundle, LocateOptions(precision, random_sources(SMALL, 16), 2, 4, threads=1)) is None
    result = parity_of(
        wrong_copy(bundle, tmp_path / "wrong", mutation), precision=precision, options=ParityOptions(**FLAGS)
    )
    assert not result
    assert result.finding.layer == mutation.layer, result.finding.text
    assert result.finding.cause in mutation.causes, result.finding.text


def test_there_are_enough_defects_and_they_are_all_different():
    assert len(MUTATIONS) >= 25
    assert len({mutation.edit for mutation in MUTATIONS.values()}) == len(MUTATIONS)
    assert {mutation.graph for mutation in MUTATIONS.values()} == {"encoder", "decoder_step"}


def clean_cases(count):
    """Configs, cache forms, precisions and seeds: every combination before any comes again with another seed."""
    presets = {
        "tiny": {"heads": 4, "d_model": 32, "d_ff": 64},
        "base": {"heads": 8, "d_model": 64, "d_ff": 128, "encoder_layers": 2, "decoder_layers": 3},
        "big": {"heads": 16, "d_model": 128, "d_ff": 256, "encoder_layers": 1, "decoder_layers": 2},
    }
    kinds = list(
        itertools.product(
            CHOICES["positions"],
            CHOICES["norm"],
            CHOICES["activation"],
            presets,
            ("fp32", "fp16"),
            ("static", "growing"),
        )
    )
    order = np.random.default_rng(0).permutation(len(kinds))
    for number in range(count):
        positions, norm, activation, preset, precision, form = kinds[order[number % len(kinds)]]
        sizes = {"source_vocab": 64, "target_vocab": 64, "max_source": 20, "max_target": 24, **presets[preset]}
        config = dataclasses.replace(
            PRESETS[preset], positions=positions, norm=norm, activation=activation, tie_output=number % 4 == 0, **sizes
        )
        yield number, config, precision, form


@pytest.mark.slow
def test_good_exports_raise_no_alarm(tmp_path):
    """Of any preset (its shape, small), position scheme, norm, activation, precision, cache form and seed."""
    for number, config, precision, form in clean_cases(PROOF):
        bundle = onnx_from_model(random_model(config, number), tmp_path / str(number), (precision,), form)
        result = parity_of(bundle, precision=precision, options=ParityOptions(seed=number, **FLAGS))
        assert result, f"{number} {precision} {form} {config}: {result.reason}"
        assert result.finding is None


class TestInside:
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_every_tensor_of_a_good_export_keeps_its_budget(self, bundle, precision):
        with Locator(bundle, precision, random_sources(SMALL, 16), 3, 1) as locator:
            for place in PLACES:
                names = locator.trio(place).names
                assert len(names) > 50
                watch = locator.watched(place, names, 6)
                assert not [name for name in names if watch.result(name)]

    def test_a_good_export_has_nothing_to_find(self, bundle):
        assert locate(bundle, LocateOptions("fp32", random_sources(SMALL, 16), beam=2, longest=4, threads=1)) is None

    def test_names_are_those_of_the_modules(self, bundle):
        with Locator(bundle, "fp32", [[5]], 2, 1) as locator:
            graph = locator.trio("greedy").oracle
            assert graph.module("decoder.1.self_attn/Softmax") == "decoder.1.self_attn"
            assert graph.module("logits") == "output"
            encoder = locator.trio("encoder").oracle
            assert encoder.module("cross_v.1") == "decoder.1.cross_attn.kv"
            assert encoder.operands("encoder.0/Add") == ["source_embedding/Add", "encoder.0.self_attn.out/Add"]

    def test_sources_known_to_be_wrong_come_first(self):
        sources = [[token] * 3 for token in range(5, 45)]
        chosen = locate_sources(SMALL, sources, [17])
        assert chosen[0] == [22, 22, 22]
        assert len(chosen) == 16
        assert len(locate_sources(SMALL, [[5]], [0])) == 16
        with pytest.raises(RequestError, match="row 40 asked for, but there are 40 sources"):
            locate_sources(SMALL, sources, [40])

    @pytest.mark.parametrize(
        ("only", "message"),
        [("attic:logits", "unknown place 'attic'"), ("greedy:nonsense", "no tensor 'nonsense'")],
    )
    def test_what_is_not_there_is_refused(self, bundle, only, message):
        with pytest.raises(RequestError, match=message):
            locate(bundle, LocateOptions("fp32", [[5]], beam=2, longest=4, threads=1, only=only))


class TestCommand:
    def test_a_failed_parity_tells_and_its_command_tells_the_same_alone(self, wrong, cli):
        flags = ("--count", 8, "--max-length", 6, "--beam", 2, "--threads", 1, "--quiet")
        code, out, _ = cli("parity", wrong.root, *flags)
        assert code == 1
        shown = next(line for line in out.splitlines() if line.startswith("located: "))
        assert "first wrong in decoder.0: decoder_step node decoder.0.feed_forward.down/Add; likely cause" in shown
        assert "weight: bias [11] is" in shown
        page = latest_report(wrong.root, "parity", ".html").read_text()
        assert "Located:" in page
        again = next(line for line in out.splitlines() if line.startswith("again with: ")).removeprefix("again with: ")
        assert again in page.replace("&#x27;", "'")
        words = shlex.split(again)
        assert words[0] == "seq2engine"
        code, out, _ = cli(*words[1:], "--quiet")
        assert code == 1
        assert out.splitlines()[0] == shown.removeprefix("located: ")

    def test_a_tensor_that_is_right_is_no_failure(self, wrong, cli):
        place = "greedy:decoder.0.feed_forward.up/Add"
        flags = ("--max-length", 4, "--threads", 1, "--quiet")
        assert cli("parity", wrong.root, "--locate", place, *flags)[:2] == (0, "nothing is wrong\n")

    def test_json(self, wrong, cli):
        code, out, _ = cli("parity", wrong.root, "--locate", "--max-length", 4, "--threads", 1, "--quiet", "--json")
        assert code == 1
        assert json.loads(out)["cause"] == "weight"


def test_graphs_that_are_right_put_the_blame_on_who_runs_them(good):
    """The graphs are within budget, so the fault is in the session."""
    from seq2engine.runtime.numerics.budgets import ErrorTally
    from seq2engine.runtime.parity.levels.result import ParityResult
    from seq2engine.runtime.parity.locate.locate import finding_of

    bundle = good(MUTATIONS["one bias element"])
    tally = ErrorTally("fp32")
    tally.add(np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2)))
    for backend, cause in (("tensorrt", "engine"), ("onnxruntime", "session")):
        tensors = (tally.result("steps", "logits"),)
        result = ParityResult(backend, "fp32", "static", 4, 4, tensors, ())
        found = finding_of(bundle, result, [[5], [6, 7]], 2, 1, "seq2engine parity BUNDLE")
        assert found.cause == cause
        assert backend in found.text


def test_tensors_as_good_as_pytorch_s_put_the_blame_on_rounded_activations(tmp_path):
    from seq2engine.runtime.parity.levels.result import ParityResult
    from seq2engine.runtime.parity.locate.locate import finding_of

    bundle = onnx_from_model(random_model(SMALL, 3), tmp_path / "bundle", ("w8a8",))
    result = ParityResult("onnxruntime", "w8a8", "static", 4, 4, (), ())
    found = finding_of(bundle, result, [[5], [6, 7]], 2, 1, "seq2engine parity BUNDLE")
    assert found.cause == "precision"
    assert "int8 activations alone change these outputs" in found.text


@pytest.mark.slow
def test_scales_of_quantised_weights_are_no_bias(tmp_path, cli):
    """Beside one huge weight int8 activations are rounded to nothing; a scale is not blamed as a stale bias."""
    model = random_model(dataclasses.replace(PRESETS["tiny"], output_bias=True), 7)
    with torch.no_grad():
        model.decoder[1].feed_forward.down.weight[3, 4] = 300.0
    bundle = onnx_from_model(model, tmp_path / "bundle", ("w8a8",))
    out = cli("parity", bundle.root, "--count", 16, "--max-length", 24, "--threads", 1, "--quiet")[1]
    assert "parity" in out
    assert "stale weights" not in out


def test_graphs_and_tensors_that_are_right_put_the_blame_on_the_other_side(good):
    from seq2engine.runtime.parity.levels.baseline import Against, baseline_of
    from seq2engine.runtime.parity.levels.result import ParityResult
    from seq2engine.runtime.parity.locate.locate import finding_of

    bundle = good(MUTATIONS["one bias element"])
    baseline = baseline_of(bundle, "onnxruntime", "fp32", Against(None, "torch"))
    result = ParityResult("onnxruntime", "fp32", "static", 4, 4, (), ())
    found = finding_of(bundle, result, [[5], [6, 7]], 2, 1, "seq2engine parity BUNDLE", baseline)
    assert found.cause == "other side"
    assert "the fault is in PyTorch fp32; check it against its own weights" in found.text
    assert found.command == f"seq2engine parity {bundle.root} --backend torch --precision fp32"
