"""The repository on a real tritonserver: 64 clients, clients that go away, errors, SIGTERM, kill -9 and a restart."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.rounding import FP32, apart, rounding_from_session

from seq2engine.benchmarks.serving.triton_server import MISSING, PYTHON, TritonServer, present
from seq2engine.exporting import export_checkpoint
from seq2engine.runtime.text.lines import Line
from seq2engine.runtime.translator import load
from seq2engine.triton.repository import TritonOptions, repository_from_bundle

CLIENT = Path(__file__).parent.parent / "support" / "triton_client.py"
CHECKED = """
import sys
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
for path in sys.argv[1:]:
    config = text_format.Parse(open(path).read(), model_config_pb2.ModelConfig())
    print(config.name, len(config.input), len(config.output), config.instance_group[0].count)
"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not present(), reason=MISSING)]


def asked(server, *requests):
    """The answers to requests that are sent at the same time."""
    lines = "\n".join(json.dumps(request) for request in requests)
    command = [str(PYTHON), str(CLIENT), f"127.0.0.1:{server.grpc}", "g2p"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    begun, *answers = done.stdout.splitlines()
    assert begun == "begun"
    return [json.loads(line) for line in answers]


def test_a_real_server(tmp_path):
    bundle = export_checkpoint("shipped:g2p", tmp_path / "g2p")
    repository_from_bundle(bundle, tmp_path / "repo", TritonOptions(name="g2p", rows=16, timeout=600))
    check_configs(tmp_path / "repo")
    server = TritonServer(tmp_path / "repo", tmp_path, "g2p")
    try:
        server.wait()
        with load(bundle, threads=1) as model:
            check_parallel_clients(server, model)
            check_errors_and_streams(server, model)
            check_gone_clients(server)
            server.kill()  # kill -9, in the middle of nothing; the next one starts on the same files
            server = TritonServer(tmp_path / "repo", tmp_path, "g2p").wait()
            check_drain(server, model)
    finally:
        server.kill()
    assert "incorrect name" not in server.log  # numpy's complaint about every tensor
    check_refusals(tmp_path)


def check_configs(repository):
    """All three are valid configs by Triton's own protobuf."""
    paths = [str(path) for path in sorted(repository.glob("*/config.pbtxt"))]
    done = subprocess.run([str(PYTHON), "-c", CHECKED, *paths], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "g2p 2 5 1"
    assert len(done.stdout.splitlines()) == 3


WORDS = ("hello", "translation", "engine", "a", "onomatopoeia", "through", "cache", "beams")


def check_parallel_clients(server, model):
    """64 at the same time, text and ids, greedy and beams: token by token what `run` decodes."""
    requests = []
    for number in range(64):
        word = WORDS[number % 8] + WORDS[number // 8 % 8]
        beam = (1, 1, 3)[number % 3]
        request = {"parameters": {"beam": beam, "nbest": beam, "max_length": 12 + number % 20}}
        source = {"ids": model.tokenizer.encode_source(word)} if number % 5 == 0 else {"text": word}
        requests.append((word, {**request, **source}))
    answers = asked(server, *[request for _, request in requests])
    near = rounding_from_session(model.session, [model.tokenizer.encode_source(word) for word, _ in requests], 32)
    for (word, request), answer in zip(requests, answers, strict=True):
        (expected,) = model.translate_lines([Line(1, word)], **request["parameters"])
        assert answer["error"] is None
        assert [tuple(one["tokens"]) for one in answer["responses"]] == [one.tokens for one in expected.outputs]
        assert [one["text"] for one in answer["responses"]] == [one.text for one in expected.outputs]
        assert [one["rank"] for one in answer["responses"]] == list(range(len(expected.outputs)))
        options = model.options(**request["parameters"])
        written = apart([(1, FP32)])  # scores are fp32 on their way, as a part of themselves
        for one, other in zip(answer["responses"], expected.outputs, strict=True):
            (wanted,) = near.scores([other], options)
            assert one["score"] == pytest.approx(other.score, rel=0, abs=wanted.abs + written * abs(other.score))


def check_errors_and_streams(server, model):
    """A request that is too long is its own error; the one beside it streams."""
    long, wrong, streamed, empty = asked(
        server,
        {"text": "x" * 100},
        {"text": "a", "parameters": {"beem": 3}},
        {"text": "translation", "parameters": {"stream": True}},
        {"text": ""},
    )
    assert "101 tokens, at most 64" in long["error"]
    assert "did you mean beam?" in wrong["error"]
    *pieces, whole = streamed["responses"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == model.translate("translation")
    assert [piece["final"] for piece in pieces] == [False] * len(pieces)
    assert empty["responses"][0]["text"] == ""


def gauge(server, name):
    lines = server.get("metrics", server.metrics).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def check_gone_clients(server):
    """Clients leave after two tokens of outputs that never end by themselves; their rows are free soon."""
    endless = {"text": "onomatopoeia", "parameters": {"stream": True, "min_length": 64}, "cancel_after": 2}
    answers = asked(server, *[endless] * 16)
    assert {answer["error"] for answer in answers} == {"cancelled"}
    deadline = time.monotonic() + 120
    while gauge(server, "seq2engine_rows_used") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gauge(server, "seq2engine_rows_used") == 0
    assert asked(server, {"text": "a"})[0]["error"] is None


def check_drain(server, model):
    """SIGTERM after the first token of every client: all get the rest, and the server ends well."""
    wanted = {"min_length": 60, "stream": True}
    lines = "\n".join(json.dumps({"text": word, "parameters": wanted}) for word in WORDS)
    command = [str(PYTHON), str(CLIENT), f"127.0.0.1:{server.grpc}", "g2p"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        clients.stdin.write(lines)
        clients.stdin.close()
        assert clients.stdout.readline() == "begun\n"
        server.process.terminate()
        answers = [json.loads(line) for line in clients.stdout]
    for word, answer in zip(WORDS, answers, strict=True):
        assert answer["error"] is None
        assert answer["responses"][-1]["text"] == model.translate(word, min_length=60)
    assert server.ended() == 0, server.log[-4000:]


def check_refusals(tmp_path):
    """A damaged bundle and one of another version are one line in the log each."""
    repository = tmp_path / "damaged"
    for name in ("weights", "version"):
        shutil.copytree(tmp_path / "repo" / "g2p", repository / name)
        text = (repository / name / "config.pbtxt").read_text().replace('"g2p"', f'"{name}"')
        (repository / name / "config.pbtxt").write_text(text)
    weights = next((repository / "weights" / "1" / "bundle" / "onnx" / "fp32").glob("decoder_step.onnx.data"))
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    described = repository / "version" / "description.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "seq2engine": "0.0.1"}))
    server = TritonServer(repository, tmp_path, "weights", "version")
    try:
        assert server.ended() != 0
    finally:
        server.kill()
    assert "is not the file the manifest describes (its hash differs)" in server.log
    assert "the model was written by seq2engine 0.0.1, this environment has" in server.log
