"""Faults of TensorRT engines are located in engines that are built with inner tensors as outputs.

The stand-in builds and runs them; a defect is planted in what it builds, as a wrong kernel would be. That such engines
can be built at all is shown with the real TensorRT-RTX.
"""

from __future__ import annotations

import dataclasses
import json
import shlex

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support import stand_in_engines, tensorrt_builder_stand_in
from support.host_device import HostDevice
from support.parity_cases import SMALL
from support.stand_in_engines import put_engines
from support.tensorrt_builder_stand_in import building_stand_in
from support.tensorrt_stand_in import engine_bytes

from seq2engine.errors import BuildError
from seq2engine.export.artifact.passport import PASSPORT, read_passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.contract import GRAPHS
from seq2engine.export.debug_outputs import element_types
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.parity.locate import debug_engine
from seq2engine.runtime.parity.locate.debug_engine import DebugEngines, form_of
from seq2engine.runtime.parity.locate.locate import LocateOptions, Locator, locate, locate_sources, numeric_fault
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.text.sources import random_sources
from seq2engine.runtime.trt import session as trt_session

ONE, FOUR, RANGE = Range(1, 1, 1), Range(4, 4, 4), Range(1, 2, 4)
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
MODEL = random_model(SMALL, 3)
FAR = 5.0  # budgets: a query that is scaled already errs by 17 of them even in bf16, by 128 in fp16
COMMAND = "seq2engine parity BUNDLE --backend tensorrt"
FLAGS = {"count": 4, "max_length": 5, "beam": 2, "batch": 16, "threads": 1}


def ranges_of(beam):
    return ShapeRanges(Range(1, 8, 32), beam, Range(1, 8, 20), Range(1, 8, 24))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """By cache form, with an engine for every precision and kind of beams."""
    made = {}
    for form in ("static", "growing"):
        made[form] = onnx_from_model(MODEL, tmp_path_factory.mktemp("debug") / form, PRECISIONS, form)
    return made


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU and `tensorrt`, both the stand-in's."""
    module = building_stand_in()
    monkeypatch.setattr(trt_session, "load_tensorrt", lambda flavour: module)
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    return module


def engine_of(bundle, beam, precision, label=""):
    name = f"{precision}-{beam.min}-{beam.max}{label}"
    if not (bundle.root / "engines" / name).is_dir():
        put_engines(bundle, ranges_of(beam), precision, "tensorrt", name=name, targets=())
    return name


def plant(monkeypatch, tensor, where=(stand_in_engines, tensorrt_builder_stand_in)):
    """Whatever is built from now on scales that tensor by 1.25."""

    def build(model, *rest):
        return engine_bytes(scaled(model, tensor), *rest)

    for module in where:
        monkeypatch.setattr(module, "engine_bytes", build)


def scaled(model, tensor):
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    nodes = list(wrong.graph.node)
    place = next((i for i, node in enumerate(nodes) if tensor in node.output), None)
    if place is None:
        return wrong
    dtype = helper.tensor_dtype_to_np_dtype(element_types(model)[tensor])
    nodes[place].output[:] = [f"{tensor}/right" if name == tensor else name for name in nodes[place].output]
    nodes.insert(place + 1, helper.make_node("Mul", [f"{tensor}/right", "planted"], [tensor], name="planted"))
    wrong.graph.initializer.append(numpy_helper.from_array(np.array(1.25).astype(dtype), "planted"))
    del wrong.graph.node[:]
    wrong.graph.node.extend(nodes)
    return wrong


