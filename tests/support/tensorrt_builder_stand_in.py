"""The building side of the `tensorrt` stand-in: builder, parser, timing cache and refitter, as strict as the rest.

What is built is an engine file of `tensorrt_stand_in`, so sessions over it compute. Beside what TensorRT reports it
enforces what it leaves undefined: who must outlive whom, one profile at least, a cache that lives through the build.
"""

from __future__ import annotations

import enum
import json
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from onnx.external_data_helper import load_external_data_for_model

from support.tensorrt_stand_in import AliasAwareEngine, ILogger, RuleBroken, Severity, engine_bytes, tensorrt_stand_in

KERNELS = ["gemm 512x512", "gemm 512x2048"]  # what every build of the stand-in wants timed
REFIT = "refit"  # mark in an engine's graph

BuilderFlag = enum.Enum("BuilderFlag", "TF32 REFIT WEIGHT_STREAMING")
SerializationFlag = enum.Enum("SerializationFlag", "EXCLUDE_WEIGHTS INCLUDE_REFIT")
NetworkDefinitionCreationFlag = enum.IntEnum(
    "NetworkDefinitionCreationFlag", {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1}
)
MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE")


def building_stand_in(environment: str = "sm89 driver 580") -> Any:
    """A `tensorrt` that builds for the GPU of `environment`. `timed` collects kernels that no timing cache knew,
    `configs` the settings of every build."""
    module = tensorrt_stand_in("tensorrt")
    module.environment, module.timed, module.configs = environment, [], []
    module.engine_class = RefittableEngine
    module.BuilderFlag, module.SerializationFlag, module.MemoryPoolType = BuilderFlag, SerializationFlag, MemoryPoolType
    module.NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
    module.IProgressMonitor = type("IProgressMonitor", (), {})
    module.Builder = partial(Builder, module)
    module.OnnxParser = OnnxParser
    module.Refitter = Refitter
    module.OnnxParserRefitter = OnnxParserRefitter
    return module


def with_weights(model: bytes, path: str) -> onnx.ModelProto:
    """The graph with its weights in it, which lie in the folder of `path`."""
    loaded = onnx.load_from_string(model)
    load_external_data_for_model(loaded, str(Path(path).parent))
    return loaded


class Network:
    def __init__(self) -> None:
        self.model: onnx.ModelProto | None = None

    @property
    def num_outputs(self) -> int:
        return 0 if self.model is None else len(self.model.graph.output)


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Network, logger: ILogger):
        self.network = weakref.ref(network)  # a real parser crashes over a network that is gone

    def parse(self, model: bytes, path: str) -> bool:
        network = self.network()
        if network is None:
            raise RuleBroken("the network was released before its parser")
        network.model = with_weights(model, path)
        return True


class TimingCache:
    def __init__(self, environment: str, kernels: list[str]):
        self.environment, self.kernels = environment, kernels

    def serialize(self) -> memoryview:
        return memoryview(json.dumps([self.environment, self.kernels]).encode())


class BuilderConfig:
    def __init__(self, module: Any):
        self.module = module
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[dict[str, Any]] = []
        self.pools: dict[MemoryPoolType, int] = {}
        self.timing: Any = None
        self.progress_monitor: Any = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.pools[pool] = size

    def create_timing_cache(self, saved: bytes) -> TimingCache | None:
        if not saved:
            return TimingCache(self.module.environment, [])
        try:
            return TimingCache(*json.loads(saved))
        except ValueError:
            return None

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        if cache.environment != self.module.environment and not ignore_mismatch:
            return False
        self.timing = weakref.ref(cache)  # "must not be destroyed until after the engine is built"
        return True

    def add_optimization_profile(self, profile: SimpleNamespace) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, module: Any, logger: ILogger):
        self.module, self.logger = module, logger

    def create_network(self, flags: int) -> Network:
        if flags != 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED:
            raise RuleBroken("a network that is not strongly typed may be computed in any precision")
        return Network()

    def create_builder_config(self) -> BuilderConfig:
        config = BuilderConfig(self.module)
        self.module.configs.append(config)
        return config

    def create_optimization_profile(self) -> SimpleNamespace:
        shapes: dict[str, Any] = {}
        return SimpleNamespace(shapes=shapes, set_shape=lambda name, *three: shapes.update({name: three}))

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> memoryview | None:
        if network.model is None or not config.profiles:
            raise RuleBroken("a build needs a parsed network and a profile")
        if config.timing is not None:
            cache = config.timing()
            if cache is None:
                raise RuleBroken("the timing cache was released before the build")
            self.module.timed += [kernel for kernel in KERNELS if kernel not in cache.kernels]
            cache.kernels[:] = KERNELS
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 4)
        for step in range(4):
            if not monitor.step_complete("Building engine", step):
                self.logger.log(Severity.ERROR, "Error Code 7: BuildCanceled")
                return None
        monitor.phase_finish("Building engine")
        model = onnx.ModelProto()
        model.CopyFrom(network.model)
        if BuilderFlag.REFIT in config.flags:
            onnx.helper.set_model_props(model, {REFIT: "yes"})
        return memoryview(engine_bytes(model, config.profiles, self.module.__name__))


class RefittableEngine(AliasAwareEngine):
    """An engine that knows its graph, to be given other weights and written again."""

    def __init__(self, runtime: Any, model: onnx.ModelProto, profiles: list[dict[str, Any]], *rest: Any):
        super().__init__(runtime, model, profiles, *rest)
        self.model, self.saved_profiles = model, profiles

    @property
    def refittable(self) -> bool:
        return any(prop.key == REFIT for prop in self.model.metadata_props)

    def create_serialization_config(self) -> SimpleNamespace:
        flags: set[SerializationFlag] = set()
        return SimpleNamespace(flags=flags, set_flag=flags.add)

    def serialize_with_config(self, config: SimpleNamespace) -> memoryview:
        self.check_alive()
        if SerializationFlag.INCLUDE_REFIT not in config.flags:
            del self.model.metadata_props[:]
        return memoryview(engine_bytes(self.model, self.saved_profiles, self.module.__name__))


class Refitter:
    def __init__(self, engine: RefittableEngine, logger: ILogger):
        engine.check_alive()
        if not engine.refittable:
            raise RuleBroken("this engine was not built to be refitted")
        self.engine, self.logger = engine, logger
        self.missing = [weight.name for weight in engine.model.graph.initializer]
        self.weights: dict[str, onnx.TensorProto] = {}

    def get_missing_weights(self) -> list[str]:
        return [name for name in self.missing if name not in self.weights]

    def refit_cuda_engine(self) -> bool:
        if self.get_missing_weights():
            return False
        for weight in self.engine.model.graph.initializer:
            weight.CopyFrom(self.weights[weight.name])
        return True


class OnnxParserRefitter:
    num_errors = 0

    def __init__(self, refitter: Refitter, logger: ILogger):
        self.refitter, self.logger = refitter, logger

    def refit_from_bytes(self, model: bytes, path: str) -> bool:
        given = {weight.name: weight for weight in with_weights(model, path).graph.initializer}
        for weight in self.refitter.engine.model.graph.initializer:
            fitting = given.get(weight.name)
            if fitting is None or fitting.dims != weight.dims or fitting.data_type != weight.data_type:
                self.logger.log(Severity.ERROR, f"{weight.name} does not fit")
                return False
            self.refitter.weights[weight.name] = fitting
        return True
