"""The rules of TensorRT about what is bound: a binding that keeps them all runs, and each broken one is caught.

Those about order and time are in test_tensorrt_order.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.host_device import RuleBroken
from support.stand_in_bench import Bench, Log
from support.stand_in_engines import BEAMS, session_over
from support.tensorrt_stand_in import engine_bytes, tensorrt_stand_in

from seq2engine.errors import SessionError
from seq2engine.runtime.encoder_inputs import padded

ONE_STEP = {
    "tokens": np.full((1, 1), 7),
    "position": np.zeros(1, dtype=np.int64),
    "write_index": np.zeros(1, dtype=np.int64),
    "self_mask": np.ones((1, 1, BEAMS.slots), dtype=bool),
}


@pytest.mark.parametrize("flavour", ["tensorrt_rtx", "tensorrt"])
@pytest.mark.parametrize("form", ["static", "growing"])
def test_a_binding_that_keeps_the_rules_runs(form: str, flavour: str, folders: dict[str, Path]) -> None:
    bench = Bench(folders[f"{form} {flavour}"], flavour)
    bench.bind()
    assert bench.execute()
    logits = bench.values("logits", "float32")
    assert not logits.any()  # nothing has run yet: that is what waiting is for
    bench.device.synchronize()
    assert np.isfinite(logits).all()
    assert logits.any()
    assert not bench.log.lines


@pytest.mark.parametrize("name", ["tokens", "cross_v.1", "self_k.0", "logits", "new_self_k.0"])
def test_an_unset_address(name: str, bench: Bench) -> None:
    bench.bind()
    del bench.context.addresses[name]
    assert not bench.execute()
    assert bench.log.lines == [f"Address is not set for tensor {name}"]


def test_a_null_address(bench: Bench) -> None:
    bench.bind()
    assert bench.context.set_tensor_address("tokens", 0)
    assert not bench.execute()
    assert bench.log.lines == ["Address is not set for tensor tokens"]


def test_an_unset_shape(bench: Bench) -> None:
    bench.select_profile()
    for tensor in bench.inputs[1:]:
        assert bench.context.set_input_shape(tensor.name, bench.shapes[tensor.name])
    assert bench.context.infer_shapes() == ["tokens"]
    bench.set_addresses()
    assert not bench.execute()
    assert bench.log.lines == ["the shape of tokens is not set"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((5, 3), "tokens (5, 3) does not satisfy the profile (1, 1) to (4, 3)"),
        ((2, 0), "tokens (2, 0) does not satisfy the profile (1, 1) to (4, 3)"),
        ((2,), "tokens has 1 dimensions, expected 2"),
    ],
)
def test_a_shape_outside_the_profile(shape: tuple[int, ...], reason: str, bench: Bench) -> None:
    bench.select_profile()
    assert not bench.context.set_input_shape("tokens", shape)
    assert bench.log.lines == [reason]


def test_a_static_axis_cannot_change(bench: Bench) -> None:
    bench.select_profile()
    assert not bench.context.set_input_shape("self_k.0", (2, 4, BEAMS.slots - 1, 16))


def test_wrong_names(bench: Bench) -> None:
    bench.select_profile()
    assert not bench.context.set_input_shape("token", (2, 3))
    assert not bench.context.set_input_shape("logits", (2, 3, 256))
    assert not bench.context.set_tensor_address("token", 4096)
    assert bench.log.lines == [
        "token is not the name of an input tensor",
        "logits is not the name of an input tensor",
        "token is not the name of an input or output tensor",
    ]


def test_no_profile_selected(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="no optimization profile was selected"):
        bench.set_shapes()


def test_a_profile_that_is_not_there(bench: Bench) -> None:
    assert not bench.context.set_optimization_profile_async(2, bench.device.stream)
    assert bench.log.lines == ["Optimization profile index 2 is out of range [0, 1]"]


def test_selecting_a_profile_forgets_the_shapes(bench: Bench) -> None:
    bench.bind()
    bench.select_profile()
    assert not bench.execute()


def test_launched_before_all_shapes_were_inferred(bench: Bench) -> None:
    bench.select_profile()
    bench.set_shapes()
    bench.set_addresses()
    with pytest.raises(RuleBroken, match="before infer_shapes"):
        bench.execute()


@pytest.mark.parametrize("name", ["tokens", "cross_k.0", "logits"])
def test_memory_that_is_too_small(name: str, bench: Bench) -> None:
    bench.bind()
    small = bench.device.allocate(bench.memory[name].size - 1)
    assert bench.context.set_tensor_address(name, small.address)
    with pytest.raises(RuleBroken, match=rf"{name} needs \d+ bytes, its memory has \d+"):
        bench.execute()


def test_an_address_that_is_not_aligned(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="of tokens is not a multiple of 256"):
        bench.context.set_tensor_address("tokens", bench.address("tokens") + 8)


def test_memory_of_the_host(bench: Bench) -> None:
    bench.bind()
    host = bench.device.staging(1 << 16)
    aligned = host[-host.ctypes.data % 256 :]
    assert bench.context.set_tensor_address("tokens", aligned.ctypes.data)
    with pytest.raises(RuleBroken, match="not allocated device memory"):
        bench.execute()


def test_memory_that_was_freed(bench: Bench) -> None:
    bench.bind()
    del bench.memory["tokens"]
    with pytest.raises(RuleBroken, match=r"tokens is bound to 0x[0-9a-f]+, which is not allocated"):
        bench.execute()


def test_a_cache_output_away_from_its_input(bench: Bench) -> None:
    bench.bind()
    elsewhere = bench.device.allocate(bench.memory["self_k.1"].size)
    assert bench.context.set_tensor_address("new_self_k.1", elsewhere.address)
    with pytest.raises(RuleBroken, match=r"new_self_k.1 is updated in place, so .* the address of self_k.1"):
        bench.execute()


def test_an_output_over_an_input(folders: dict[str, Path]) -> None:
    bench = Bench(folders["growing tensorrt"], "tensorrt")
    bench.bind()
    assert bench.context.set_tensor_address("new_self_k.0", bench.address("new_self_v.1"))
    with pytest.raises(RuleBroken, match="overlaps"):
        bench.execute()


def test_the_default_stream(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="default stream"):
        bench.context.set_optimization_profile_async(0, 0)
    bench.bind()
    with pytest.raises(RuleBroken, match="default stream"):
        bench.context.execute_async_v3(0)
    with pytest.raises(RuleBroken, match="1 is not a stream"):
        bench.context.execute_async_v3(1)


def test_truncated_and_foreign_engine_files(folders: dict[str, Path]) -> None:
    blob = (folders["static tensorrt"] / "encoder.engine").read_bytes()
    log = Log()
    runtime = tensorrt_stand_in("tensorrt").Runtime(log)
    assert runtime.deserialize_cuda_engine(blob) is not None
    for wrong in (blob[:-1], blob[:100], b"", b"x" * 100):
        assert runtime.deserialize_cuda_engine(wrong) is None
    assert "magicTag" in log.lines[0]
    assert tensorrt_stand_in("tensorrt_rtx").Runtime(log).deserialize_cuda_engine(blob) is None


def test_a_logger_that_is_none(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="must derive from ILogger"):
        bench.trt.Runtime(None)


def test_the_flavours_differ_where_the_real_ones_do(folders: dict[str, Path]) -> None:
    rtx = Bench(folders["static tensorrt_rtx"], "tensorrt_rtx")
    datacenter = Bench(folders["static tensorrt"], "tensorrt")
    for name in ("cuda_graph_strategy", "create_runtime_cache", "dynamic_shapes_kernel_specialization_strategy"):
        assert hasattr(rtx.config, name)
        assert not hasattr(datacenter.config, name)
    assert rtx.engine.get_aliased_input_tensor("new_self_k.0") == "self_k.0"
    assert datacenter.engine.get_aliased_input_tensor("logits") is None


def test_an_engine_file_has_its_recorded_length() -> None:
    blob = engine_bytes(onnx.ModelProto(), [])
    assert int.from_bytes(blob[8:16], "little") == len(blob) - 16


def wrong_stream(engine: Any) -> None:
    engine.device.stream = 0


def forgotten_profile(engine: Any) -> None:
    engine.select = lambda profile: None
    engine.context.profile = None


def freed_runtime(engine: Any) -> None:
    engine.runtime = None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (wrong_stream, "default stream"),
        (forgotten_profile, "no optimization profile"),
        (freed_runtime, "after its runtime"),
    ],
)
def test_a_session_that_broke_a_rule_would_be_caught(
    spoil: Callable[[Any], None], reason: str, folders: dict[str, Path]
) -> None:
    with session_over(folders["static tensorrt"]) as session:
        state = session.encode(*padded([[5, 6, 7]], 0))
        session.reserve(state, BEAMS.slots)
        spoil(session.engines["decoder_step"])
        with pytest.raises(RuleBroken, match=reason):
            session.step(state, **ONE_STEP)


def test_a_session_that_forgot_an_alias_would_be_caught(folders: dict[str, Path]) -> None:
    with session_over(folders["static tensorrt"]) as session:
        state = session.encode(*padded([[5, 6, 7]], 0))
        session.reserve(state, BEAMS.slots)
        session.engines["decoder_step"].aliases = {}
        state.memory.cache.append(session.new_memory().cache[0])
        with pytest.raises(RuleBroken, match="updated in place"):
            session.step(state, **ONE_STEP)


def test_messages_of_tensorrt_reach_the_error(folders: dict[str, Path]) -> None:
    with session_over(folders["static tensorrt"]) as session:
        engine = session.engines["encoder"]
        engine.context.set_tensor_address = lambda name, address: engine.context.refuse(f"no place\n for {name}")
        with pytest.raises(SessionError) as caught:
            session.encode(*padded([[5, 6, 7]], 0))
        assert str(caught.value).startswith(
            f"{engine.path} would not bind source_ids (no place for source_ids); rebuild with: seq2engine build "
        )
