"""Numbers that stand out hide no defect and raise no alarm: masked logits, huge weights, dead channels, constant rows.

By default every defect is planted beside one kind of outlier; SEQ2ENGINE_PROOF=200 plants each beside all of them.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import onnx
import pytest
import torch
from support.fast_cases import rest_slow
from support.mutations import MUTATIONS, Mutation, put, values_of, wrong_copy
from support.outliers import BIASED, OUTLIERS, config_of, masked, outlier_bundle
from support.parity_cases import SMALL

from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.numerics.teacher_forcing import ForcedRun
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.compare import parity_of_sessions
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parities_of, parity_of
from seq2engine.runtime.text.sources import random_sources

PRECISIONS = ("fp32", "fp16", "w8a8", "int8")
FLAGS = ("--count", 8, "--max-length", 8, "--beam", 2, "--threads", 1, "--quiet")
PROOF = int(os.environ.get("SEQ2ENGINE_PROOF", "20"))
PAIRS = [
    (defect, outlier)
    for number, defect in enumerate(MUTATIONS)
    for place, outlier in enumerate(OUTLIERS)
    if PROOF >= 200 or number % len(OUTLIERS) == place
]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    made = {}

    def bundle(outlier):
        if outlier not in made:
            made[outlier] = outlier_bundle(outlier, tmp_path_factory.mktemp("outlier") / "bundle", PRECISIONS)
        return made[outlier]

    return bundle


def without_locating(bundle, precision):
    oracle = "fp64" if precision in ("fp32", "fp16") else f"fp64:{precision}"
    options = ParityOptions(beam=2, max_length=6, batch=16)
    with (
        open_session(bundle, "torch", oracle, threads=1) as exact,
        open_session(bundle, "torch", precision, threads=1) as reference,
        open_session(bundle, "onnxruntime", precision, threads=1) as candidate,
    ):
        return parity_of_sessions(exact, reference, candidate, random_sources(bundle.config, 4), options)


def more_bias(share, by):
    """Adds to the biases of the first tokens of the output."""

    def edit(graph: onnx.GraphProto) -> None:
        values = values_of(graph, "output.bias")
        values[: int(share * len(values))] += values.dtype.type(by)
        put(graph, "output.bias", values)

    return edit


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_a_good_export_raises_no_alarm(bundles, outlier, precision):
    result = without_locating(bundles(outlier), precision)
    assert result, result.reason


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "outlier"), PAIRS)
def test_a_planted_defect_is_flagged(tmp_path, defect, outlier):
    mutation = MUTATIONS[defect]
    good = outlier_bundle(outlier, tmp_path / "good", (mutation.precision,), config_of(mutation))
    assert not without_locating(wrong_copy(good, tmp_path / "wrong", mutation), mutation.precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("outlier", ["one token -1e+09", "many tokens -inf"])
def test_wrong_biases_are_flagged_by_far(bundles, tmp_path, outlier, precision):
    """A quarter of the biases off by 0.5: no median sees it, and the worst element of w8a8 has that much room."""
    mutation = Mutation("decoder_step", more_bias(1 / 4, 0.5), "output", ("weight",), precision)
    result = without_locating(wrong_copy(bundles(outlier), tmp_path / "wrong", mutation), precision)
    (logits,) = [tensor for tensor in result.tensors if tensor.name == "logits"]
    assert not result
    assert logits.strain > {"fp32": 1e4, "fp16": 10.0, "w8a8": 1.0, "int8": 10.0}[precision]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A `tiny` model with an output bias of -1e9 for its last token, as converted Marian models have for padding."""
    model = random_model(dataclasses.replace(PRESETS["tiny"], output_bias=True), 7)
    with torch.no_grad():
        model.output.bias[-1] = -1e9
    return onnx_from_model(model, tmp_path_factory.mktemp("padded") / "bundle", ("fp32", "fp16", "w8a8"))


