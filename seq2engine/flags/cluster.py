"""The flags of `run --cluster`: where the workers are, how the corpus is cut, and what makes two runs the same job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seq2engine.export.artifact.bundle import Bundle

SHARD = 2048  # lines of a shard: the window in which a worker sorts by length, at the default --batch
# Flags that do not affect outputs: placement, speed, display.
BESIDE = ("cluster", "out", "keep_order", "cores", "shard", "column", "quiet", "threads", "text", "input", "bundle")
OURS = ("command_name", "command_line", "hub_bundle")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a Ray cluster (--input may be a folder; text, TSV and Parquet files)")
    group.add_argument("--cluster", metavar="ADDRESS", help="local, auto, or HOST:PORT of the cluster's head")
    group.add_argument("--out", type=Path, metavar="DIR", help="folder of the shards; the same command resumes it")
    group.add_argument(
        "--keep-order", action="store_true", help="merge the shards to one file in the order of the lines"
    )
    group.add_argument("--cores", type=int, help="CPUs of a worker, where it has no GPU (default: up to 4)")
    group.add_argument("--column", help="source column: a number from 1 in TSV, a name in Parquet (default: 1; text)")
    group.add_argument(
        "--shard", type=int, default=SHARD, metavar="LINES", help="lines of a shard (default: %(default)s)"
    )


def check_cluster_flags(args: argparse.Namespace) -> None:
    if args.cluster is None:
        alone = ("out", "cores", "column")
        given = [f"--{name}" for name in alone if getattr(args, name) is not None]
        given += ["--keep-order"] if args.keep_order else []
        if given:
            args.usage_error(f"{', '.join(given)} without --cluster; add --cluster local for this machine alone")
        return
    from seq2engine.runtime.cluster.ray_data import check_address

    check_address(args.cluster)
    if args.input is None or args.text:
        args.usage_error("--cluster decodes files: give --input FILE or FOLDER, and no TEXT")
    if args.out is None:
        args.usage_error("--cluster writes shards: give the folder for them with --out DIR")
    if args.precision == "auto":
        args.usage_error("--precision auto with --cluster: machines could choose differently; name a precision")


def uses_gpu(args: argparse.Namespace) -> bool:
    return args.backend == "tensorrt" or (args.provider or "cpu") != "cpu"


def job_of(args: argparse.Namespace, bundle: Bundle) -> dict[str, Any]:
    """Everything that affects the outputs: two runs with the same description may share a folder."""
    from seq2engine.export.artifact.default_precision import default_precision
    from seq2engine.runtime.cluster.corpus import corpus_files

    files = [(path, path.stat()) for path in corpus_files(args.input)]
    flags = {name: value for name, value in vars(args).items() if name not in (*BESIDE, *OURS) and not callable(value)}
    set_flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items() if value}
    return {
        "checkpoint": bundle.manifest.checkpoint_sha256,
        "precision": args.precision or default_precision(bundle, args.backend, args.engine),
        "input": [[path.name, about.st_size, about.st_mtime_ns] for path, about in files],
        "shard": args.shard,
        "column": args.column,
        "flags": {**set_flags, "precision": None},
    }
