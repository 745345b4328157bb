"""ONNX graphs of this package to engines: the one place that knows TensorRT's builder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from package_files import HERE, PackageError
from trt_engine import EngineFailed, make_logger


def build_engines(package: Any, trt: Any, targets: Sequence[str], force: bool) -> None:
    """Writes engines/<flavour> atomically: existing engines stay until all new ones are built."""
    folder = HERE / "engines" / trt.__name__
    if folder.exists() and not force:
        raise PackageError(f"{folder} is there already; to replace it, run: python build.py --force")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        files = {}
        for name, graph in package["graphs"].items():
            started = time.monotonic()
            print(f"building {name} ({package['precision']}) with {trt.__name__} {trt.__version__} ...", flush=True)
            engine = build(trt, HERE / graph["file"], graph["profiles"], targets)
            (beside / f"{name}.engine").write_bytes(engine)
            files[name] = {
                "file": f"{name}.engine",
                "bytes": len(engine),
                "sha256": hashlib.sha256(engine).hexdigest(),
                "seconds": round(time.monotonic() - started, 1),
            }
            print(f"  {len(engine) / 1e6:.1f} MB in {files[name]['seconds']} s")
        described = {
            "flavour": trt.__name__,
            "version": trt.__version__,
            "targets": list(targets),
            "made_from": package["fingerprint"],
            "built": "here, by build.py",
            "passport": "none",  # which only seq2engine writes
            "engines": files,
        }
        (beside / "engines.json").write_text(json.dumps(described, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"engines: {folder}")


def build(trt: Any, path: Path, profiles: list[dict[str, list[list[int]]]], targets: Sequence[str]) -> bytes:
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)) or network.num_outputs == 0:
        found = [parser.get_error(i).desc() for i in range(min(parser.num_errors, 3))]
        raise EngineFailed(f"{path} cannot be read: {'; '.join(found) or logger.reason()}")
    allow_decomposition(trt, network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 graphs are computed in fp32, without TF32
    if targets and not hasattr(trt, "ComputeCapability"):
        raise EngineFailed(f"{trt.__name__} builds for the GPU of this machine only; leave --gpu out")
    if targets:
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, tuple(least), tuple(usual), tuple(most))
        if config.add_optimization_profile(profile) < 0:
            raise EngineFailed(f"the shape ranges of {path} were refused: {logger.reason()}")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise EngineFailed(f"{path} could not be built: {logger.reason()}")
    return bytes(engine)


def allow_decomposition(trt: Any, network: Any) -> None:
    """Lets attentions without a fused kernel be built from several kernels; fused ones stay fused."""
    if not hasattr(trt, "IAttentionInputLayer"):
        return
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True
