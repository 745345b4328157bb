"""Execution providers of ONNX Runtime, and the check that the chosen one does the work.

ONNX Runtime falls back to the CPU when a provider cannot be loaded or does not take a node, with a log line at most.
Here that is an error: in a decoder step for every node, in an encoder for all but arithmetic on shapes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from seq2engine.errors import SessionError

CPU = "CPUExecutionProvider"
# Fusions that are slower on a CPU: the fused skip and norm took 8 times as long per element (docs/LOG.md).
SLOWER = ["SkipLayerNormFusion"]
RECORD, NO_CPU = "session.record_ep_graph_assignment_info", "session.disable_cpu_ep_fallback"
# Nodes of an encoder that may run on the CPU: arithmetic on shapes, which GPU providers place there themselves.
OF_SHAPES = frozenset({"Shape", "Size", "Squeeze", "Unsqueeze", "Range", "Cast", "Constant"})
# Both packages hold the module `onnxruntime`: one over the other leaves files of both, and the later one's library.
INSTALL_GPU = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
MOST_NAMED = 8  # nodes in a message
PLUG_IN = "onnxruntime_ep_nv_tensorrt_rtx"

Options = dict[str, str]


@dataclass(frozen=True)
class Provider:
    """One provider. `options` come from the folder for its compiled kernels and the precision.

    With `replayed` it captures a graph as a CUDA graph: one for every set of shapes and addresses (device.Replays).
    """

    name: str
    install: str  # the command that brings it
    options: Callable[[Path, str], Options]
    device: str  # ONNX Runtime's name of the memory that it computes in
    moves: str  # the provider that runs the device graphs in that memory: too small to be worth compiling
    replayed: Options
    ordered: bool = False  # runs of one session execute in order, so not every one has to be waited for
    after: tuple[str, ...] = ()  # providers for the nodes that this one does not take


def cuda_options(kept: Path, precision: str) -> Options:
    return {
        "use_tf32": "0",  # fp32 graphs are computed in fp32, without TF32
        "arena_extend_strategy": "kSameAsRequested",
        "use_ep_level_unified_stream": "1",  # all runs on one stream: what is not waited for is still done in order
    }


def tensorrt_options(kept: Path, precision: str) -> Options:
    return {
        "trt_engine_cache_enable": "1",
        "trt_timing_cache_enable": "1",
        "trt_engine_cache_path": str(kept),
        "trt_timing_cache_path": str(kept),
        "trt_fp16_enable": str(int(precision == "fp16")),
    }


def rtx_options(kept: Path, precision: str) -> Options:
    return {"nv_runtime_cache_path": str(kept)}


CUDA_GRAPH = {"enable_cuda_graph": "1"}
PROVIDERS = {
    "cpu": Provider(CPU, "pip install onnxruntime", lambda kept, precision: {}, "cpu", "cpu", {}, True),
    "cuda": Provider("CUDAExecutionProvider", INSTALL_GPU, cuda_options, "cuda", "cuda", CUDA_GRAPH, True),
    "tensorrt": Provider(
        "TensorrtExecutionProvider",
        f"{INSTALL_GPU} tensorrt",
        tensorrt_options,
        "cuda",
        "cuda",
        {"trt_cuda_graph_enable": "1"},
        after=("CUDAExecutionProvider",),
    ),
    "nv_tensorrt_rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "pip install onnxruntime-ep-nv-tensorrt-rtx",
        rtx_options,
        "cuda",
        "nv_tensorrt_rtx",
        CUDA_GRAPH,
    ),
}


def check_provider(provider: str) -> None:
    """Refuses a provider that is unknown or not installed."""
    if provider not in PROVIDERS:
        raise SessionError(f"unknown provider {provider!r}, expected one of {', '.join(PROVIDERS)}")
    wanted = PROVIDERS[provider]
    if wanted.name in ort.get_available_providers():
        return
    if provider == "nv_tensorrt_rtx" and importlib.util.find_spec(PLUG_IN) is not None:
        return
    wheels = {name: installed_version(name) for name in ("onnxruntime", "onnxruntime-gpu")}
    if INSTALL_GPU in wanted.install and all(wheels.values()):
        cpu, gpu = wheels.values()
        raise SessionError(
            f"provider {provider} is not in this onnxruntime (CPU wheel {cpu} hides onnxruntime-gpu {gpu}); "
            f"run: {wanted.install}"
        )
    raise SessionError(
        f"onnxruntime {ort.__version__} as installed has no provider {provider}; install it with: {wanted.install}"
    )


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def arguments_for(
    provider: str, options: ort.SessionOptions, path: Path, precision: str, replayed: bool = False
) -> dict[str, Any]:
    """Further arguments of an InferenceSession; sets entries of `options`. `replayed`: its shapes repeat."""
    if provider == "cpu":
        return {"providers": [CPU], "disabled_optimizers": SLOWER}
    if hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry(RECORD, "1")
    else:  # an older version, which does not report node placement
        options.add_session_config_entry(NO_CPU, "1")
    wanted = PROVIDERS[provider]
    kept = path.with_name(f".{provider}")  # a dot: no part of the bundle
    kept.mkdir(exist_ok=True)
    chosen = wanted.options(kept, precision) | (wanted.replayed if replayed else {})
    if wanted.name in ort.get_available_providers():
        return {"providers": [(wanted.name, chosen), *wanted.after]}
    options.add_provider_for_devices(plug_in_devices(provider), chosen)
    return {}


def plug_in_devices(provider: str) -> list[Any]:
    """The GPUs of the plug-in provider."""
    plug_in = importlib.import_module(PLUG_IN)
    name = plug_in.get_ep_name()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not devices:  # not registered yet, or no GPU
        ort.register_execution_provider_library(name, plug_in.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise SessionError(f"provider {provider} finds no GPU on this machine; use --provider cpu")
    return devices


def check_assignment(session: ort.InferenceSession, provider: str, path: Path, strict: bool = False) -> None:
    """Refuses a session that runs the provider's nodes on the CPU; if `strict`, those that compute shapes too."""
    if provider == "cpu":
        return
    wanted = PROVIDERS[provider].name
    session.disable_fallback()  # a failed run must not be repeated on the CPU
    if wanted not in session.get_providers():
        raise SessionError(
            f"provider {provider} could not be loaded, and ONNX Runtime would run {path} on the CPU; "
            "look at its log above for the reason, or use --provider cpu"
        )
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return
    on_cpu = nodes_on_cpu(session, frozenset() if strict else OF_SHAPES)
    if on_cpu or not any(part.ep_name == wanted for part in session.get_provider_graph_assignment_info()):
        what = ", ".join(on_cpu[:MOST_NAMED]) or "all of it"
        more = f" and {len(on_cpu) - MOST_NAMED} more" if len(on_cpu) > MOST_NAMED else ""
        raise SessionError(f"provider {provider} left a part of {path} to the CPU ({what}{more}); use --provider cpu")


def nodes_on_cpu(session: ort.InferenceSession, but: frozenset[str]) -> list[str]:
    """Names of a graph's nodes that the CPU runs, with their types, but for some types."""
    parts = session.get_provider_graph_assignment_info()
    nodes = [node for part in parts if part.ep_name == CPU for node in part.get_nodes()]
    return [f"{node.name}: {node.op_type}" if node.name else node.op_type for node in nodes if node.op_type not in but]
