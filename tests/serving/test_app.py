"""The HTTP application: answers equal `translate`, limits are statuses, errors are one line of JSON."""

from __future__ import annotations

import json
import threading
import time
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from support.rounding import exp_sum_error, sum_error
from support.text_bundle import text_bundle

from seq2engine.runtime.serving.service import TextService
from seq2engine.runtime.translator import load
from seq2engine.serving.app import Application, ServerLimits

TEXTS = ["abc", "jihgfedcba", "a é 😀", "", "cab" * 5]
SOON = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with load(text_bundle(tmp_path_factory.mktemp("b")), threads=1) as opened:
        yield opened


@pytest.fixture
def serve(model):
    """Opens a client of a service with other limits."""
    opened = []

    def opens(queue=256, rows=32, widest=8, **limits):
        service = TextService(model, rows, queue, widest)
        opened.append(service)
        client = TestClient(
            Application(service, "letters", ServerLimits(**limits)).starlette(), raise_server_exceptions=False
        )
        client.scheduler = service.scheduler
        return client

    yield opens
    for service in opened:
        service.scheduler.close()


@pytest.fixture
def client(serve):
    return serve()


def events_of(response):
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@pytest.mark.parametrize(
    "fields", [{}, {"beam": 3, "nbest": 2, "max_length": 7}, {"sample": True, "seed": 3, "top_k": 4}]
)
def test_answers_are_those_of_translate(client, model, fields):
    found = client.post("/translate", json={"text": TEXTS, **fields}).json()
    assert [result["text"] for result in found["results"]] == model.translate(TEXTS, **fields)
    assert found["seconds"] > 0


def test_scores_tokens_and_unknown_characters(client, model):
    asked = {"text": "abz", "scores": True, "tokens": True, "beam": 2, "nbest": 2}
    (result,) = client.post("/translate", json=asked).json()["results"]
    from seq2engine.runtime.text.lines import Line

    (expected,) = model.translate_lines([Line(1, "abz")], beam=2, nbest=2)
    assert result["unknown"] == ["z"]
    assert [one["tokens"] for one in result["outputs"]] == [list(one.tokens) for one in expected.outputs]
    assert [one["score"] for one in result["outputs"]] == pytest.approx([one.score for one in expected.outputs])
    assert len(result["outputs"][0]["log_probs"]) == len(result["outputs"][0]["tokens"])


