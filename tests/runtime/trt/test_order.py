"""The rules of the TensorRT stand-in about order and time: who outlives whom, profile switches, queued work, captures.

Each test breaks one of them, and must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.host_device import HostDevice, RuleBroken
from support.stand_in_bench import Bench


def test_an_engine_after_its_runtime(bench: Bench) -> None:
    bench.runtime = None
    with pytest.raises(RuleBroken, match="after its runtime had been released"):
        bench.engine.create_runtime_config()
    with pytest.raises(RuleBroken, match="after its runtime had been released"):
        bench.select_profile()
    assert bench.trt.broken == ["the runtime was released before its engine"]


def test_a_context_after_its_engine(bench: Bench) -> None:
    bench.bind()
    bench.engine = None
    with pytest.raises(RuleBroken, match="after its engine had been released"):
        bench.execute()
    assert bench.trt.broken == ["the engine was released before its context"]


def test_a_context_after_its_runtime_cache(folders: dict[str, Path]) -> None:
    bench = Bench(folders["static tensorrt_rtx"], "tensorrt_rtx")
    bench.bind()
    bench.cache = None
    with pytest.raises(RuleBroken, match="after its runtime cache had been released"):
        bench.execute()
    assert bench.trt.broken == ["the runtime cache was released before its context"]


def test_a_graph_captured_before_the_shapes_settled(bench: Bench) -> None:
    bench.bind()
    with pytest.raises(RuleBroken, match="first launch after a change of shapes was captured"):
        bench.device.capture(lambda: bench.execute())


@pytest.mark.parametrize("change", ["address", "shape"])
def test_a_graph_replayed_after_its_context_changed(change: str, bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    replay = bench.device.capture(lambda: bench.execute())
    replay()
    if change == "address":
        bench.set_addresses()
    else:
        bench.set_shapes()
    with pytest.raises(RuleBroken, match="replayed after the context it was captured from had changed"):
        replay()


def test_waiting_in_a_capture(bench: Bench) -> None:
    with pytest.raises(RuleBroken, match="waited for a stream that is being captured"):
        bench.device.capture(bench.device.synchronize)


def test_rtx_engines_are_not_captured_by_hand(folders: dict[str, Path]) -> None:
    bench = Bench(folders["static tensorrt_rtx"], "tensorrt_rtx")
    bench.bind()
    assert bench.execute()
    launched = []
    bench.device.capture(lambda: launched.append(bench.execute()))
    assert launched == [False]
    assert "REQUIRE_USER_ALLOCATION" in bench.log.lines[0]


def test_memory_that_is_freed_while_work_on_it_is_queued(bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    del bench.memory["tokens"]
    with pytest.raises(RuleBroken, match=r"tokens is bound to 0x[0-9a-f]+, which is not allocated|tokens was freed"):
        bench.device.synchronize()


def test_memory_that_was_freed_and_given_to_another(bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    address = bench.address("tokens")
    size, number = bench.device.live[address]
    bench.device.live[address] = (size, number + 1000)  # the same place, allocated anew
    with pytest.raises(RuleBroken, match="the memory of tokens was freed while work on it was queued"):
        bench.device.synchronize()


def test_a_graph_replayed_on_freed_memory(bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    replay = bench.device.capture(lambda: bench.execute())
    bench.device.synchronize()
    del bench.memory["logits"]
    replay()
    with pytest.raises(RuleBroken, match=r"logits is bound to 0x[0-9a-f]+, which is not allocated|logits was freed"):
        bench.device.synchronize()


def test_a_context_that_is_released_while_its_work_is_queued(bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    bench.context = None
    with pytest.raises(RuleBroken, match="a context was released while its work was queued"):
        bench.device.synchronize()


@pytest.mark.parametrize("index", [-1, 34])
def test_a_cache_written_outside_itself(index: int, bench: Bench) -> None:
    bench.bind()
    bench.values("write_index", "int64").fill(index)
    assert bench.execute()
    with pytest.raises(RuleBroken, match=r"write_index leads outside self_k\.0, which has 36 slots"):
        bench.device.synchronize()


def test_a_profile_that_another_context_uses(bench: Bench) -> None:
    bench.select_profile()
    other = bench.engine.create_execution_context(bench.config)
    assert not other.set_optimization_profile_async(0, bench.device.stream)
    assert bench.log.lines == ["Profile 0 has been chosen by another IExecutionContext"]
    assert other.set_optimization_profile_async(1, bench.device.stream)
    assert not bench.context.set_optimization_profile_async(1, bench.device.stream)


def test_a_config_of_another_engine(bench: Bench, folders: dict[str, Path]) -> None:
    other = Bench(folders["growing tensorrt"], "tensorrt")
    with pytest.raises(RuleBroken, match="runtime config of another engine"):
        bench.engine.create_execution_context(other.config)


def test_each_profile_has_its_own_shapes(bench: Bench) -> None:
    assert bench.engine.num_optimization_profiles == 2
    assert bench.engine.get_tensor_profile_shape("tokens", 1)[-1] == (2, 3)
    with pytest.raises(RuleBroken, match="tokens of profile 2 has no shapes"):
        bench.engine.get_tensor_profile_shape("tokens", 2)
    assert bench.context.set_optimization_profile_async(1, bench.device.stream)
    assert not bench.context.set_input_shape("tokens", (3, 3))
    assert bench.log.lines == ["tokens (3, 3) does not satisfy the profile (1, 1) to (2, 3)"]


def test_a_launch_that_does_not_wait_for_the_profile_switch(bench: Bench) -> None:
    other = HostDevice()
    assert bench.context.set_optimization_profile_async(0, other.stream)
    bench.set_shapes()
    assert bench.context.infer_shapes() == []
    bench.set_addresses()
    with pytest.raises(RuleBroken, match="another stream than the profile was switched on"):
        bench.execute()
    other.synchronize()
    assert bench.execute()
    bench.device.synchronize()


@pytest.mark.parametrize(
    ("forbidden", "reason"),
    [
        (lambda bench: bench.device.allocate(8), "allocated device memory during a capture"),
        (lambda bench: bench.device.staging(8), "allocated staging memory during a capture"),
        (lambda bench: bench.device.capture(bench.execute), "began a capture on a stream that is being captured"),
        (lambda bench: bench.select_profile(), "switched the profile on a stream that is being captured"),
        (lambda bench: bench.set_shapes(), "a context was changed during a capture"),
        (lambda bench: bench.set_addresses(), "a context was changed during a capture"),
    ],
)
def test_what_a_capture_must_not_do(forbidden: Callable[[Bench], object], reason: str, bench: Bench) -> None:
    bench.bind()
    assert bench.execute()
    with pytest.raises(RuleBroken, match=reason):
        bench.device.capture(lambda: forbidden(bench))
    assert bench.device.recording is None


def test_waits_are_counted(bench: Bench) -> None:
    bench.bind()
    before = bench.device.waits
    bench.execute()
    bench.device.synchronize()
    bench.device.synchronize()
    assert bench.device.waits == before + 2