def found_in(bundle, precision, engine, beam=4, longest=6, only=None):
    sources = locate_sources(bundle.config, random_sources(bundle.config, 8, 0, 16), [])
    with DebugEngines(bundle, precision, engine) as engines:
        return numeric_fault(
            bundle, LocateOptions(precision, sources, beam, longest, threads=1, only=only, command=COMMAND), engines
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "precision", "beam", "tensor", "layer"),
    [
        ("static", "fp32", ONE, "encoder.1.feed_forward.activation/Relu", "encoder.1"),
        ("static", "fp32", FOUR, "decoder.1.cross_attn.out/Add", "decoder.1"),
        ("static", "fp16", FOUR, "decoder.0.self_attn/Softmax", "decoder.0"),
        ("static", "fp16", RANGE, "decoder.1.self_attn/MatMul.1", "decoder.1"),
        ("static", "bf16", ONE, "decoder.0.cross_attn/Reshape.1", "decoder.0"),
        ("growing", "int8", RANGE, "decoder.1.feed_forward.down/Add", "decoder.1"),
        ("growing", "fp32", ONE, "decoder.0.cross_residual.norm/LayerNormalization", "decoder.0"),
    ],
)
def test_a_wrong_kernel_is_found_in_its_layer(form, precision, beam, tensor, layer, bundles, gpu, monkeypatch):
    bundle = bundles[form]
    engine = engine_of(bundle, beam, precision)
    plant(monkeypatch, tensor, [tensorrt_builder_stand_in])
    found = found_in(bundle, precision, engine)
    assert found is not None
    assert (found.layer, found.graph) == (layer, "encoder" if layer.startswith("encoder") else "decoder_step")
    assert "in a debug build of the engine" in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "precision", "beam"),
    [("static", "fp32", ONE), ("static", "fp32", FOUR), ("static", "fp16", FOUR), ("growing", "bf16", RANGE)],
)
def test_right_engines_raise_no_alarm(form, precision, beam, bundles, gpu):
    """All tensors of every form that keep their meaning, those of the layers' inside too."""
    bundle = bundles[form]
    engine = engine_of(bundle, beam, precision)
    assert found_in(bundle, precision, engine, longest=4) is None
    with DebugEngines(bundle, precision, engine) as engines:
        sources = random_sources(bundle.config, 16, 0, 16)
        with Locator(bundle, precision, sources, 4, 1, engines) as locator:
            for place in ("encoder", "greedy"):
                assert len(locator.trio(place).names) > 50
                watch = locator.watched(place, locator.trio(place).names, 4)
                strains = {name: watch.result(name)[0].strain for name in watch.names if watch.result(name)}
                # Of 85 tensors one may be beyond its budget by chance; of another meaning it is by far.
                assert max(strains.values(), default=0.0) < FAR, strains


@pytest.mark.slow
def test_a_failed_parity_run_names_the_layer(bundles, gpu, monkeypatch, cli):
    """And the command of the finding shows it again, by itself and among all others."""
    bundle = bundles["static"]
    plant(monkeypatch, "decoder.1.cross_attn.out/Add")
    engine = engine_of(bundle, FOUR, "fp32", "-wrong")
    options = ParityOptions(**FLAGS, engine=engine, command=f"seq2engine parity {bundle.root} --backend tensorrt")
    result = parity_of(bundle, "tensorrt", "fp32", options)
    assert not result
    assert result.finding.layer == "decoder.1"
    assert result.finding.tensor == "decoder.1.cross_attn.out/Add"
    assert result.finding.cause == "wrong scale", result.finding.text
    words = shlex.split(result.finding.command)[1:]
    flags = ("--engine", engine, "--max-length", 5, "--beam", 2, "--threads", 1, "--quiet")
    code, out, _ = cli(*words, *flags, "--json")
    assert code == 1
    assert json.loads(out)["tensor"] == "decoder.1.cross_attn.out/Add"
    code, out, _ = cli(*words[:-1], *flags)
    assert code == 1
    assert "decoder.1.cross_attn.out" in out
    assert f"--engine {engine}" in out


@pytest.mark.slow
def test_a_fault_that_marked_tensors_hide_is_reported(bundles, gpu, monkeypatch):
    """As if only a fused kernel had it: the debug build is right."""
    bundle = bundles["static"]
    with monkeypatch.context() as only_now:
        plant(only_now, "decoder.1.cross_attn.out/Add", [stand_in_engines])
        engine = engine_of(bundle, FOUR, "fp32", "-fused")
    result = parity_of(bundle, "tensorrt", "fp32", ParityOptions(**FLAGS, engine=engine))
    assert not result
    assert result.finding.cause == "engine"
    assert "fused otherwise" in result.finding.text


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_again(bundles, gpu, monkeypatch):
    def refused(*given):
        raise BuildError("tensorrt could not build decoder_step.onnx: no room")

    bundle = bundles["static"]
    plant(monkeypatch, "decoder.1.cross_attn.out/Add")
    engine = engine_of(bundle, FOUR, "fp32", "-wrong")
    monkeypatch.setattr(debug_engine, "build_engine", refused)
    result = parity_of(bundle, "tensorrt", "fp32", ParityOptions(**FLAGS, engine=engine))
    assert result.finding.cause == "engine"
    assert (
        "the engine could not be searched: tensorrt could not build decoder_step.onnx: no room" in result.finding.text
    )


def test_an_engine_that_has_the_outputs_is_not_built_again(bundles, gpu):
    bundle = bundles["static"]
    with DebugEngines(bundle, "fp32", engine_of(bundle, ONE, "fp32")) as engines:
        file = engines.file("encoder")
        names = list(file.tensors)
        assert file.opened(names[:3]) is file.opened(names[:1])
        assert file.opened(names[:4]) is not file.opened(names[:3])
        assert len(gpu.configs) == 2
        folder = engines.folder
        assert len(list(folder.glob("*.engine"))) == 2
    assert not folder.exists()