class TestShortestReproduction:
    @pytest.mark.parametrize("precision", rest_slow(["fp32", "fp16", "w8a8"], ["w8a8"]))
    def test_its_good_exports_pass(self, padded, cli, precision):
        code, out, _ = cli("parity", padded.root, "--precision", precision, *FLAGS)
        assert code == 0, out

    def test_half_of_its_biases_wrong_fails(self, padded, cli, tmp_path):
        mutation = Mutation("decoder_step", more_bias(1 / 2, 8.0), "output", ("weight",), "w8a8")
        wrong = wrong_copy(padded, tmp_path / "wrong", mutation)
        code, out, _ = cli("parity", wrong.root, "--precision", "w8a8", *FLAGS)
        assert code == 1
        assert "numbers of the bias differ" in out

    def test_the_mask_is_in_no_budget_of_a_tie(self, padded, tmp_path):
        mutation = Mutation("decoder_step", more_bias(1 / 2, 8.0), "output", ("weight",), "w8a8")
        result = without_locating(wrong_copy(padded, tmp_path / "wrong", mutation), "w8a8")
        found = [d for decode in result.decodes for d in decode.divergences]
        assert "bug" in {divergence.verdict for divergence in found}
        assert max(divergence.budget for divergence in found) < 2.0  # with the mask among the logits it was thousands


class TestWhatFp16CannotHold:
    @pytest.mark.each_value
    @pytest.mark.parametrize("outlier", ["one token -1e+09", "many tokens -inf"])
    @pytest.mark.parametrize("precision", ["fp16", "int8"])
    def test_a_masked_token_stays_masked_and_no_other_is_touched(self, bundles, outlier, precision):
        """The bias is added in fp32, in the graph and in PyTorch: nothing is clipped, and no sum is NaN."""
        bundle = bundles(outlier)
        for backend in ("torch", "onnxruntime"):
            with open_session(bundle, backend, precision, threads=1) as session:
                logits = ForcedRun(session, [[5, 6, 7], [8]], 1).step(np.array([1, 1]))
            assert not np.isnan(logits).any()
            assert (logits[:, -1] <= -1e9).all()
            assert (np.abs(logits[:, :20]) < 100.0).all()

    def test_an_untied_weight_that_it_cannot_hold_is_the_models_own_in_pytorch(self, tmp_path):
        model = random_model(SMALL, 3)
        with torch.no_grad():
            model.encoder[0].feed_forward.up.weight[3] *= 1e-6
            model.encoder[0].feed_forward.up.weight[3, 4] = 1e5
            model.encoder[0].feed_forward.down.weight[:, 3] *= 1e-6
        bundle = onnx_from_model(model, tmp_path / "bundle", ("fp32", "fp16"))
        assert any("feed_forward.up" in node for node in bundle.graph("fp16", "encoder").fp32_nodes)
        with open_session(bundle, "torch", "fp16", threads=1) as session:
            weight = session.model.encoder[0].feed_forward.up.weight
        assert float(weight[3, 4].detach()) == 1e5


def test_precisions_of_a_masked_model_share_their_decodes(bundles):
    """Several precisions at once: the judge of one is another's."""
    options = ParityOptions(count=4, beam=2, max_length=6, threads=1)
    found = parities_of(bundles("one token -1e+09"), ("fp32", "fp16"), options=options)
    assert all(found), [result.reason for result in found]


def test_masks_are_in_no_figure_of_a_report(bundles):
    result = parity_of(
        bundles("one token -inf"), precision="fp32", options=ParityOptions(count=4, beam=2, max_length=6, threads=1)
    )
    assert all(np.isfinite(compared.worst_kl) for compared in result.next_token.values())
    assert np.isfinite(result.error_growth.ratios).all()
    assert all(np.isfinite(tensor.candidate.relative) for tensor in result.tensors)


def test_the_kinds_are_as_declared():
    model = random_model(BIASED, 3)
    with torch.no_grad():
        masked(slice(-1, None), -1e9)(model)
    assert float(model.output.bias[-1].detach()) == -1e9
