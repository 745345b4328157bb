"""Ray's part: how many workers fit, what a worker answers, and three nodes of which one is killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.text_bundle import text_bundle

from seq2engine.errors import RequestError, SessionError, UsageError
from seq2engine.runtime.cluster import ray_data
from seq2engine.runtime.cluster.corpus import blocks_of
from seq2engine.runtime.cluster.ray_data import (
    BlockWorker,
    ClusterOptions,
    Workers,
    check_address,
    check_reachable,
    decode_blocks,
    rows_of,
    workers_of,
)
from seq2engine.runtime.cluster.shards import Record, missing_blocks

ROOT = Path(__file__).parents[3]


def nodes(*resources):
    return [{"Alive": True, "Resources": given} for given in resources] + [{"Alive": False, "Resources": {"CPU": 99}}]


@pytest.mark.parametrize(
    ("cpus", "cores", "expected"),
    [
        ((3,), None, Workers(1, 2)),
        ((2,), 1, Workers(1, 1)),  # one CPU stays free
        ((2, 2, 2), 1, Workers(5, 1)),
        ((2, 2, 2), None, Workers(5, 1)),
        ((64,), None, Workers(15, 4)),
        ((64, 64), 32, Workers(3, 32)),
        ((5, 1), 4, Workers(1, 4)),
    ],
)
def test_a_cpu_stays_free(cpus, cores, expected):
    given = nodes(*({"CPU": float(cpu)} for cpu in cpus))
    assert workers_of(given, ClusterOptions("auto", cores)) == expected


def test_a_worker_for_every_gpu():
    given = nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0})
    assert workers_of(given, ClusterOptions("auto", gpus=True)) == Workers(3, None)
    with pytest.raises(SessionError, match="the cluster has no GPU"):
        workers_of(nodes({"CPU": 8.0}), ClusterOptions("auto", gpus=True))


@pytest.mark.parametrize(("cpus", "cores"), [((1,), 1), ((2,), 3), ((), 1)])
def test_a_cluster_that_is_too_small(cpus, cores):
    with pytest.raises(SessionError, match="do not fit a cluster"):
        workers_of(nodes(*({"CPU": cpu} for cpu in cpus)), ClusterOptions("auto", cores))


def test_addresses():
    for good in ("local", "auto", "10.0.0.1:6379", "head.example:6379", "ray://head:10001"):
        check_address(good)
    for bad in ("", "head", "head:", "http://head:1", "head:1:2", "a b:1"):
        with pytest.raises(UsageError, match="expected local, auto or HOST:PORT"):
            check_address(bad)


def test_nothing_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(SessionError, match=rf"nothing answers at 127.0.0.1:{port} \(.*ray start --head"):
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(SessionError, match="nothing answers"):
        check_reachable("127.0.0.1:99999")


def opened(threads):
    return lambda lines: [Record(line.number, line.text.upper()) for line in lines]


def refusing(threads):
    raise UsageError("beam 0")


def losing(threads):
    return lambda lines: [Record(line.number, line.text) for line in lines][1:]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "in.txt").write_text("a\nb\nc\n")
    return blocks_of(tmp_path / "in.txt", 2)


def test_a_worker_writes_shards_once(tmp_path, corpus):
    rows = rows_of(tmp_path / "out", corpus, range(len(corpus)))
    worker = BlockWorker(opened, 1)
    assert [worker(row)["lines"] for row in rows] == [2, 1]
    assert missing_blocks(tmp_path / "out", corpus) == []
    assert BlockWorker(refusing, 1)(rows[0])["failure"] == ""  # it is there: nothing is opened for it


def test_a_worker_reports_its_error(tmp_path, corpus):
    (row, _) = rows_of(tmp_path / "out", corpus, range(len(corpus)))
    answer = BlockWorker(refusing, 1)(row)
    assert (answer["failure"], answer["kind"]) == ("beam 0", "UsageError")
    assert "1 lines where 2 were counted: it was changed" in BlockWorker(losing, 1)(row)["failure"]
    Path(corpus[0].path).unlink()
    assert "No such file or directory on " in BlockWorker(opened, 1)(row)["failure"]
    assert missing_blocks(tmp_path / "out", corpus) == [0, 1]


def test_a_job_that_is_done_starts_no_ray(tmp_path, corpus, monkeypatch):
    worker = BlockWorker(opened, 1)
    for row in rows_of(tmp_path / "out", corpus, range(len(corpus))):
        worker(row)
    monkeypatch.setattr(ray_data, "connected", None)
    assert decode_blocks(opened, corpus, tmp_path / "out", ClusterOptions("local")) == 0


def command_over_lines(tmp_path, count):
    """`run` over so many random lines, some of which are too long."""
    bundle = text_bundle(tmp_path / "made")
    rng = random.Random(5)
    texts = ["".join(rng.choice("abcdefghij é") for _ in range(rng.randint(0, 17))) for _ in range(count)]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    return ["run", bundle.root, "--input", tmp_path / "in.txt", "--beam", "4", "--nbest", "2", "--quiet"]


@pytest.mark.slow
def test_three_nodes_of_which_one_is_killed(tmp_path):
    """Every line once, byte by byte what one machine prints, though a node is lost after a third of the shards."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    shards = 2400 // 40
    words = command_over_lines(tmp_path, 2400)
    alone = subprocess.run([sys.executable, "-m", "seq2engine", *map(str, words)], capture_output=True, text=True)
    for attempt in range(3):  # on a busy machine the kill may come when all shards are written: then once more
        out = tmp_path / f"out{attempt}"
        more = ["--out", out, "--keep-order", "--shard", "40", "--cores", "1"]
        script = [sys.executable, ROOT / "tests" / "support" / "ray_nodes.py", out, shards // 3, *words, *more]
        done = subprocess.run(in_own_network(list(map(str, script))), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        if any(shards // 3 <= killed_at < shards for killed_at in result["killed_at"]):
            break
    else:
        pytest.fail("no node was killed in the middle of three jobs")
    assert result["codes"] == [alone.returncode, alone.returncode] == [1, 1]  # some lines are too long
    assert (out / "output.txt").read_text() == alone.stdout
    written = [path.read_text() for path in sorted(out.glob("shards/*/*.jsonl"))]
    numbers = [json.loads(line)["line"] for text in written for line in text.splitlines()]
    assert numbers == list(range(1, 2401))
    message = [line for line in result["message"][0][1].splitlines() if line.startswith("line ")]
    assert message == alone.stderr.splitlines()
    # Ray itself may tell of the lost node before that.
    first, second = (printed.splitlines()[-1] for printed, _ in result["message"])
    assert first == f"{out / 'output.txt'}: 2400 lines, {len(message)} errors"
    assert second == f"{out / 'output.txt'}: 2400 lines, 2400 of them before, {len(message)} errors"


@pytest.mark.slow
def test_a_killed_command_goes_on_when_it_is_given_again(tmp_path):
    """SIGKILL of the command itself in the middle: what is written stays, the rest is decoded, every line once."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    words = command_over_lines(tmp_path, 2400)
    alone = subprocess.run([sys.executable, "-m", "seq2engine", *map(str, words)], capture_output=True, text=True)
    for attempt in range(3):  # on a busy machine the kill may come when all shards are written: then once more
        out = tmp_path / f"out{attempt}"
        more = ["--cluster", "local", "--out", out, "--keep-order", "--shard", "20", "--cores", "1"]
        command = in_own_network([sys.executable, "-m", "seq2engine", *map(str, [*words, *more])])
        kept = killed_after(command, out, 3)
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        *_, said = done.stdout.splitlines()
        before = re.search(r": 2400 lines, (\d+) of them before, ", said)
        if before is not None and int(before.group(1)) < 2400:
            break
    else:
        pytest.fail("no command was killed in the middle of three jobs")
    assert int(before.group(1)) >= 20 * len(kept)
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert (done.returncode, (out / "output.txt").read_text()) == (alone.returncode, alone.stdout)
    assert [line for line in done.stderr.splitlines() if line.startswith("line ")] == alone.stderr.splitlines()


def killed_after(command, out, shards):
    """Starts a command and kills it with SIGKILL once so many shards are there; the shards, and when each was made."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 600
        while len(found := list(out.glob("shards/*/*.jsonl"))) < shards and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # what Ray left, if anything: its processes are of this session
            os.killpg(process.pid, signal.SIGKILL)
    return {path: path.stat().st_mtime_ns for path in found}


def in_own_network(argv):
    """Ray opens some ports on all addresses; a network namespace keeps them to itself, where one may be made."""
    wrapped = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    allowed = shutil.which("unshare") and shutil.which("ip")
    if allowed and subprocess.run([*wrapped, "true"], capture_output=True).returncode == 0:
        return [*wrapped, *argv]
    return argv


@pytest.mark.slow
def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    with (
        pytest.raises((SessionError, RequestError), match="no Ray cluster at auto"),
        ray_data.connected(ClusterOptions("auto")),
    ):
        pass
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
