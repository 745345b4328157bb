"""Every stored number and node is accounted for, without a sample; what is planted in them is found and named."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.fast_cases import rest_slow
from support.fuzzing.hashes import mend_hashes
from support.mutations import MUTATIONS, Mutation, good_bundles, put, values_of, wrong_copy
from support.parity_cases import SMALL
from support.weight_mutations import WEIGHT_MUTATIONS

from seq2engine import exporting
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.contract import PRECISIONS
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.parity.levels.weights import stored_fault, structure_fault
from seq2engine.runtime.parity.weights.level import weights_of
from seq2engine.runtime.parity.weights.stored import StoredGraph


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return good_bundles(SMALL, tmp_path_factory)


@pytest.mark.parametrize("name", WEIGHT_MUTATIONS)
def test_a_planted_defect_is_found_and_named_without_a_sample(good, tmp_path, name):
    mutation = WEIGHT_MUTATIONS[name]
    results = weights_of(wrong_copy(good(mutation), tmp_path / "wrong", mutation), mutation.precision)
    fault = stored_fault(results) or structure_fault(results)
    assert fault.graph == mutation.graph
    assert fault.layer == mutation.layer, fault.text
    assert fault.cause in mutation.causes, fault.text


@pytest.mark.parametrize("name", rest_slow(MUTATIONS, list(MUTATIONS)[::4]))
def test_every_other_planted_defect_is_found_without_a_sample(good, tmp_path, name):
    mutation = MUTATIONS[name]
    results = weights_of(wrong_copy(good(mutation), tmp_path / "wrong", mutation), mutation.precision)
    assert not all(results)
    assert mutation.graph in {fault.graph for result in results for fault in result.faults}


def test_there_are_forty_defects_and_more():
    assert len(MUTATIONS) + len(WEIGHT_MUTATIONS) >= 45


@pytest.mark.parametrize(
    ("change", "form"),
    [
        pytest.param({}, "static", marks=pytest.mark.slow),
        ({"positions": "rotary", "norm": "pre", "tie_output": True, "share_embeddings": True}, "growing"),
        pytest.param(
            {"positions": "learned", "activation": "gelu", "share_embeddings": False, "tie_output": False},
            "static",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_good_exports_of_every_precision_are_accounted_for(tmp_path, change, form):
    config = dataclasses.replace(SMALL, **change)
    bundle = onnx_from_model(random_model(config, 5), tmp_path / "bundle", tuple(PRECISIONS), form)
    for precision in PRECISIONS:
        results = weights_of(bundle, precision, backend="" if precision == "bf16" else "onnxruntime")
        assert all(results), [result.reason for result in results]
        assert sum(result.traced for result in results[:2]) > 50


def test_a_mask_of_the_model_s_own_is_no_fault_beside_one(tmp_path):
    model = random_model(dataclasses.replace(SMALL, output_bias=True), 5)
    with torch.no_grad():
        model.output.bias[-1] = -torch.inf
    bundle = exporting.onnx_from_model(model, tmp_path / "bundle", ("fp32",))
    assert all(weights_of(bundle, "fp32"))

    def more_bias(graph):
        values = values_of(graph, "output.bias")
        values[:9] += np.float32(8.0)
        put(graph, "output.bias", values)

    mutation = Mutation("decoder_step", more_bias, "output", ("weight",), "fp32")
    fault = stored_fault(weights_of(wrong_copy(bundle, tmp_path / "wrong", mutation), "fp32"))
    assert f"9 of {SMALL.target_vocab} numbers of the bias differ" in fault.text


@pytest.fixture(scope="module")
def smoothed(tmp_path_factory):
    """A bundle with a large channel in the residual stream, which its calibration has smoothed."""
    model = random_model(SMALL, 5)
    with torch.no_grad():
        model.encoder[0].self_residual.norm.weight[3] = 300.0
    bundle = exporting.onnx_from_model(model, tmp_path_factory.mktemp("smoothed") / "bundle", ("w8a8",))
    assert StoredGraph.from_file(bundle.graph_path("w8a8", "encoder")).smoothing
    return bundle


def test_smoothed_weights_are_traced(smoothed):
    results = weights_of(smoothed, "w8a8", backend="onnxruntime")
    assert all(results), [result.reason for result in results]
    assert results[0].passes["transpose, smooth, quantise int8, scale float32"] >= 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda factors: factors * np.float32([2] + [1] * (len(factors) - 1)), None),  # a factor, and not its weights
        (lambda factors: factors * np.float32(1.5), "constant"),  # rounds what it multiplies
        (lambda factors: factors * np.float32(0), "constant"),
        (lambda factors: factors[:-1], "constant"),
    ],
)
def test_smoothing_that_is_not_undone_by_its_weights_is_found(smoothed, tmp_path, change, cause):
    product = next(iter(StoredGraph.from_file(smoothed.graph_path("w8a8", "encoder")).smoothing))

    def planted(graph):
        vector = next(one for one in graph.initializer if one.name == f"{product}.smoothing")
        vector.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(vector)), vector.name))

    mutation = Mutation("encoder", planted, product.rpartition(".")[0], (), precision="w8a8")
    faults = weights_of(wrong_copy(smoothed, tmp_path / "wrong", mutation), "w8a8")[0].faults
    assert any(fault.node.startswith(product.rpartition(".")[0]) for fault in faults)
    assert cause is None or cause in {fault.cause for fault in faults}


def test_a_fault_of_a_pass_itself_is_found(tmp_path, monkeypatch):
    """An export that rounds wrongly makes the same file again, but the trace to the reference shows it."""
    from seq2engine.export.precision import passes
    from seq2engine.runtime.parity.weights import level

    def cut(array, element):
        return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype("float16")

    monkeypatch.setattr(passes, "rounded", cut)
    assert level.PASSES is passes.PASSES
    bundle = onnx_from_model(random_model(SMALL, 5), tmp_path / "bundle", ("fp16",))
    fault = stored_fault(weights_of(bundle, "fp16"))
    assert fault.cause == "export"
    assert "not the reference's in float16" in fault.detail


def test_a_weight_that_no_graph_stores_is_found(tmp_path):
    bundle = onnx_from_model(random_model(SMALL, 5), tmp_path / "bundle", ("fp32",))
    from seq2engine.model.checkpoint import load_checkpoint
    from seq2engine.runtime.parity.weights.account import Reference, unread_faults

    reference = Reference(load_checkpoint(bundle.root))
    lost = unread_faults(reference)
    assert set(lost) >= {"encoder.0.self_attn.qkv.weight", "decoder.1.feed_forward.down.bias"}
    assert lost["encoder.0.self_attn.qkv.weight"].layer == "encoder.0"


def other_softmax(model):
    """A function of the file's own by the name of an operator: which of the two runs is up to the runtime."""
    body = [helper.make_node("Identity", ["x"], ["y"])]
    model.functions.append(helper.make_function("", "Softmax", ["x"], ["y"], body, [helper.make_opsetid("", 18)]))


