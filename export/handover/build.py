"""Builds the engines of this package on this machine. Needs numpy and `tensorrt` (or `tensorrt_rtx`).

    python build.py                                        for the GPU of this machine
    python build.py --flavour tensorrt_rtx --target sm89   ahead of time, also without a GPU

The shapes of every input at min, opt and max are written out in package.json, profile by profile.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from trt_engine import EngineFailed, make_logger  # noqa: E402  (it lies beside this file)

FLAVOURS = ("tensorrt", "tensorrt_rtx")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the engines of this package.")
    parser.add_argument("--flavour", choices=FLAVOURS, help="(default: the one installed)")
    parser.add_argument("--target", nargs="+", default=[], metavar="SM", help="tensorrt_rtx only, such as sm89")
    args = parser.parse_args(argv)
    try:
        package = json.loads((HERE / "package.json").read_text())
        trt = load(args.flavour)
        folder = HERE / "engines" / trt.__name__
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, graph in package["graphs"].items():
            started = time.monotonic()
            print(f"building {name} ({package['precision']}) with {trt.__name__} {trt.__version__} ...", flush=True)
            engine = build(trt, HERE / graph["file"], graph["profiles"], args.target)
            path = folder / f"{name}.engine"
            write(path, engine)
            files[name] = {"file": path.name, "bytes": len(engine), "sha256": hashlib.sha256(engine).hexdigest()}
            print(f"  {len(engine) / 1e6:.1f} MB in {time.monotonic() - started:.1f} s: {path}")
        described = {
            "flavour": trt.__name__,
            "version": trt.__version__,
            "targets": args.target,
            "made_from": package["fingerprint"],
            "engines": files,
        }
        write(folder / "engines.json", (json.dumps(described, indent=2) + "\n").encode())
    except (EngineFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("next: python verify.py")
    return 0


def load(flavour: str | None) -> Any:
    wanted = (flavour,) if flavour else FLAVOURS
    for name in wanted:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error  # said below when there is no other
    raise EngineFailed(f"{' or '.join(wanted)} cannot be imported ({reason}); install it with: pip install {wanted[0]}")


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
    config.clear_flag(trt.BuilderFlag.TF32)  # an fp32 graph is to be computed in fp32
    if targets and not hasattr(trt, "ComputeCapability"):
        raise EngineFailed(f"{trt.__name__} builds for the GPU of this machine only; leave --target out")
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
    """Lets attentions without a fused kernel be built from parts; fused ones stay fused."""
    if not hasattr(trt, "IAttentionInputLayer"):
        return
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True


def write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