def test_tensors_that_a_form_widens_are_not_compared(bundles, gpu):
    """With one beam attention reads the cache and the new slot side by side: its scores have a column more."""
    bundle = bundles["static"]
    with DebugEngines(bundle, "fp32", engine_of(bundle, ONE, "fp32")) as engines:
        tensors = engines.file("decoder_step").tensors
    assert "decoder.0.self_attn/Softmax" in {name for node in form_nodes(bundle, engines) for name in node.output}
    assert "decoder.0.self_attn/Softmax" not in tensors
    assert "decoder.0.self_attn.out/Add" in tensors


def form_nodes(bundle, engines):
    return form_of(bundle, engines.passport, "decoder_step").graph.node


def test_sources_are_those_that_a_batch_of_the_engine_takes(bundles, gpu):
    bundle = bundles["static"]
    name = "few"
    ranges = dataclasses.replace(ranges_of(ONE), batch=Range(3, 3, 3), source=Range(1, 4, 4))
    put_engines(bundle, ranges, "fp32", "tensorrt", name=name, targets=())
    with DebugEngines(bundle, "fp32", name) as engines:
        assert engines.fitting([[1] * 5, [1], [1, 2], [3], [4]]) == [[1], [1, 2], [3]]
        assert engines.fitting([[1], [1, 2]]) == [[1], [1, 2], [1]]


def test_sources_that_are_all_too_long_are_cut(bundles, gpu):
    bundle = bundles["static"]
    ranges = dataclasses.replace(ranges_of(ONE), source=Range(1, 4, 4))
    put_engines(bundle, ranges, "fp32", "tensorrt", name="short", targets=())
    with DebugEngines(bundle, "fp32", "short") as engines:
        assert engines.fitting([[1, 2, 3, 4, 5], [5] * 9]) == [[1, 2, 3, 4], [5] * 4]


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("encoder.1.feed_forward.activation/Relu", "encoder.1"),
        pytest.param("decoder.1.cross_attn.out/Add", "decoder.1", marks=pytest.mark.slow),
    ],
)
def test_sources_below_the_least_length_are_padded(tensor, layer, bundles, gpu, monkeypatch):
    """An engine for sources of 12 tokens and more, searched on shorter ones alone."""
    bundle = bundles["static"]
    name = f"long-{layer}"
    put_engines(
        bundle, dataclasses.replace(ranges_of(ONE), source=Range(12, 16, 20)), "fp32", "tensorrt", name=name, targets=()
    )
    sources = random_sources(bundle.config, 16, 0, 9)

    def found():
        with DebugEngines(bundle, "fp32", name) as engines:
            return numeric_fault(bundle, LocateOptions("fp32", sources, 1, 3, threads=1, command=COMMAND), engines)

    assert found() is None
    plant(monkeypatch, tensor, [tensorrt_builder_stand_in])
    assert found().layer == layer


def test_shapes_that_an_engine_does_not_take_end_the_search_with_a_reason(bundles, gpu, monkeypatch):
    bundle = bundles["static"]
    monkeypatch.setattr(DebugEngines, "fewest_columns", 21)
    sources = locate_sources(bundle.config, random_sources(bundle.config, 8, 0, 16), [])
    with DebugEngines(bundle, "fp32", engine_of(bundle, ONE, "fp32")) as engines:
        found = locate(bundle, LocateOptions("fp32", sources, 1, 3, threads=1, command=COMMAND), (), engines)
    assert found.cause == "engine"
    assert "could not be searched: encoder input source_ids has shape [16, 21], this engine takes" in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "precision", "beam"),
    [
        ("static", "fp32", ONE),
        ("static", "fp32", FOUR),
        ("static", "fp16", ONE),
        ("static", "fp16", FOUR),
        ("static", "fp16", RANGE),
        ("static", "int8", FOUR),
        ("growing", "bf16", RANGE),
    ],
)
def test_the_real_tensorrt_builds_them(form, precision, beam, bundles):
    """Engines with all tensors of a layer as outputs, and of a graph, in every form. To run them needs a GPU."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    bundle = bundles[form]
    name = f"rtx-{precision}-{beam.min}-{beam.max}"
    folder = put_engines(bundle, ranges_of(beam), precision, name=name, targets=("sm86",))
    passport = read_passport(folder / PASSPORT)
    for graph in GRAPHS:
        with DebugEngines(bundle, precision, name) as engines:
            engines.opening = debug_engine.Opening(trt, HostDevice(), folder, passport)
            file = engines.file(graph)
            layer = [tensor for tensor in file.tensors if tensor.startswith(f"{graph[:7]}.1")]
            for names in (layer, list(file.tensors)):
                assert len(names) > 20
                content = debug_engine.debug_engine(trt, bundle, passport, graph, file.model, names)
                assert content[:4] == b"vtrt"
                entry = debug_engine.entry_with(passport.engines[graph], file.model, names, 0)
                assert {tensor.name for tensor in entry.outputs} >= set(names)
