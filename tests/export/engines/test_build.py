"""One graph to one engine: progress that rises, a cancel that is clean, and failures in one line."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from seq2engine.errors import BuildError
from seq2engine.export.artifact.profiles import shapes_from_ranges
from seq2engine.export.engines.build import (
    allow_decomposition,
    build_engine,
    cancel_on_interrupt,
    logger_class,
    monitor_class,
)

trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")

SHAPES = {"x": ((1, 4), (2, 4), (3, 4))}
PATH = Path("small.onnx")


def small_graph(op="Relu", element=TensorProto.FLOAT, name="decoder.0/odd", **attributes):
    """x [B,4] -> one node -> y [B,4]"""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4])
    y = helper.make_tensor_value_info("y", element, ["B", 4])
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], name=name, **attributes)], "small", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def build(model, shapes=SHAPES, path=PATH, targets=("sm86",), progress=lambda fraction: None):
    return build_engine(trt, model, path, shapes, targets, progress)


def refusal(*arguments, **options):
    with pytest.raises(BuildError) as error:
        build(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    assert "catchCudaError" not in message
    return message


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "bits"), [((), 0b1111110), (("sm75",), 0b000001), (("sm86",), 0b000100), (("sm80", "sm120"), 0b010010)]
)
def test_an_engine_is_built_for_the_targets_that_were_asked_for(targets, bits):
    """An engine's header has one bit per target from sm75 on; a portable one has another for future GPUs."""
    engine = build(small_graph(), targets=targets)
    assert engine.startswith(b"vtrt")
    assert int.from_bytes(engine[32:36], "little") == bits


def test_a_thread_may_build_too():
    """Signals belong to the main thread; a build elsewhere goes on without them."""
    made = []
    thread = threading.Thread(target=lambda: made.append(build(small_graph())))
    thread.start()
    thread.join()
    assert len(made[0]) > 1000


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "attributes", "reason"),
    [
        ("NonZero", {}, "NonZero plugin creator version 1 was not found"),
        ("Multinomial", {"sample_size": 4}, "UNSUPPORTED_NODE"),
        ("NoSuchOp", {}, "Plugin not found"),
    ],
)
def test_a_graph_that_cannot_be_parsed_names_node_and_reason(op, attributes, reason):
    message = refusal(small_graph(op, TensorProto.INT64, **attributes))
    assert message.startswith("tensorrt_rtx cannot read small.onnx: decoder.0/odd: ")
    assert reason in message


def test_a_node_without_a_name_is_named_by_its_op():
    assert "cannot read small.onnx: NoSuchOp: " in refusal(small_graph("NoSuchOp", name=""))


def test_a_graph_without_outputs_is_not_taken_for_a_success():
    """The parser accepts an empty message."""
    assert refusal(onnx.ModelProto()) == "tensorrt_rtx cannot read small.onnx: it gave no reason"


def test_shapes_that_do_not_rise_are_refused():
    message = refusal(small_graph(), {"x": ((1, 4), (9, 4), (3, 4))})
    assert message.startswith("tensorrt_rtx refused the shape ranges of small.onnx: ")
    assert "isValid" in message


def test_an_input_without_shapes_is_named():
    message = refusal(small_graph(), {})
    assert message.startswith("tensorrt_rtx could not build small.onnx: ")
    assert "input tensor x is missing dimensions" in message


def test_what_a_target_cannot_run_is_named(bundles, ranges):
    bundle = bundles("tiny")
    path = bundle.graph_path("fp32", "encoder")
    shapes = shapes_from_ranges(bundle.specs("fp32")["encoder"], ranges, "static", 32)
    message = refusal(onnx.load(path, load_external_data=False), shapes, path, ["sm75"])
    assert message.startswith("tensorrt_rtx could not build encoder.onnx: ")
    assert "encoder.0.self_attn.qkv/MatMul" in message
    assert "FP32 GEMM is not supported" in message


def test_attentions_without_a_kernel_are_built_from_parts():
    """An Attention op of several queries in fp32 has no fused kernel and does not build as it is."""
    four = ["B", 2, 4, 16]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, four) for name in "qkv"]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attention")
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, four)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    assert build(model, dict.fromkeys("qkv", ((1, 2, 4, 16),) * 3))


def test_a_tensorrt_without_attention_layers_is_left_alone():
    allow_decomposition(object(), None)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_only_errors_are_kept_and_the_last_one_is_reported():
    log = logger_class(trt)()
    assert log.last() == "it gave no reason"
    log.log(trt.ILogger.WARNING, "careful")
    assert log.last() == "it gave no reason"
    log.log(trt.ILogger.INTERNAL_ERROR, "first")
    log.log(trt.ILogger.ERROR, "over\n  two lines")
    log.log(trt.ILogger.ERROR, "[checkMacros.cpp::catchCudaError::250] no driver")
    assert log.last() == "over two lines"


# --- progress and cancelling ------------------------------------------------------------------------------------------


@pytest.fixture
def monitor():
    """A monitor and what it reported."""
    reports, cancelled = [], threading.Event()
    made = monitor_class(trt)(reports.append, cancelled)
    made.cancel, made.reports = cancelled.set, reports
    return made


def test_inner_phases_are_parts_of_a_step_and_nothing_goes_back(monitor):
    monitor.phase_start("build", None, 4)
    assert monitor.step_complete("build", 0)
    monitor.phase_start("first half", "build", 2)
    for step in range(2):
        monitor.step_complete("first half", step)
    monitor.phase_finish("first half")
    monitor.phase_start("second half", "build", 2)  # within the same step: its beginning is behind what was reported
    monitor.step_complete("second half", 0)
    monitor.phase_finish("second half")
    monitor.step_complete("build", 2)
    monitor.phase_start("nothing to do", "build", 0)
    monitor.phase_finish("nothing to do")
    monitor.step_complete("build", 3)
    monitor.phase_finish("build")
    assert monitor.reports == [0.25, 0.375, 0.5, 0.5, 0.75, 0.99]  # 1.0 is reported when the engine is there


def test_a_cancelled_monitor_stops_the_build(monitor):
    monitor.phase_start("build", None, 4)
    assert monitor.step_complete("build", 0) is True
    monitor.cancel()
    assert monitor.step_complete("build", 1) is False


def test_an_interrupt_during_a_build_ends_it_and_the_handler_is_restored():
    before, reports = signal.getsignal(signal.SIGINT), []

    def interrupt(fraction):
        if not reports:
            os.kill(os.getpid(), signal.SIGINT)
        reports.append(fraction)

    with pytest.raises(KeyboardInterrupt):
        build(small_graph(), progress=interrupt)
    assert len(reports) == 1  # the very next question whether to go on was answered with no
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_sets_the_event_and_raises_nothing_inside():
    with cancel_on_interrupt() as cancelled:
        assert not cancelled.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.is_set()


def test_no_garbage_is_collected_while_tensorrt_may_log():
    """An old builder that the collector ends inside a log call would wait for ever for the lock of that call."""
    collecting = []
    build(small_graph(), progress=lambda fraction: collecting.append(gc.isenabled()))
    assert collecting
    assert not any(collecting)
    assert gc.isenabled()
    refusal(small_graph("NoSuchOp"))
    assert gc.isenabled()
