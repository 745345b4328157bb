"""Sends requests to a model of a Triton server and prints when each was answered; Python of .peers/triton runs it.

In, as JSON: {address, model, streams, parameters, width, sources, due}; a request is sent when it is due, in seconds
from now, independent of earlier ones. Out: {done: seconds, tokens}. It knows nothing of seq2engine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpc  # type: ignore[import-not-found,unused-ignore]

WAIT = 3600


def inputs_of(source: list[int], width: int) -> list[Any]:
    """The tokens as they are or, for a model that batches equal shapes only, a row padded with -1."""
    values = np.array(source, dtype=np.int64)
    if width:
        values = np.pad(values, (0, width - len(source)), constant_values=-1)[None]
    tensor = grpc.InferInput("ids", values.shape, "INT64")
    tensor.set_data_from_numpy(values)
    return [tensor]


def main() -> None:
    asked = json.load(sys.stdin)
    sources, due, width = asked["sources"], asked["due"], asked["width"]
    done, tokens = [0.0] * len(sources), [[0]] * len(sources)
    left, all_done = [len(sources)], threading.Event()
    problems: list[str] = []
    lock = threading.Lock()

    def arrived(result: Any, error: Any) -> None:
        now = time.monotonic() - start
        with lock:
            if error is not None:
                problems.append(str(error))
            else:
                place = int(result.get_response().id)
                done[place], tokens[place] = now, result.as_numpy("tokens").reshape(-1).tolist()
            left[0] -= 1
            if problems or not left[0]:
                all_done.set()

    with grpc.InferenceServerClient(asked["address"]) as client:
        outputs = [grpc.InferRequestedOutput("tokens")]
        if asked["streams"]:
            client.start_stream(arrived)
        start = time.monotonic() + 0.1
        for place, source in enumerate(sources):
            time.sleep(max(0.0, start + due[place] - time.monotonic()))
            given = {"outputs": outputs, "request_id": str(place), "parameters": asked["parameters"]}
            if asked["streams"]:
                client.async_stream_infer(asked["model"], inputs_of(source, width), **given)
            else:
                client.async_infer(asked["model"], inputs_of(source, width), arrived, **given)
        all_done.wait(WAIT)
        if asked["streams"]:
            client.stop_stream()
    if problems:
        sys.exit(problems[0])
    print(json.dumps({"done": done, "tokens": tokens}))


if __name__ == "__main__":
    main()
