"""The conditions of a result: GPU, driver, clocks, TensorRT, package and engines."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
from cuda_memory import Cuda

# What nvidia-smi is asked -> what it is called here
ASKED = {
    "name": "GPU",
    "driver_version": "driver",
    "clocks.sm": "SM clock",
    "clocks.max.sm": "SM clock at most",
    "clocks.mem": "memory clock",
    "temperature.gpu": "temperature (C)",
    "memory.total": "memory",
}
SECONDS = 20  # that nvidia-smi may take to answer


def machine_facts(package: Any, trt: Any, cuda: Cuda, built: Any) -> dict[str, str]:
    """`built` is engines.json."""
    made_by = package["made_by"]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **gpu_facts(cuda.bus_id),
        "compute capability": cuda.capability,
        "TensorRT": f"{trt.__name__} {trt.__version__}",
        **cuda.versions(),
        "Python": f"{platform.python_version()}, numpy {np.__version__}",
        "system": platform.platform(),
        "package": f"format {package['format']} of seq2engine {made_by['seq2engine']}, {package['precision']}, "
        f"{package['cache_form']} cache, graphs {package['fingerprint'][:12]}",
        "engines": f"of {built['flavour']} {built['version']}, built {built['built']}, passport {built['passport']}",
    }


def gpu_facts(bus_id: str) -> dict[str, str]:
    """Name and driver of a GPU by nvidia-smi; where it fails, the reason in their place."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {"GPU": "unknown (no nvidia-smi)", "driver": "unknown (no nvidia-smi)"}
    asked = [command, "-i", bus_id, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = f"unknown ({type(error).__name__} of nvidia-smi)"
        return {"GPU": why, "driver": why}
    values = [value.strip() for value in answer.strip().split(",")]
    if len(values) != len(ASKED):
        return {"GPU": f"unknown (nvidia-smi printed {answer.strip()!r})", "driver": "unknown"}
    return dict(zip(ASKED.values(), values, strict=True))


def machine_line(facts: Mapping[str, str]) -> str:
    gpu = f"{facts['GPU']} ({facts['compute capability']}), driver {facts['driver']}"
    return f"{facts['TensorRT']} on {gpu}; package: {facts['package']}; engines: {facts['engines']}"