def test_pieces_are_the_text(client, model):
    response = client.post("/translate", json={"text": TEXTS, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events_of(response)
    pieces = ["".join(e["text"] for name, e in found if name == "piece" and e["index"] == n) for n in range(len(TEXTS))]
    results = {e["index"]: e["text"] for name, e in found if name == "result"}
    assert pieces == [results[n] for n in range(len(TEXTS))] == model.translate(TEXTS)
    assert found[-1][0] == "done"


def test_beams_stream_their_result_only(client, model):
    found = events_of(client.post("/translate", json={"text": "abc", "stream": True, "beam": 3}))
    assert [name for name, _ in found] == ["result", "done"]
    assert found[0][1]["text"] == model.translate("abc", beam=3)


def test_a_text_that_is_too_long_is_its_own_error(client, model):
    both = client.post("/translate", json={"text": ["a" * 40, "abc"]})
    assert both.status_code == 200
    assert both.json()["results"][0] == {"error": "41 tokens, at most 16 are supported"}
    assert both.json()["results"][1]["text"] == model.translate("abc")
    alone = client.post("/translate", json={"text": "a" * 40})
    assert (alone.status_code, alone.json()) == (422, {"error": "41 tokens, at most 16 are supported"})
    cut = client.post("/translate", json={"text": "a" * 40, "truncate": True})
    assert cut.json()["results"][0]["text"] == model.translate("a" * 40, truncate=True)
    streamed = events_of(client.post("/translate", json={"text": "a" * 40, "stream": True}))
    assert streamed[0] == ("result", {"index": 0, "error": "41 tokens, at most 16 are supported"})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b"[1]", 400, "the body is a list, expected an object"),
        (b"{}", 422, "text: expected a string or a list of strings"),
        (b'{"text": [1]}', 422, "text: expected a string or a list of strings"),
        (b'{"text": []}', 422, "text: 0 texts, expected 1 to 256"),
        (b'{"text": "a", "beem": 2}', 422, "unknown field 'beem'; did you mean beam?"),
        (b'{"text": "a", "beam": true}', 422, "beam: a boolean, expected an integer"),
        (b'{"text": "a", "beam": 0, "top_p": NaN}', 422, "beam: 0, expected at least 1; top_p: nan, expected a finite"),
        (b'{"text": "a", "beam": 9}', 422, "9 beams or samples of a text, at most 8"),
        (b'{"text": "a", "max_length": 99}', 422, "max length 99, at most 12"),
        (b'{"text": "a", "nbest": 2}', 422, "nbest 2"),
        (b'{"text": "a", "target_language": "fra"}', 422, "tokenizer has no languages"),
        (b'{"text": "\\ud800"}', 422, "half of a surrogate pair"),
    ],
)
def test_a_bad_request_is_one_line(client, body, status, message):
    response = client.post("/translate", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == status, error
    assert message in error
    assert "\n" not in error


def test_a_body_of_another_type_or_too_large_is_refused(serve):
    client = serve(body=100)
    assert client.post("/translate", content=b"text=a").status_code == 415
    large = client.post("/translate", json={"text": "a" * 200})
    assert (large.status_code, large.json()["error"]) == (413, "the body is larger than 100 bytes; send it in parts")

    def chunks():
        for _ in range(20):
            yield b" " * 20

    headers = {"content-type": "application/json"}
    assert client.post("/translate", content=chunks(), headers=headers).status_code == 413


def slowed(model, gate):
    step = model.session.step

    def waiting(*args):
        gate.wait(SOON)
        return step(*args)

    return mock.patch.object(model.session, "step", waiting)


def until(true):
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_full_queue_is_429_and_a_late_request_504(serve, model):
    """One is decoded and one waits when the others come; then the time of the first two is over."""
    client, gate = serve(queue=1, rows=1, timeout=SOON), threading.Event()
    scheduler, late = client.scheduler, []

    def ask():
        late.append(client.post("/translate", json={"text": "abc"}))

    with slowed(model, gate):
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread, count in zip(threads, (lambda: scheduler.active, lambda: scheduler.queued), strict=True):
            thread.start()
            until(count)
        full = [client.post("/translate", json={"text": "abc"}) for _ in range(2)]
        for ticket in (*scheduler.running.values(), *scheduler.waiting):
            assert ticket.deadline == ticket.arrived + SOON
            ticket.deadline = ticket.arrived
        gate.set()
        for thread in threads:
            thread.join(SOON)
    assert [(one.status_code, bool(one.json()["error"])) for one in full] == [(429, True)] * 2
    assert [(one.status_code, bool(one.json()["error"])) for one in late] == [(504, True)] * 2
    metrics = families(client)
    assert metrics["seq2engine_requests", "busy"] == 2
    assert metrics["seq2engine_requests", "deadline"] == 2


def families(client):
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[family.name, sample.labels.get("outcome") or sample.labels.get("path") or sample.name] = sample.value
    return found


def test_metrics_count_what_was_done(client):
    client.post("/translate", json={"text": ["abc", "cab"]})
    client.post("/translate", json={})
    metrics = families(client)
    assert metrics["seq2engine_requests", "done"] == 2
    assert metrics["seq2engine_tokens", "seq2engine_tokens_total"] > 2
    assert metrics["seq2engine_request_seconds", "seq2engine_request_seconds_count"] == 2
    assert metrics["seq2engine_first_token_seconds", "seq2engine_first_token_seconds_sum"] > 0
    assert metrics["seq2engine_rows_used", "seq2engine_rows_used"] == 0
    assert metrics["seq2engine_http_responses", "/translate"] == 1  # the last of two statuses


def test_health_and_a_server_that_stops(serve):
    client = serve()
    assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200
    with mock.patch("seq2engine.runtime.serving.scheduler.Scheduler.alive", False):
        assert client.get("/health/ready").status_code == 503


def test_the_bearer_token(serve):
    client = serve(token="s3cret")
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic s3cret"},
        {"authorization": "s3cret"},
    ):
        for response in (
            client.post("/translate", json={"text": "a"}, headers=headers),
            client.post("/attention", json={"text": "a", "tokens": [3]}, headers=headers),
            client.get("/metrics", headers=headers),
        ):
            assert response.status_code == 401
            assert "s3cret" not in response.text
    assert client.get("/health/ready").status_code == client.get("/").status_code == 200
    right = {"authorization": "Bearer s3cret"}
    assert client.post("/translate", json={"text": "a"}, headers=right).status_code == 200
    assert client.get("/openapi.json").json()["security"] == [{"bearer": []}]


def test_attention_weights_are_of_the_output(client):
    (result,) = client.post("/translate", json={"text": "abc", "tokens": True}).json()["results"]
    tokens = result["outputs"][0]["tokens"]
    found = client.post("/attention", json={"text": "abc", "tokens": tokens}).json()
    assert found["source"] == ["a", "b", "c", "</s>"]
    assert len(found["target"]) == len(found["weights"]) == len(tokens)
    near = exp_sum_error(4) + sum_error(4) + 4 * 0.5e-6  # six decimals are written
    assert [sum(row) for row in found["weights"]] == pytest.approx([1.0] * len(tokens), rel=0, abs=near)
    assert found["html"].count("<td") == 4 * len(tokens)
    for wrong in ({"text": "abc"}, {"text": "abc", "tokens": [999]}, {"text": "abc", "tokens": [3], "x": 1}):
        assert client.post("/attention", json=wrong).status_code == 422


def test_pages_need_nothing_from_elsewhere(client):
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text
        assert "https://" not in page.text
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert "/translate" in described["paths"]
    assert client.get("/nothing").json() == {"error": "/nothing: no such page; see /docs"}
    assert client.get("/translate").status_code == 405


def test_a_bug_is_500_without_its_traceback(client, model):
    with mock.patch.object(type(model), "options", side_effect=ZeroDivisionError("secret")):
        response = client.post("/translate", json={"text": "abc"})
    assert response.status_code == 500
    assert "secret" not in response.text
