"""Execution providers of ONNX Runtime, and the check that the chosen one does the work.

ONNX Runtime falls back to the CPU when a provider cannot be loaded or does not take a node, with a log line at most.
Here that is an error.
"""

from __future__ import annotations

import importlib
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
# Nodes that may run on the CPU: arithmetic on shapes, which GPU providers place there themselves.
OF_SHAPES = frozenset({"Shape", "Size", "Squeeze", "Unsqueeze", "Range", "Cast", "Constant"})
# Both packages hold the module `onnxruntime`: one over the other leaves files of both.
INSTALL_GPU = "pip uninstall -y onnxruntime && pip install onnxruntime-gpu"
PLUG_IN = "onnxruntime_ep_nv_tensorrt_rtx"

Options = dict[str, str]


@dataclass(frozen=True)
class Provider:
    """One provider. `options` come from the folder for its compiled kernels and the precision."""

    name: str
    install: str  # the command that brings it
    options: Callable[[Path, str], Options]
    after: tuple[str, ...] = ()  # providers for the nodes that this one does not take


def cuda_options(kept: Path, precision: str) -> Options:
    return {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}  # an fp32 graph is to be computed in fp32


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


PROVIDERS = {
    "cpu": Provider(CPU, "pip install onnxruntime", lambda kept, precision: {}),
    "cuda": Provider("CUDAExecutionProvider", INSTALL_GPU, cuda_options),
    "tensorrt": Provider(
        "TensorrtExecutionProvider", f"{INSTALL_GPU} tensorrt", tensorrt_options, ("CUDAExecutionProvider",)
    ),
    "nv_tensorrt_rtx": Provider(
        "NvTensorRTRTXExecutionProvider", "pip install onnxruntime-ep-nv-tensorrt-rtx", rtx_options
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
    raise SessionError(
        f"onnxruntime {ort.__version__} as installed has no provider {provider}; install it with: {wanted.install}"
    )


def arguments_for(provider: str, options: ort.SessionOptions, path: Path, precision: str) -> dict[str, Any]:
    """Further arguments of an InferenceSession; sets entries of `options`."""
    if provider == "cpu":
        return {"providers": [CPU], "disabled_optimizers": SLOWER}
    if hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry(RECORD, "1")
    else:  # an older version, which has no report of what runs where
        options.add_session_config_entry(NO_CPU, "1")
    wanted = PROVIDERS[provider]
    kept = path.with_name(f".{provider}")  # a dot: no part of the bundle
    kept.mkdir(exist_ok=True)
    chosen = wanted.options(kept, precision)
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


def check_assignment(session: ort.InferenceSession, provider: str, path: Path) -> None:
    """Refuses a session that runs the provider's nodes on the CPU."""
    if provider == "cpu":
        return
    wanted = PROVIDERS[provider].name
    session.disable_fallback()  # a run that fails must not be repeated on the CPU
    if wanted not in session.get_providers():
        raise SessionError(
            f"provider {provider} could not be loaded, and ONNX Runtime would run {path} on the CPU; "
            "look at its log above for the reason, or use --provider cpu"
        )
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return
    parts = session.get_provider_graph_assignment_info()
    on_cpu = {node.op_type for part in parts if part.ep_name == CPU for node in part.get_nodes()} - OF_SHAPES
    if on_cpu or not any(part.ep_name == wanted for part in parts):
        what = ", ".join(sorted(on_cpu)) or "all of it"
        raise SessionError(f"provider {provider} left a part of {path} to the CPU ({what}); use --provider cpu")
