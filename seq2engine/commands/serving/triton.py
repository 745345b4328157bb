"""`seq2engine triton`: writes a Triton model repository of a bundle."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from seq2engine.flags.shared import Commands, add_backend, add_bundle, add_command, add_gpu_memory, add_json


def add_parser(commands: Commands) -> None:
    summary = "write a Triton model repository: continuous batching across requests, streamed answers"
    sub = add_command(commands, "triton", run_triton, summary)
    add_bundle(sub)
    sub.add_argument("repository", type=Path, metavar="REPO", help="folder of models; others in it stay")
    sub.add_argument("--name", help="name of the model (default: the bundle's folder)")
    add_backend(sub, auto=False)
    sub.add_argument("--ids", action="store_true", help="texts are lines of token ids, although the bundle takes text")
    sub.add_argument(
        "--batch", type=int, help="maximum requests decoded together (default: 32, or as many as fit into memory)"
    )
    sub.add_argument("--queue", type=int, default=256, help="maximum waiting requests (default: %(default)s)")
    sub.add_argument(
        "--timeout", type=float, default=60.0, help="timeout of a request in seconds (default: %(default)g)"
    )
    sub.add_argument(
        "--max-beams", type=int, default=32, help="maximum beams or samples per text (default: %(default)s)"
    )
    sub.add_argument(
        "--instances", type=int, help="processes; on GPUs, of each GPU (default: what fills this machine; on GPUs, one)"
    )
    add_gpu_memory(sub)
    sub.add_argument(
        "--strings",
        action="store_true",
        help="also accept and return text as BYTES; with numpy 2, servers as old as 2.51 crash on them",
    )
    sub.add_argument("--force", action="store_true", help="replace existing models that seq2engine wrote")
    add_json(sub)


def run_triton(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.triton.repository import TritonOptions, repository_from_bundle

    options = TritonOptions(
        name=args.name,
        backend=args.backend,
        precision=args.precision,
        engine=args.engine,
        provider=args.provider,
        threads=args.threads,
        deterministic=args.deterministic,
        rows=args.batch,
        queue=args.queue,
        timeout=args.timeout,
        max_beams=args.max_beams,
        instances=args.instances,
        gpu_memory=args.gpu_memory,
        ids=args.ids,
        strings=args.strings,
    )
    written = repository_from_bundle(open_bundle(args.bundle), args.repository, options, args.force)
    if args.json:
        models = [str(folder) for folder in written.folders]
        print(json.dumps({"models": models, "plan": dataclasses.asdict(written.plan)}))
        return 0
    model, *_ = written.folders
    print(f"wrote {', '.join(folder.name for folder in written.folders)} to {args.repository}")
    print(f"instances: {written.plan.reason}")
    print(f"install {model / 'requirements.txt'} in the environment of tritonserver, then run:")
    alone = f"--model-control-mode explicit --load-model {model.name}"
    print(f"  tritonserver --model-repository {args.repository} {alone}")
    return 0
