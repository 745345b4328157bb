"""Real engines in every precision: what they hold is what was asked for, or the build is an error; and refusals."""

from __future__ import annotations

import dataclasses
import shutil

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.builds import build_engines

from seq2engine.errors import BuildError
from seq2engine.export.artifact.gpu_support import LACKS, NEAREST, unsupported
from seq2engine.export.contract import FOR_CPUS, GRAPHS, PRECISIONS, STORED
from seq2engine.export.engines import jobs as build_jobs
from seq2engine.export.engines import targets as build_targets
from seq2engine.export.engines import to_engine
from seq2engine.export.engines.kernels import weights_from_engine
from seq2engine.export.engines.to_engine import check_precision, name_of
from seq2engine.export.precision.quantise import weights_from_graph
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")

BUILT = tuple(precision for precision in PRECISIONS if precision not in FOR_CPUS)


BUILT = [precision for precision in PRECISIONS if unsupported("sm89", precision) is None]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model("tiny"), tmp_path_factory.mktemp("precisions") / "bundle", BUILT)


def build(bundle, ranges, precision, targets=("sm89",), **options):
    return build_engines(bundle, targets, ranges, precision, flavour="tensorrt_rtx", force=True, **options)


def refusal(bundle, ranges, precision, targets, **options):
    with pytest.raises(BuildError) as error:
        build(bundle, ranges, precision, targets, **{"rebuild": True, **options})
    message = str(error.value)
    assert "\n" not in message
    return message


