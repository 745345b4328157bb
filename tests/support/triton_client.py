"""Clients of a Triton server, run by the Python of .peers/triton: reads requests as JSON lines, prints answers so.

A request: {"text" or "ids", "parameters", "cancel_after": responses}; all are sent at the same time, a thread each.
An answer: {"responses": [{tokens, text, score, rank, final}], "error"}. When every request has had a response, the line
"begun" goes before the answers: none of them waits in a connection any more.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from functools import partial

import numpy as np
import tritonclient.grpc as grpc

WAIT = 300
CANCELLED = "cancelled"


def input_of(request):
    if "ids" in request:
        name, kind, values = "ids", "INT64", np.array(request["ids"], dtype=np.int64)
    else:
        name, kind, values = "text_utf8", "UINT8", np.frombuffer(request["text"].encode(), dtype=np.uint8)
    tensor = grpc.InferInput(name, values.shape, kind)
    tensor.set_data_from_numpy(values)
    return tensor


def ask(address, model, request, begun, answers, place):
    found, error = [], None
    arrived: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(partial(lambda arrived, result, error: arrived.put((result, error)), arrived))
        outputs = [grpc.InferRequestedOutput(name) for name in ("tokens", "text_utf8", "score", "rank", "final")]
        client.async_stream_infer(
            model,
            [input_of(request)],
            outputs=outputs,
            parameters=request.get("parameters"),
            enable_empty_final_response=True,
        )
        while True:
            result, error = arrived.get(timeout=WAIT)
            begun[place].set()
            if error is not None:
                error = str(error.message())
                break
            response = result.get_response()
            if response.outputs:
                array = result.as_numpy
                found.append(
                    {
                        "tokens": array("tokens").tolist(),
                        "text": array("text_utf8").astype(np.uint8).tobytes().decode(),
                        "score": float(array("score")[0]),
                        "rank": int(array("rank")[0]),
                        "final": bool(array("final")[0]),
                    }
                )
            if response.parameters["triton_final_response"].bool_param:
                break
            if request.get("cancel_after") and len(found) >= request["cancel_after"]:
                error = CANCELLED
                break
        # A stream that is cancelled right behind its last response leaves Triton 2.51 a model that it cannot unload.
        client.stop_stream(cancel_requests=error == CANCELLED)
    answers[place] = {"responses": found, "error": error}


def main(address, model):
    requests = [json.loads(line) for line in sys.stdin]
    answers = [None] * len(requests)
    begun = [threading.Event() for _ in requests]
    threads = [
        threading.Thread(target=ask, args=(address, model, request, begun, answers, place))
        for place, request in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    if all(one.wait(WAIT) for one in begun):
        print("begun", flush=True)
    for thread in threads:
        thread.join()
    for answer in answers:
        print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