def sparse_tensor(model):
    made = model.graph.sparse_initializer.add(dims=[4])
    made.values.CopyFrom(helper.make_tensor("extra", TensorProto.FLOAT, [1], [1.0]))
    made.indices.CopyFrom(helper.make_tensor("", TensorProto.INT64, [1], [2]))


@pytest.mark.parametrize(
    ("edit", "what"), [(other_softmax, "the function Softmax"), (sparse_tensor, "the sparse tensor extra")]
)
def test_what_is_neither_node_nor_tensor_of_an_export_is_found(good, tmp_path, edit, what):
    root = tmp_path / "wrong"
    shutil.copytree(good(MUTATIONS["one bias element"]).root, root)
    path = open_bundle(root).graph_path("fp32", "encoder")
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    mend_hashes(root)
    encoder, decoder = weights_of(open_bundle(root), "fp32")
    assert decoder
    assert [fault.detail for fault in encoder.faults] == [f"no export has {what}"]


WIDE = dataclasses.replace(
    SMALL, source_vocab=20000, target_vocab=20000, d_model=128, tie_output=True, share_embeddings=True
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose output table is worth screening."""
    return onnx_from_model(random_model(WIDE, 5), tmp_path_factory.mktemp("wide") / "bundle", ("fp32",))


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """The same with a bias of its output projection, as Marian models have it."""
    config = dataclasses.replace(WIDE, output_bias=True, encoder_layers=1, decoder_layers=1)
    return onnx_from_model(random_model(config, 5), tmp_path_factory.mktemp("biased") / "bundle", ("fp32",))


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A model in fp16 with heads that are wide enough for a cache that is written late."""
    config = dataclasses.replace(SMALL, d_model=64, heads=2)
    return onnx_from_model(random_model(config, 5), tmp_path_factory.mktemp("half") / "bundle", ("fp16",))


class TestForms:
    def test_the_tables_of_the_screening_are_held_against_the_output_table(self, wide, monkeypatch, without_kernels):
        from seq2engine.export.ort_forms import screened_argmax

        results = weights_of(wide, "fp32", backend="onnxruntime")
        assert all(results), [result.reason for result in results]
        assert any(result.constants > 15 for result in results if result.form)
        right = screened_argmax.tables

        for name, change, message in (
            ("screening/int8", lambda a: np.roll(a, 1, axis=1), "token 0 is not its row of the table, rounded"),
            ("screening/bounds", lambda a: a * np.float32(0.5), "token 0 is low"),
            ("screening/always", np.zeros_like, "does not let the first 16 tokens through"),
        ):
            monkeypatch.setattr(
                screened_argmax, "tables", lambda *given, n=name, c=change: {**right(*given), n: c(right(*given)[n])}
            )
            faults = [f for result in weights_of(wide, "fp32", backend="onnxruntime") for f in result.faults]
            assert [fault.tensor for fault in faults] == [name]
            assert message in faults[0].detail

    @pytest.mark.slow
    @pytest.mark.usefixtures("without_kernels")
    def test_the_bias_of_the_screening_is_held_against_the_projections(self, biased, monkeypatch):
        from seq2engine.export.ort_forms import screened_argmax

        results = weights_of(biased, "fp32", backend="onnxruntime")
        assert all(results), [result.reason for result in results]
        right = screened_argmax.tables

        def without_last_row(bounds):
            return bounds * np.float32([[1], [1], [1], [0]])

        for name, change, message in (
            ("screening/bias", lambda a: a[:, ::-1].copy(), "it is not the bias of the output projection"),
            ("screening/least_bias", lambda a: a + np.float32(0.01), "it is more than the bias may be"),
            ("screening/bounds", without_last_row, "those of the bias are low"),
        ):
            monkeypatch.setattr(
                screened_argmax, "tables", lambda *given, n=name, c=change: {**right(*given), n: c(right(*given)[n])}
            )
            faults = [f for result in weights_of(biased, "fp32", backend="onnxruntime") for f in result.faults]
            assert [fault.tensor for fault in faults] == [name]
            assert message in faults[0].detail

    def test_the_second_name_of_the_output_table_is_the_same_place_of_the_file(
        self, wide, monkeypatch, without_kernels
    ):
        from seq2engine.export.ort_forms import gemm_projection

        right = gemm_projection.packed_name

        def elsewhere(graph, table):
            name = right(graph, table)
            (weight,) = [weight for weight in graph.initializer if weight.name == name]
            next(entry for entry in weight.external_data if entry.key == "offset").value = "4096"
            return name

        monkeypatch.setattr(gemm_projection, "packed_name", elsewhere)
        faults = [f for result in weights_of(wide, "fp32", backend="onnxruntime") for f in result.faults]
        assert [fault.tensor.endswith("/packed") for fault in faults] == [True]
        assert "not another name of its tensor" in faults[0].detail

    @pytest.mark.parametrize("beams", [1, 4, None])
    def test_a_folded_query_is_held_against_the_query(self, wide, beams):
        from seq2engine.export.trt_forms.step import step_for_tensorrt
        from seq2engine.runtime.parity.weights.derived import derived_result

        path = wide.graph_path("fp32", "decoder_step")
        file = StoredGraph.from_file(path)
        made = step_for_tensorrt(file.model, "static", beams, 32, path.parent)
        assert derived_result("decoder_step", "TensorRT", file, made.SerializeToString)
        (weight,) = [w for w in made.graph.initializer if w.name == "trt/decoder.0/out_and_q"]
        values = numpy_helper.to_array(weight).copy()
        values[:, values.shape[1] // 2 :] *= 1.001
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))
        result = derived_result("decoder_step", "TensorRT", file, made.SerializeToString)
        assert not result
        assert "the folded query is not cross-attention's query" in result.reason

    @pytest.mark.parametrize("name", ["slots", "beams"])
    def test_the_places_of_a_cache_that_is_written_late_are_counted(self, half, name):
        from seq2engine.export.trt_forms.step import step_for_tensorrt
        from seq2engine.runtime.parity.weights.derived import derived_result

        path = half.graph_path("fp16", "decoder_step")
        file = StoredGraph.from_file(path)
        made = step_for_tensorrt(file.model, "static", 12, 96, path.parent)  # more numbers than a shape has
        assert derived_result("decoder_step", "TensorRT", file, made.SerializeToString)
        (constant,) = [weight for weight in made.graph.initializer if weight.name == f"trt/{name}"]
        constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant)[..., ::-1].copy(), constant.name))
        result = derived_result("decoder_step", "TensorRT", file, made.SerializeToString)
        assert [fault.tensor for fault in result.faults] == [f"trt/{name}"]
        assert f"it does not count the {name}" in result.reason

    def test_a_large_constant_of_a_form_is_traced_or_a_fault(self, wide):
        from seq2engine.runtime.parity.weights.derived import derived_result

        file = StoredGraph.from_file(wide.graph_path("fp32", "decoder_step"))
        made = onnx.ModelProto()
        made.CopyFrom(file.model)
        made.graph.initializer.append(numpy_helper.from_array(np.arange(100), "trt/places"))
        result = derived_result("decoder_step", "TensorRT", file, made.SerializeToString)
        assert "it cannot be traced to a tensor of the file" in result.reason
