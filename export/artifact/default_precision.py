"""The default precision: the most precise supported one. The only place with that rule.

    onnxruntime, torch   the most precise of the bundle that the backend computes
    tensorrt             the most precise that has an engine; where none is built, the one that `build` would take
    build, plan          the most precise that every target runs

So without flags export, build, parity, run and package all use one precision: what was checked is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from seq2engine.errors import BundleError

from ..contract import FOR_CPUS
from .bundle import Bundle
from .engines import engine_names, is_current, open_passport, passports_of
from .gpu_support import PORTABLE, unsupported

PRECISE_FIRST = ("fp32", "fp16", "bf16", "int8", "w8a8", "fp8", "int4")
NOT_COMPUTED = {"onnxruntime": ("bf16",)}  # backend -> precisions that it has no matmuls for


def default_precision(bundle: Bundle, backend: str = "onnxruntime", engine: str | None = None) -> str:
    """The most precise that serves a backend; of a named engine, its own."""
    if backend == "tensorrt" and engine is not None and engine in engine_names(bundle):
        return open_passport(bundle, engine)[1].precision
    serving = served_precisions(bundle, backend)
    if not serving:
        raise BundleError(
            f"{bundle.root} holds only {', '.join(bundle.precisions)}, which {backend} does not run; "
            f"{bundle.advice_to_add('fp32')}"
        )
    return serving[0]


def shared_precision(bundle: Bundle, backends: Sequence[str]) -> str:
    """The most precise that serves all of several backends; where none does, the first backend's."""
    serving = [served_precisions(bundle, backend) for backend in backends]
    common = [precision for precision in PRECISE_FIRST if all(precision in one for one in serving)]
    return common[0] if common else default_precision(bundle, *backends[:1])


def served_precisions(bundle: Bundle, backend: str) -> list[str]:
    """Those of the bundle's precisions that a backend can run, the most precise first."""
    held = sorted(bundle.precisions, key=PRECISE_FIRST.index)
    if backend != "tensorrt":
        return [precision for precision in held if precision not in NOT_COMPUTED.get(backend, ())]
    passports = list(passports_of(bundle).values())
    current = {passport.precision for passport in passports if is_current(bundle, passport)}
    built = current or {passport.precision for passport in passports}
    return [precision for precision in held if precision in built] or [precision_to_build(bundle)]


def precision_to_build(bundle: Bundle, targets: Sequence[str] = (), ahead_of_time: bool = True) -> str:
    """The most precise that every target runs. `ahead_of_time` is TensorRT-RTX; `tensorrt` builds on its own GPU, and
    has fp32 there in any case."""
    held = sorted(bundle.precisions, key=PRECISE_FIRST.index)
    for precision in held:
        censuses = [entry.census for entry in bundle.manifest.graphs[precision].values()]
        where = (targets or PORTABLE) if ahead_of_time else ()
        if precision not in FOR_CPUS and not any(unsupported(target, precision, censuses) for target in where):
            return precision
    return held[0]  # none serves: the build reports why
