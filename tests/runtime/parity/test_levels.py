"""Levels of parity beside tensors and decodes: graphs, error growth, batch invariance; and several precisions."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import pytest
from support.parity_cases import SMALL, bundle_of, changed

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.default_precision import PRECISE_FIRST
from seq2engine.export.contract import PRECISIONS
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.levels.baseline import Against, against_from_text, baseline_of
from seq2engine.runtime.parity.levels.batch_invariance import invariance_of
from seq2engine.runtime.parity.levels.graphs import graphs_of
from seq2engine.runtime.parity.levels.tensors import compare_tensors
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parities_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.sources import random_sources

FEW = ParityOptions(count=16, max_length=6, batch=16, threads=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(SMALL, tmp_path_factory.mktemp("levels"))


@pytest.fixture(scope="module")
def torches(bundle):
    with open_session(bundle, "torch", "fp64") as oracle, open_session(bundle, "torch", "fp32") as reference:
        yield oracle, reference


class TestGraphs:
    def test_a_good_bundle_passes_with_its_census(self, bundle):
        encoder, step = graphs_of(bundle, "fp16")
        assert all((encoder, step))
        assert encoder.inputs == ("source_ids", "source_mask")
        assert step.outputs[0] == "logits"
        assert step.opset == 24
        assert set(step.census["products"]) == {"float16"}

    def test_a_graph_that_breaks_the_contract_is_reported(self, tmp_path):
        bundle = bundle_of(SMALL, tmp_path)
        path = bundle.graph_path("fp32", "encoder")
        model = onnx.load(path, load_external_data=False)
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        onnx.save(model, path)
        manifest = bundle.root / "manifest.json"
        values = json.loads(manifest.read_text())
        values["graphs"]["fp32"]["encoder"]["sha256"] = sha256_of(path)
        manifest.write_text(json.dumps(values))
        encoder, step = graphs_of(open_bundle(bundle.root), "fp32")
        assert step
        assert not encoder
        assert "cross_k.0" in encoder.reason

    def test_torch_runs_none(self, bundle):
        (result,) = parities_of(bundle, ["fp32"], "torch", FEW)
        assert result.graphs == ()


def growth_with(torches, candidate, batch):
    options = SearchOptions(SMALL.max_target)
    sources = random_sources(SMALL, 8)
    level = compare_tensors(*torches, candidate, sources, range(8), options, SMALL.max_target, batch)
    return level.error_growth, level.at_length


class TestErrorGrowth:
    def test_reaches_the_last_step_though_outputs_end_before(self, bundle, torches):
        with open_session(bundle, threads=1) as candidate:
            growth, tensor = growth_with(torches, candidate, batch=8)
        assert growth.rows == ("self_k.0", "self_v.0", "self_k.1", "self_v.1", "logits")
        assert growth.ratios.shape == (5, SMALL.max_target)
        assert (growth.ratios > 0).all()
        assert (growth.ratios < 8).all()
        assert tensor
        assert tensor.elements == 8 * SMALL.max_target * SMALL.target_vocab

    def test_shows_the_step_and_the_layer_that_go_wrong(self, bundle, torches):
        def late(logits, position):
            logits[position >= 20] += np.float32(0.01) * np.arange(SMALL.target_vocab, dtype=np.float32)

        with changed(bundle, answered=late) as candidate:
            growth, tensor = growth_with(torches, candidate, batch=4)
        wrong = np.argwhere(growth.ratios > 100)
        assert {growth.rows[row] for row, _ in wrong} == {"logits"}
        assert {step for _, step in wrong} == {20, 21, 22, 23}
        assert not tensor


class TestBatchInvariance:
    def test_a_good_export_minds_none(self, bundle, torches):
        with open_session(bundle, threads=1) as candidate:
            found = invariance_of(*torches, candidate, random_sources(SMALL, 6)[2:], 8)
        assert [arranged.arrangement for arranged in found][:2] == ["alone", "in other batches"]
        assert all(found)
        assert all(arranged.equal == arranged.sources for arranged in found)

    def test_there_is_no_room_for_padding_beside_the_longest(self, bundle, torches):
        with open_session(bundle, threads=1) as candidate:
            found = invariance_of(*torches, candidate, random_sources(SMALL, 4), 8)
        assert [arranged.arrangement for arranged in found] == ["alone", "in other batches"]

    def test_a_leak_from_padding_is_found(self, bundle, torches):
        def leak(state, mask):
            state["cross_v.0"] += np.float32(0.05) * (~mask).sum()
            return state

        with changed(bundle, encoded=leak) as candidate:
            found = invariance_of(*torches, candidate, [[5, 6, 7], [8, 9, 4]], 8)
        assert not found[-1]
        assert found[-1].reason.startswith("with 7 more columns of padding: logits change by")

    def test_what_is_not_finite_is_wrong(self, bundle, torches):
        def spoil(logits, position):
            logits[:, :, 7] = np.nan

        with changed(bundle, answered=spoil) as candidate:
            found = invariance_of(*torches, candidate, [[5, 6, 7], [8, 9, 4]], 4)
        assert "not finite" in found[0].reason


class TestPrecisions:
    def test_several_share_the_decodes_of_the_baseline(self, bundle):
        both = parities_of(bundle, ["fp16", "fp32"], options=FEW)
        assert [result.precision for result in both] == ["fp16", "fp32"]
        assert all(both), [result.reason for result in both]
        assert {result.baseline for result in both} == {"PyTorch fp32"}

    @pytest.mark.parametrize(("form", "precisions"), [("static", ("int4", "fp8")), ("growing", ("int8",))])
    def test_quantised_weights_are_held_against_themselves(self, tmp_path, form, precisions):
        bundle = onnx_from_model(random_model(SMALL, 4), tmp_path / "b", precisions, form)
        for result in parities_of(bundle, precisions, options=dataclasses.replace(FEW, count=4, max_length=4)):
            assert result, result.reason
            assert result.baseline == f"PyTorch fp32:{result.precision}"
            assert result.cache_form == form


class TestAgainst:
    @pytest.mark.parametrize(
        ("text", "backend", "precision"),
        [("torch", "torch", None), ("onnxruntime:fp16", "onnxruntime", "fp16"), (":fp16", None, "fp16")],
    )
    def test_a_backend_and_a_precision_of_the_same_bundle(self, text, backend, precision):
        assert against_from_text(text) == Against(None, backend, precision)

    def test_another_bundle(self, bundle):
        assert against_from_text(str(bundle.root)) == Against(bundle, None, None)
        assert against_from_text(f"{bundle.root}@torch:fp16") == Against(bundle, "torch", "fp16")

    @pytest.mark.parametrize("text", ["nowhere@cuda", "torch:fp12"])
    def test_what_is_unknown_is_refused(self, text):
        with pytest.raises(RequestError, match=r"unknown (backend|precision) .*FOLDER@BACKEND:PRECISION"):
            against_from_text(text)

    def test_the_coarser_precision_explains_what_parts(self, bundle):
        assert baseline_of(bundle, "onnxruntime", "fp32", Against(None, None, "int8")).judges == ("fp64", "int8")
        assert baseline_of(bundle, "onnxruntime", "fp16", Against(None, "torch")).judges == ("fp64", "fp16")
        assert baseline_of(bundle, "onnxruntime", "int8", Against(None, "torch")).judges == ("fp64:int8", "int8")

    def test_every_precision_has_its_place_among_coarse_and_fine(self):
        assert sorted(PRECISE_FIRST) == sorted(PRECISIONS)

    def test_two_precisions_of_one_bundle(self, bundle):
        options = dataclasses.replace(FEW, against=Against(None, "onnxruntime", "fp16"))
        (result,) = parities_of(bundle, ["fp32"], options=options)
        assert result, result.reason
        assert result.baseline == "onnxruntime fp16"

    def test_another_export_of_the_same_model_decodes_the_same(self, bundle, tmp_path):
        options = dataclasses.replace(FEW, against=Against(bundle_of(SMALL, tmp_path, "growing")))
        (result,) = parities_of(bundle, ["fp32"], options=options)
        assert result, result.reason
        assert [decode.equal for decode in result.decodes] == [16, 16]

    def test_other_weights_do_not(self, bundle, tmp_path):
        other = onnx_from_model(random_model(SMALL, 9), tmp_path / "other", ("fp32",))
        (result,) = parities_of(bundle, ["fp32"], "torch", dataclasses.replace(FEW, against=Against(other)))
        assert result.reason.startswith("decodes: greedy:")
        assert all(result.tensors)

    def test_other_weights_are_reported_and_no_fault_is_located(self, bundle, tmp_path, monkeypatch):
        monkeypatch.setattr("seq2engine.runtime.parity.locate.locate.locate", lambda *given: pytest.fail("located"))
        other = onnx_from_model(random_model(SMALL, 9), tmp_path / "other", ("fp32",))
        (result,) = parities_of(bundle, ["fp32"], options=dataclasses.replace(FEW, against=Against(other)))
        assert result.finding is not None
        assert result.finding.text == (
            f"other weights: {other.root} holds other weights than {bundle.root}, whose tensors are within budget: "
            "these are two different models"
        )
        assert result.finding.command == f"seq2engine parity {other.root} --backend onnxruntime --precision fp32"

    def test_another_vocabulary_cannot_be_compared(self, bundle, tmp_path):
        other = onnx_from_model(
            random_model(dataclasses.replace(SMALL, source_vocab=70, target_vocab=70), 3), tmp_path / "other", ("fp32",)
        )
        with pytest.raises(RequestError, match="other vocabularies"):
            baseline_of(bundle, "onnxruntime", "fp32", Against(other))
