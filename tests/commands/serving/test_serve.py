"""The server as a process: its address, wrong usage, a client that goes away, SIGTERM while it works, a restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.fast_cases import rest_slow
from support.served import Served
from support.text_bundle import text_bundle

from seq2engine.cli.main import main
from seq2engine.runtime.translator import load

TEXTS = ["abc", "jihgfedcba", "cab" * 5, "a é 😀"]
STEPS, CANCELLED = "seq2engine_steps_total", 'seq2engine_requests_total{outcome="cancelled"}'


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("b"))


def posted(server, values, headers=None):
    request = urllib.request.Request(
        f"{server.address}/translate",
        json.dumps(values).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def got(server, path):
    with urllib.request.urlopen(f"{server.address}{path}", timeout=120) as answer:
        return answer.read().decode()


def metric(server, name):
    lines = got(server, "/metrics").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asked_and_gone(server, values):
    """A client that leaves while it is decoded, without waiting for the answer; gives how many texts that cancelled.

    On a busy machine it may come too late and find all of them decoded.
    """
    steps, cancelled = (metric(server, name) for name in (STEPS, CANCELLED))
    gone = http.client.HTTPConnection("127.0.0.1", server.port)
    gone.request("POST", "/translate", json.dumps(values), {"content-type": "application/json"})
    until(lambda: metric(server, STEPS) > steps)
    gone.close()
    until(lambda: not metric(server, "seq2engine_rows_used") and not metric(server, "seq2engine_queue_length"))
    return metric(server, CANCELLED) - cancelled


def test_a_process_serves_drains_and_starts_again(bundle):
    with load(bundle, threads=1) as model:
        expected = model.translate(TEXTS)
    with Served(bundle.root, "--batch", "2") as server:
        found = posted(server, {"text": TEXTS})
        assert [result["text"] for result in found["results"]] == expected

        long = {"text": ["jihgfedcba"] * 250, "min_length": 12}
        assert any(asked_and_gone(server, long) for _ in range(20))

        answers, steps = [], metric(server, STEPS)
        waiting = threading.Thread(target=lambda: answers.append(posted(server, long)))
        waiting.start()
        until(lambda: metric(server, STEPS) > steps)
        server.process.send_signal(signal.SIGTERM)
        waiting.join(120)
        code, error = server.ended()
        assert code == 0, error
        assert "Traceback" not in error
        assert len(answers[0]["results"]) == 250
    with Served(bundle.root) as server:
        server.process.kill()  # kill -9 leaves nothing behind that the next one minds
    with Served(bundle.root) as server:
        assert posted(server, {"text": "abc"})["results"][0]["text"] == expected[0]


@pytest.fixture(scope="module")
def impatient(bundle):
    with Served(bundle.root, "--timeout", "1") as server:
        yield server


def sent(server, data):
    """A connection with these bytes on their way."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(data)
    return connection


def read_to_the_end(connection, drips=b""):
    """All that comes until the server closes; meanwhile a byte is sent from time to time."""
    found = b""
    connection.settimeout(0.1)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            part = connection.recv(1 << 16)
        except TimeoutError:
            with contextlib.suppress(OSError):  # closed: the next read tells
                connection.send(drips)
            continue
        except ConnectionError:
            return found
        if not part:
            return found
        found += part
    raise AssertionError(f"still open after {found[:80]!r}")


HEAD = b"POST /translate HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


HEADS = [b"", b"POST /trans", HEAD.partition(b"\r\n\r\n")[0] % 9 + b"\r\nx: "]


@pytest.mark.parametrize("head", rest_slow(HEADS, [b""]))
def test_a_client_that_never_asks_is_cut_off(impatient, head):
    """Also one that sends another byte of its head from time to time."""
    with sent(impatient, head) as connection:
        assert read_to_the_end(connection, b"x" if head else b"") == b""
    assert got(impatient, "/health/ready") == "ready\n"


def test_a_body_that_never_comes_is_408_and_the_connection_ends(impatient):
    with sent(impatient, HEAD % 10_000 + b'{"text": "') as connection:
        found = read_to_the_end(connection, b"a")
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive in 1 s" in found


def test_a_port_in_use_is_one_line(bundle, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(bundle.root), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; give another")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--queue", "0"), 2, "--queue 0, expected at least 1"),
        (("--port", "70000"), 2, "--port 70000, expected 0 to 65535"),
        (("--timeout", "0"), 2, "--timeout 0, expected more than 0"),
        (("--batch", "0"), 2, "--batch 0, expected at least 1"),
        (("--token-file", "/nowhere"), 1, "cannot read the token file /nowhere: No such file"),
        (("--backend", "onnx"), 2, "onnx"),
    ],
)
def test_wrong_usage_is_one_line(bundle, capsys, flags, code, message):
    try:
        found = main(["serve", str(bundle.root), *flags])
    except SystemExit as ended:
        found = ended.code
    error = capsys.readouterr().err
    assert (found, message in error) == (code, True), error


def test_a_token_file_without_a_token(bundle, tmp_path, capsys):
    (tmp_path / "token").write_text("two words\n")
    assert main(["serve", str(bundle.root), "--token-file", str(tmp_path / "token")]) == 1
    error = capsys.readouterr().err
    assert "holds no token, expected one word" in error
    assert "two words" not in error


def test_a_token_file_that_is_a_pipe_or_endless(bundle, tmp_path, capsys):
    """Opening a pipe would wait for a writer, and /dev/zero has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert main(["serve", str(bundle.root), "--token-file", str(path)]) == 1
        assert capsys.readouterr().err == f"error: cannot read the token file {path}: not a regular file\n"


def test_the_token_comes_from_the_environment_and_is_never_printed(bundle):
    secret = "s3cret-token"
    with Served(bundle.root, environment={**os.environ, "SEQ2ENGINE_TOKEN": secret}) as server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            posted(server, {"text": "abc"})
        assert posted(server, {"text": "abc"}, {"authorization": f"Bearer {secret}"})["results"]
        server.process.send_signal(signal.SIGINT)
        out, error = server.process.communicate(timeout=120)
        assert server.process.returncode == 0
        assert secret not in out + error
