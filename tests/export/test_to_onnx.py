"""The exported graphs: the contract's, whole, stored once, and computing what PyTorch computes at every shape."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import BundleError, ConfigError, ExportError
from seq2engine.export.artifact.bundle import MANIFEST, open_bundle
from seq2engine.export.artifact.files import file_problems
from seq2engine.export.contract import graph_specs
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model, onnx_from_model
from seq2engine.model.checkpoint import build_model, load_checkpoint, random_model
from seq2engine.model.config import CHOICES, ModelConfig
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session

TINY = PRESETS["tiny"]
GRAPHS, PRECISIONS, CACHE_FORMS = ("encoder", "decoder_step"), ("fp32", "fp16"), ("static", "growing")

T5 = {
    "norm": "pre",
    "norm_kind": "rms",
    "positions": "relative",
    "max_distance": 20,
    "biases": False,
    "scale_attention": False,
    "scale_embeddings": False,
    "scale_output": True,
}
VARIANTS = {
    f"{positions} {norm}": {"positions": positions, "norm": norm}
    for positions in CHOICES["positions"]
    for norm in CHOICES["norm"]
} | {
    "tied output": {"tie_output": True},
    "output bias": {"output_bias": True},
    "tied output with bias": {"tie_output": True, "output_bias": True},
    "two vocabularies": {"share_embeddings": False, "source_vocab": 300},
    "unscaled embeddings": {"scale_embeddings": False},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "decoder deeper than encoder": {"encoder_layers": 1, "decoder_layers": 3},
    "t5": T5,
    "t5 v1.1": {**T5, "gated": True, "activation": "gelu_tanh", "scale_output": False, "d_kv": 24},
    "umt5": {**T5, "gated": True, "distances_per_layer": True, "decoder_layers": 3},
    "rms without the rest of t5": {"norm_kind": "rms", "gated": True, "d_kv": 8},
    "relative, one layer": {"positions": "relative", "distances_per_layer": True, "decoder_layers": 1},
}
# One of everything, an empty cache (growing), all axes different, and a source and a cache at the model's limit.
SHAPES = (
    {"B": 1, "K": 1, "S": 1, "L": 1},
    {"B": 2, "K": 3, "S": 7, "L": 11},
    {"B": 5, "K": 1, "S": 3, "L": 17},
    {"B": 3, "K": 4, "S": 64, "L": 64},
)


def variant(name):
    return random_model(dataclasses.replace(TINY, **VARIANTS[name]), seed=1)


def sizes_for(shape, cache_form):
    """The sizes of all letters; the growing cache is tried one step earlier, so that it is empty once."""
    slots = shape["L"] if cache_form == "static" else shape["L"] - 1
    return {**shape, "L": slots, "M": slots + shape["K"]}


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
def test_both_graphs_compute_what_pytorch_computes(name, cache_form, feeds_for, open_onnx, check_close):
    model = variant(name)
    graphs, specs = graphs_from_model(model, cache_form), graph_specs(model.config, "fp32", cache_form)
    for graph in GRAPHS:
        onnx.checker.check_model(graphs[graph], full_check=True)
        run = open_onnx(graphs[graph])
        for seed, shape in enumerate(SHAPES):
            feeds = feeds_for(specs[graph], sizes_for(shape, cache_form), seed)
            check_close(run(feeds), model, specs[graph], feeds, cache_form)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["sinusoidal post", "learned pre", "rotary pre", "tied output with bias", "umt5"])
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
def test_fp16_graphs_err_no_more_than_pytorch_in_fp16(name, cache_form, feeds_for, open_onnx, check_close):
    model = variant(name)
    graphs, specs = graphs_from_model(model, cache_form), graph_specs(model.config, "fp16", cache_form)
    for graph in GRAPHS:
        run = open_onnx(PASSES["fp16"](graphs[graph]))
        for seed, shape in enumerate(SHAPES[1:]):
            feeds = feeds_for(specs[graph], sizes_for(shape, cache_form), seed)
            check_close(run(feeds), model, specs[graph], feeds, cache_form, "fp16")


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_budget_tells_a_small_fault_from_rounding(graph, feeds_for, run_onnx, check_close):
    """One weight of a norm off by a thousandth: were this not seen, the comparisons above would mean nothing."""
    model, spec = random_model(TINY), graph_specs(TINY)[graph]
    feeds = feeds_for(spec, sizes_for(SHAPES[1], "static"))
    exported = graphs_from_model(model)[graph]
    check_close(run_onnx(exported, feeds), model, spec, feeds)
    other = random_model(TINY)
    stack = other.encoder if graph == "encoder" else other.decoder
    with torch.no_grad():
        stack[0].feed_residual.norm.weight[0] *= 1.001
    with pytest.raises(AssertionError, match=" errs by "):
        check_close(run_onnx(exported, feeds), other, spec, feeds)


@pytest.mark.parametrize("cache_form", CACHE_FORMS)
def test_only_the_new_slots_are_written(cache_form, feeds_for, run_onnx):
    model, spec = random_model(TINY), graph_specs(TINY, "fp32", cache_form)["decoder_step"]
    sizes = {"B": 3, "K": 2, "S": 4, "L": 9, "M": 11}
    feeds = feeds_for(spec, sizes)
    outputs = run_onnx(graphs_from_model(model, cache_form)["decoder_step"], feeds)
    start = feeds["write_index"] if cache_form == "static" else np.full(3, 9)
    for name in ("self_k.0", "self_v.1"):
        for row in range(3):
            after = outputs[f"new_{name}"][row]
            slots = np.arange(after.shape[1])
            kept = slots[(slots < start[row]) | (slots >= start[row] + 2)]
            np.testing.assert_array_equal(after[:, kept], feeds[name][row][:, kept])
            assert not np.array_equal(after[:, start[row]], after[:, start[row] + 1])


@pytest.mark.parametrize("name", ["sinusoidal post", "rotary pre"])
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
def test_step_by_step_the_graphs_follow_teacher_forcing(name, cache_form, open_onnx):
    """Two beams with different tokens share one cache; each must see its own past only."""
    model = variant(name)
    run = {name: open_onnx(graph) for name, graph in graphs_from_model(model, cache_form).items()}
    rng = np.random.default_rng(0)
    source_ids, source_mask = rng.integers(3, 256, (2, 5)), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=bool)
    targets = rng.integers(3, 256, (2, 2, 4))  # [B, K, T]
    sources = {"source_ids": source_ids, "source_mask": source_mask}
    state = run["encoder"](sources)
    del state["encoder_states"]
    slots = 8 if cache_form == "static" else 0
    for i in range(model.config.decoder_layers):
        state |= {f"self_{part}.{i}": np.zeros((2, 4, slots, 16), dtype=np.float32) for part in "kv"}
    mask = np.zeros((2, 2, 8), dtype=bool)
    logits = []
    for step in range(4):
        mask[:, [0, 1], [2 * step, 2 * step + 1]] = True
        here = np.full(2, step)
        feeds = {"tokens": targets[:, :, step], "position": here, "source_mask": source_mask, **state}
        feeds |= {"write_index": 2 * here, "self_mask": mask} if slots else {"self_mask": mask[:, :, : 2 * step + 2]}
        outputs = run["decoder_step"](feeds)
        logits.append(outputs.pop("logits"))
        state |= {cache.removeprefix("new_"): array for cache, array in outputs.items()}
    have = np.stack(logits, axis=2)  # [B, K, T, V]
    given = [torch.from_numpy(array) for array in (source_ids, source_mask)]
    for beam in range(2):
        with torch.no_grad():
            exact = model.double()(*given, torch.from_numpy(targets[:, beam])).numpy()
            error = np.abs(model.float()(*given, torch.from_numpy(targets[:, beam])).numpy() - exact).max()
        assert np.abs(have[:, beam] - exact).max() <= 16 * error


def test_a_fully_masked_source_makes_no_nan(feeds_for, run_onnx, check_close):
    model, specs = random_model(TINY), graph_specs(TINY)
    for graph, exported in graphs_from_model(model).items():
        feeds = feeds_for(specs[graph], {"B": 2, "K": 2, "S": 5, "L": 6})
        feeds["source_mask"][1] = False
        outputs = run_onnx(exported, feeds)
        assert all(np.isfinite(array).all() for array in outputs.values())
        check_close(outputs, model, specs[graph], feeds)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_files_keep_the_contract(graph, precision, cache_form, bundles, feeds_for, run_onnx, check_close):
    bundle = bundles("tiny", cache_form)
    spec, path = bundle.specs(precision)[graph], bundle.graph_path(precision, graph)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    for have, want in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        assert [value.name for value in have] == [tensor.name for tensor in want]
        for value, tensor in zip(have, want, strict=True):
            kind = value.type.tensor_type
            assert helper.tensor_dtype_to_np_dtype(kind.elem_type).name == tensor.dtype
            # A letter must be a name in the file and a number a number: nothing dynamic was fixed, nor the reverse.
            axes = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in kind.shape.dim)
            assert axes == tensor.axes
    assert {node.domain for node in model.graph.node} == {""}
    assert not {"If", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
    # And as files they run, with their weights beside them.
    feeds = feeds_for(spec, sizes_for(SHAPES[1], cache_form))
    check_close(run_onnx(path, feeds), random_model(TINY), spec, feeds, cache_form, precision)


def test_names_are_module_paths(bundles):
    graph = onnx.load(bundles("tiny").graph_path("fp32", "decoder_step")).graph
    nodes = {node.name: node for node in graph.node}
    assert nodes["decoder.1.cross_attn.q/MatMul"].output[0] == "decoder.1.cross_attn.q/MatMul"
    assert nodes["decoder.0.self_attn/TensorScatter"].output[0] == "new_self_k.0"  # in place: straight to the output
    assert nodes["output/MatMul"].output[0] == "logits"
    assert {"decoder.1.cross_attn.q.weight", "target_embedding.tokens.weight"} <= {w.name for w in graph.initializer}
    assert len(nodes) == len(graph.node)


def decoder_bytes(model):
    """What one step reads in fp32: all of the decoder but the projection of the source, which the encoder graph has."""
    step = [model.decoder, model.decoder_norm, model.output, model.target_embedding]
    named = {id(p): p for module in step for p in module.parameters()}  # tied ones once
    source = {id(p) for layer in model.decoder for p in layer.cross_attn.kv.parameters()}
    needed = [p for key, p in named.items() if key not in source] + list(model.target_embedding.buffers())
    return sum(p.numel() * 4 for p in needed)


def test_decoder_weights_are_stored_once(bundles):
    """The base width has a tied output; with the table, or anything else, stored twice the files would be larger."""
    bundle = bundles("base")
    model = load_checkpoint(bundle.root)
    assert model.config.tie_output

    def on_disk(precision):
        path = bundle.graph_path(precision, "decoder_step")
        return path.stat().st_size + path.with_name(path.name + ".data").stat().st_size

    needed = decoder_bytes(model)
    assert needed <= on_disk("fp32") <= 1.005 * needed
    assert needed / 2 <= on_disk("fp16") <= 1.005 * needed / 2
    graph = onnx.load(bundle.graph_path("fp32", "decoder_step"), load_external_data=False).graph
    assert [list(w.dims) for w in graph.initializer if 1000 in w.dims] == [[1000, 512]]


def test_the_manifest_records_what_was_made(bundles):
    for cache_form, opset in (("static", 24), ("growing", 20)):
        bundle = bundles("tiny", cache_form)
        assert (bundle.cache_form, bundle.config, bundle.precisions) == (cache_form, TINY, PRECISIONS)
        for precision in PRECISIONS:
            for graph, spec in bundle.specs(precision).items():
                entry = bundle.graph(precision, graph)
                assert entry.path == f"onnx/{precision}/{graph}.onnx"
                assert entry.sha256 == sha256_of(bundle.root / entry.path)
                assert entry.data_sha256 == sha256_of(bundle.root / entry.data_path)
                assert entry.opset == opset
                assert entry.inputs == tuple(map(str, spec.inputs))
                assert entry.outputs == tuple(map(str, spec.outputs))
                # An attention is two products; a layer has two or four more, the decoder's last the output's too.
                products = {"encoder": 2 * 6 + 2, "decoder_step": 2 * 10 + 1}[graph]
                assert entry.census["products"] == {{"fp32": "float32", "fp16": "float16"}[precision]: products}
                assert entry.census["attentions"] == {"encoder": 2, "decoder_step": 4}[graph]
    assert set(bundle.manifest.made_by) == {"seq2engine", "torch", "onnx", "python"}


def test_the_reference_in_the_bundle_is_the_model(bundles):
    bundle = bundles("tiny")
    assert bundle.reference_path() == (bundle.root / "model.safetensors").resolve()
    kept, given = load_checkpoint(bundle.root).state_dict(), random_model(TINY).state_dict()
    assert all(torch.equal(kept[name], given[name]) for name in given)


def test_progress_rises_to_one_in_every_stage(tmp_path):
    reports = []
    onnx_from_model(random_model(TINY), tmp_path / "b", PRECISIONS, progress=lambda *report: reports.append(report))
    stages = list(dict.fromkeys(stage for stage, _ in reports))
    assert stages == ["export: reference weights", "export: graphs", "export: fp32", "export: fp16"]
    for stage in stages:
        fractions = [fraction for name, fraction in reports if name == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_a_precision_asked_for_twice_is_written_once(tmp_path, bundles):
    twice = onnx_from_model(random_model(TINY), tmp_path / "b", ("fp32", "fp32"))
    assert twice.manifest.graphs["fp32"] == bundles("tiny").manifest.graphs["fp32"]


def test_an_untrained_model_can_be_exported(tmp_path):
    """Its norms are all ones and zeros: equal to each other, and no weight stored twice."""
    config = dataclasses.replace(TINY, d_model=512)
    assert onnx_from_model(build_model(config), tmp_path / "b", ("fp32",)).precisions == ("fp32",)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_so_small_that_all_its_weights_stay_in_the_graphs(tmp_path):
    sizes = {"source_vocab": 12, "target_vocab": 12, "encoder_layers": 1, "decoder_layers": 1}
    config = ModelConfig(heads=1, d_model=4, d_ff=4, max_source=4, max_target=4, **sizes)
    bundle = onnx_from_model(random_model(config), tmp_path / "bundle", ("fp32",))
    assert (bundle.root / bundle.graph("fp32", "encoder").data_path).stat().st_size == 0
    assert not file_problems(bundle, hashed=True)
    with open_session(bundle, "onnxruntime", "fp32", threads=1) as session:
        assert len(generate(session, [[5, 6, 3]])) == 1


def test_only_fp32_models_are_taken(tmp_path):
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ExportError, match="only a model in float32 can be exported"):
            onnx_from_model(random_model(TINY).to(dtype), tmp_path / "b", ("fp32",))
    assert list(tmp_path.iterdir()) == []


def test_choices_are_checked_before_anything_is_written(tmp_path):
    model = random_model(TINY)
    with pytest.raises(ExportError, match="no precision asked for; name at least one of fp32, fp16"):
        onnx_from_model(model, tmp_path / "b", ())
    with pytest.raises(ConfigError, match="unknown precision 'int3'"):
        onnx_from_model(model, tmp_path / "b", ("fp32", "int3"))
    with pytest.raises(ConfigError, match="unknown cache form 'paged'"):
        onnx_from_model(model, tmp_path / "b", ("fp32",), cache_form="paged")
    assert list(tmp_path.iterdir()) == []


def test_a_part_without_onnx_form_is_named_and_leaves_nothing_behind(tmp_path):
    model = random_model(TINY)
    model.decoder[1].feed_forward.activation = nn.Tanh()
    with pytest.raises(ExportError, match=r"decoder\.1\.feed_forward\.activation: no ONNX form is known for Tanh"):
        onnx_from_model(model, tmp_path / "deep" / "b", ("fp32",))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_is_there_is_refused_and_with_force_replaced(tmp_path):
    folder = tmp_path / "b"
    first = onnx_from_model(random_model(TINY, seed=1), folder, ("fp32", "fp16"))
    (folder / "reports").mkdir()
    with pytest.raises(BundleError, match="exists; name another folder, or add --force to replace it"):
        onnx_from_model(random_model(TINY, seed=2), folder, ("fp32",))
    assert open_bundle(folder).manifest == first.manifest
    second = onnx_from_model(random_model(TINY, seed=2), folder, ("fp32",), force=True)
    assert second.manifest.checkpoint_sha256 != first.manifest.checkpoint_sha256
    assert second.precisions == ("fp32",)
    kept = ["config.json", MANIFEST, "model.safetensors", "onnx", "reports"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert not (folder / "onnx" / "fp16").exists()
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_folder_is_never_replaced(force, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("years of work")
    with pytest.raises(BundleError, match=f"has no {MANIFEST}, so it is not ours to replace"):
        onnx_from_model(random_model(TINY), folder, ("fp32",), force=force)
    file = folder / "chapter1.tex"
    with pytest.raises(BundleError, match="is a file; name a folder that does not exist yet"):
        onnx_from_model(random_model(TINY), file, ("fp32",), force=force)
    assert file.read_text() == "years of work"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_manifest_is_plain_json(bundles):
    values = json.loads((bundles("tiny").root / MANIFEST).read_text())
    assert values["format"] == 4
    assert values["config"]["d_model"] == 64
