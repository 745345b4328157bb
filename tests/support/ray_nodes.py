"""Runs `seq2engine run --cluster` on three Ray nodes of this machine and kills one of them in the middle:

    python ray_nodes.py OUT SHARDS_BEFORE_THE_KILL COMMAND LINE ...

Prints one JSON object: the exit codes of the command and of the same command again, and how many shards were there
when the node was killed. The nodes have addresses of loopback, and a network of their own where the system allows it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")  # Ray replaces 127.0.0.1 by that of another interface
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DISABLE_IMPORT_WARNING": "1"}


def main(out: Path, before: int, words: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    from ray.cluster_utils import Cluster

    from seq2engine.cli.main import main as run

    cluster = Cluster()
    try:
        nodes = [
            cluster.add_node(
                node_ip_address=address, num_cpus=2, include_dashboard=False, object_store_memory=100 << 20
            )
            for address in ADDRESSES
        ]
        killed = []

        def kill() -> None:
            while len(list((out / "shards").glob("*/*.jsonl"))) < before:
                time.sleep(0.02)
            nodes[-1].kill_all_processes(check_alive=False, allow_graceful=False, wait=False)  # SIGKILL
            killed.append(len(list((out / "shards").glob("*/*.jsonl"))))

        threading.Thread(target=kill, daemon=True).start()
        codes, message = [], []
        for _ in range(2):  # the second call finds all shards
            printed, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(err):
                codes.append(run([*words, "--cluster", cluster.address]))
            message.append([printed.getvalue(), err.getvalue()])
        print(json.dumps({"codes": codes, "killed_at": killed, "message": message}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
