"""One ONNX model to one serialised engine: parse, set shapes, build, with progress and a clean cancel."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.tensorrt_module import collector_held
from seq2engine.errors import BuildError

from ..artifact.build_flags import PLAIN, BuildFlags
from ..artifact.profiles import Shapes

log = logging.getLogger("seq2engine")
NOISE = "catchCudaError"  # TensorRT-RTX adds this to every message on a machine without a driver


@collector_held()
def build_engine(
    trt: Any,
    model: onnx.ModelProto,
    path: Path,
    shapes: Shapes,
    targets: Sequence[str],
    progress: Callable[[float], None],
    narrower: Sequence[Shapes] = (),
    flags: BuildFlags = PLAIN,
    timings: Path | None = None,
) -> bytes:
    """Builds an engine of `model`, whose external weights are in the folder of `path`.

    Ctrl-C cancels between two build steps. `shapes` become profile 0, `narrower` the next ones. `timings` is the file
    of TensorRT's timing cache.
    """
    logger = logger_class(trt)()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model.SerializeToString(), str(path))
    if not parsed or network.num_outputs == 0:
        raise BuildError(f"{trt.__name__} cannot read {path.name}: {parse_errors(parser) or logger.last()}")
    allow_decomposition(trt, network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; an fp32 graph is to be computed in fp32
    if targets:
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
    set_flags(trt, config, flags)
    for one in (shapes, *narrower):
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in one.items():
            profile.set_shape(name, least, usual, most)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"{trt.__name__} refused the shape ranges of {path.name}: {logger.last()}")
    timing_cache = None if timings is None else opened_timings(config, timings)
    with cancel_on_interrupt() as cancelled:
        config.progress_monitor = monitor_class(trt)(progress, cancelled)
        engine = builder.build_serialized_network(network, config)
    if cancelled.is_set():
        raise KeyboardInterrupt
    if engine is None:
        raise BuildError(f"{trt.__name__} could not build {path.name}: {logger.last()}")
    if timings is not None and timing_cache is not None:
        save_timings(timing_cache, timings)
    return bytes(engine)


def set_flags(trt: Any, config: Any, flags: BuildFlags) -> None:
    if flags.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if flags.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    if flags.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, flags.workspace)


def opened_timings(config: Any, path: Path) -> Any:
    """The timing cache of a file, attached to the build. The caller keeps it until the engine is built.

    One of another GPU or driver, or a damaged one, counts as empty.
    """
    saved = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(saved)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def save_timings(cache: Any, path: Path) -> None:
    try:
        with new_file(path) as beside:
            beside.write_bytes(cache.serialize())
    except OSError as error:
        log.warning("%s not written (%s): the next build measures its kernels again", path, error.strerror)


def parse_errors(parser: Any) -> str:
    errors = [parser.get_error(i) for i in range(min(parser.num_errors, 3))]
    described = [f"{e.node_name() or e.node_operator()}: {e.code().name} {e.desc()}" for e in errors]
    return " ".join("; ".join(described).split())


def allow_decomposition(trt: Any, network: Any) -> None:
    """Lets attentions without a fused kernel (fp32, unusual head sizes) be built from parts; fused ones stay fused."""
    if not hasattr(trt, "IAttentionInputLayer"):
        return
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True


def logger_class(trt: Any) -> type:
    """A logger that keeps error messages for ours; the base class exists only once TensorRT is imported."""

    class ErrorLog(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR and NOISE not in message:
                self.errors.append(message)

        def last(self) -> str:
            return " ".join(self.errors[-1].split()) if self.errors else "it gave no reason"

    return ErrorLog


def monitor_class(trt: Any) -> type:
    """Reports the progress of the outermost build phase; inner phases count as parts of a step."""

    class BuildMonitor(trt.IProgressMonitor):
        def __init__(self, progress: Callable[[float], None], cancelled: threading.Event):
            trt.IProgressMonitor.__init__(self)
            self.progress, self.cancelled = progress, cancelled
            self.phases: dict[str, tuple[int, int]] = {}  # phase -> steps done, steps in all
            self.furthest = 0.0  # several phases may follow within one step; progress must not go back

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.phases[phase] = (0, max(steps, 1))

        def step_complete(self, phase: str, step: int) -> bool:
            self.phases[phase] = (step + 1, self.phases[phase][1])
            self.report()
            return not self.cancelled.is_set()

        def phase_finish(self, phase: str) -> None:
            del self.phases[phase]

        def report(self) -> None:
            done, share = 0.0, 1.0
            for step, steps in self.phases.values():  # outermost first: a dict keeps its order
                done += share * min(step, steps) / steps
                share /= steps
            self.furthest = max(self.furthest, min(done, 0.99))
            self.progress(self.furthest)

    return BuildMonitor


@contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, because an exception cannot pass through TensorRT's code."""
    cancelled = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancelled
        return
    before = signal.signal(signal.SIGINT, lambda *_: cancelled.set())
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)