# --- what an engine holds ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", BUILT)
def test_an_engine_holds_the_weights_of_its_graph_in_their_types(precision, bundle, ranges):
    passport = build(bundle, ranges, precision)
    for graph in GRAPHS:
        entry, census = passport.engines[graph], bundle.graph(precision, graph).census
        read = weights_from_engine((bundle.root / "engines" / name_of(passport) / entry.file).read_bytes())
        assert entry.weight_bytes == read
        assert entry.fused_attentions == entry.attentions or (precision, graph) == ("fp32", "encoder")
        for kind, size in census["weight_bytes"].items():
            if kind != "int64":
                assert 0.95 * size <= read[kind] <= 2.05 * size  # once, or in two layouts
        assert read.keys() - census["weight_bytes"].keys() <= {"float32"}
        assert precision == "fp32" or read.get("float32", 0) < 2000  # constants of kernels
    # One launch for each product, q|k|v in one: 12 in a layer. Where weights are restored a bias and ReLU are one more.
    assert passport.engines["decoder_step"].launches <= 3 + {"int8": 13, "fp8": 13, "int4": 15}.get(precision, 12) * 2


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "given"), [("fp16", "fp32"), ("bf16", "fp16"), ("fp32", "fp16"), ("int8", "fp16")])
def test_another_graph_in_its_place_is_found_in_the_engine(asked, given, bundle, ranges, monkeypatch):
    """What a tool does that drops a flag: it builds, it runs, and it is not what was asked for."""

    def wrong(self, precision, name):
        return self.inside(self.manifest.graphs[given][name].path)

    monkeypatch.setattr(type(bundle), "graph_path", wrong)
    message = refusal(bundle, ranges, asked, ("sm120",))
    assert message.startswith(f"encoder.engine was built in another precision than {asked}: it holds ")
    assert f"bytes of {STORED[given]}" in message.partition("expected")[0]
    assert not list((bundle.root / "engines").glob(f"sm120-{asked}-*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_a_folded_weight_is_found_in_the_engine(kind, bundle, ranges, monkeypatch):
    """Restored before the build, a weight is as large as before, though the file is int8."""

    def fold(trt, model, path, *rest, **named):
        full = onnx.ModelProto.FromString(model.SerializeToString())
        onnx.load_external_data_for_model(full, str(path.parent))
        arrays = {name: stored.array for name, stored in weights_from_graph(full).items()}
        for node in [node for node in full.graph.node if node.op_type == "DequantizeLinear"]:
            name, array = node.output[0], arrays[node.output[0]]
            stored = next(w for w in full.graph.initializer if w.name == node.input[0])
            array = array.reshape(list(stored.dims)) if array.shape == tuple(stored.dims) else array.T
            full.graph.node.remove(node)
            half = array.astype(helper.tensor_dtype_to_np_dtype(kind)).copy()
            full.graph.initializer.append(numpy_helper.from_array(half, f"{name}/folded"))
            cast = helper.make_node("Cast", [f"{name}/folded"], [name], name=f"{name}/Cast", to=TensorProto.FLOAT16)
            full.graph.node.insert(0, cast)
        return real(trt, full, path, *rest, **named)

    real = build_jobs.build_engine
    monkeypatch.setattr(build_jobs, "build_engine", fold)
    message = refusal(bundle, ranges, "int8", ("sm89",))
    assert message.startswith("encoder.engine was built in another precision than int8: it holds ")


@pytest.mark.slow
def test_an_engine_of_another_precision_is_not_kept_for_the_next_build(bundle, ranges, monkeypatch, tmp_path):
    """Neither does the cache keep it, nor is one taken from there that somehow came to be in it."""
    cache = tmp_path / "cache"

    def as_int8(plan, precision, file):
        check_precision(dataclasses.replace(plan, entry=bundle.graph("int8", plan.graph)), "int8", file)

    monkeypatch.setattr(to_engine, "check_precision", as_int8)
    message = refusal(bundle, ranges, "fp16", ("sm120",), cache=cache)
    assert "built in another precision than int8" in message
    assert not list(cache.rglob("engine"))
    monkeypatch.undo()
    made = build(bundle, ranges, "fp16", ("sm120",), cache=cache, rebuild=True)
    shutil.rmtree(bundle.root / "engines" / name_of(made))
    assert list(cache.rglob("engine"))
    monkeypatch.setattr(to_engine, "check_precision", as_int8)
    monkeypatch.setattr(build_jobs, "build_engine", None)  # the cache has it
    assert "built in another precision than int8" in refusal(
        bundle, ranges, "fp16", ("sm120",), cache=cache, rebuild=False
    )
    assert not (bundle.root / "engines" / name_of(made)).exists()


# --- refused before any build -----------------------------------------------------------------------------------------

IMPOSSIBLE = [
    ("fp32", "sm75", "Turing has no fp32 matrix kernel in TensorRT-RTX", "fp16"),
    ("bf16", "sm75", "Turing has no bf16", "fp16"),
    ("int4", "sm75", "Turing has no int4", "int8"),
    ("fp8", "sm75", "fp8 begins with Ada, sm89", "int8"),
    ("fp8", "sm80", "fp8 begins with Ada, sm89", "int8"),
    ("fp8", "sm86", "fp8 begins with Ada, sm89", "int8"),
]


@pytest.mark.parametrize(("precision", "target", "reason", "nearest"), IMPOSSIBLE)
def test_what_a_target_cannot_run_is_refused_before_the_build(precision, target, reason, nearest, bundle, ranges):
    wanted = (
        f"{target} cannot run {precision} ({reason}); "
        f"build with: seq2engine build {bundle.root} --gpu {target} --precision {nearest}"
    )
    assert refusal(bundle, ranges, precision, (target,)) == wanted
    assert refusal(bundle, ranges, precision, ("sm89", target, "sm120")) == wanted  # of several the one is named


def test_the_table_is_complete_and_every_nearest_works():
    assert {(p, t) for p in BUILT for t in LACKS if unsupported(t, p)} == {(p, t) for p, t, *_ in IMPOSSIBLE}
    for precision, target, _, nearest in IMPOSSIBLE:
        assert NEAREST[precision] == nearest
        assert unsupported(target, nearest) is None


@pytest.mark.parametrize(("precision", "target", "reason", "nearest"), IMPOSSIBLE[:4:3])
def test_the_table_is_right(precision, target, reason, nearest, bundle, ranges, monkeypatch):
    """Without the refusal TensorRT itself fails, later and in its own words."""
    monkeypatch.setattr(build_targets, "unsupported", lambda *_: None)
    assert "could not build encoder.onnx" in refusal(bundle, ranges, precision, (target,))


def test_a_form_for_cpus_is_not_built(tmp_path, ranges):
    assert set(PRECISIONS) - set(BUILT) == {"w8a8"}
    bundle = onnx_from_model(random_model("tiny"), tmp_path / "bundle", ("w8a8",))
    assert refusal(bundle, ranges, "w8a8", ("sm89",)) == (
        "sm89 cannot run w8a8 (it is a form for CPUs); "
        f"build with: seq2engine build {bundle.root} --gpu sm89 --precision int8"
    )
    assert refusal(bundle, ranges, "w8a8", ()).endswith("--gpu sm80 --precision int8")


def test_portable_engines_cannot_be_fp8(bundle, ranges):
    assert refusal(bundle, ranges, "fp8", ()) == (
        "portable engines run on sm80 too, which cannot run fp8 (fp8 begins with Ada, sm89); "
        f"build with: seq2engine build {bundle.root} --gpu sm89 sm120 sm121 --precision fp8"
    )


def test_fallback_nodes_need_a_kernel_too():
    """fp16 graphs may hold products in fp32, which Turing has none for."""
    census = {"products": {"float16": 19, "float32": 2}, "product_weights": {"float16": 12, "float32": 2}}
    assert unsupported("sm86", "fp16", [census]) is None
    assert unsupported("sm75", "fp16", [{"products": {"float16": 21}, "product_weights": {"float16": 13}}]) is None
    assert unsupported("sm75", "fp16", [census]) == (
        "Turing has no fp32 matrix kernel in TensorRT-RTX, and some of its nodes stay in fp32"
    )
