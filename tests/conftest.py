"""Settings of all tests, and how they run a command."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from support.fast_cases import mark_combinations_as_slow

from seq2engine.cli.main import main
from seq2engine.runtime.ort import graphs as ort_graphs
from seq2engine.runtime.ort import session as ort_session
from seq2engine.runtime.torch_session import TorchSession

# The models are tiny: a second thread costs more than it brings, and very much more on a busy machine. Whether results
# depend on it is another question, which `make test-cpus` asks.
THREADS = int(os.environ.get("SEQ2ENGINE_TEST_THREADS", "1"))
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # the same for the processes that tests start

settings.register_profile("load is no failure", deadline=None)
settings.load_profile("load is no failure")


@pytest.fixture(scope="session", autouse=True)
def _threads_of_sessions():
    """Sessions compute on at least this many threads, also those that a test opens with one.

    And on no more where a test leaves it open: threads that wait in a busy loop take the cores of other tests.
    """
    read, open_graph = TorchSession.from_bundle.__func__, ort_graphs.inference_session

    def from_bundle(cls, bundle, precision, threads=None, **named):
        return read(cls, bundle, precision, threads and max(threads, THREADS), **named)

    def inference_session(path, placement, *rest, **named):
        threads = placement.threads and max(placement.threads, THREADS)
        return open_graph(path, dataclasses.replace(placement, threads=threads), *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort_session, "sensible_threads", lambda config: THREADS)
        if THREADS > 1:
            patch.setattr(TorchSession, "from_bundle", classmethod(from_bundle))
            patch.setattr(ort_graphs, "inference_session", inference_session)
        yield


@pytest.fixture
def without_kernels(monkeypatch):
    """Sessions as where the kernel library is not built: with the forms for ONNX Runtime's own operators."""
    monkeypatch.setattr(ort_session, "library", lambda: None)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_our_own(tmp_path_factory):
    """Builds keep engines in the user's cache; tests must neither find any there nor leave any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Every test, and what it shares with others, begins with the same threads of PyTorch.

    A test may set them for the whole process. With those of an earlier test sums are added up in another order, and
    beside a busy neighbour two threads of a tiny model take ten times as long as one.
    """
    torch.set_num_threads(THREADS)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does
def pytest_collection_modifyitems(items):
    """Combinations beyond each value once are slow; tests that need a GPU are skipped where there is none."""
    mark_combinations_as_slow(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda finds none"))


def pytest_collection_finish():
    """Leaves imported modules out of garbage collection: they stay, and each pass over them takes time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cli(capsys):
    """Runs a command; gives its exit code, its output and its error output."""

    def run(*argv):
        code = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def stdin(monkeypatch, tmp_path_factory):
    """Makes bytes the standard input: a file, since the command reads from its descriptor."""
    path = tmp_path_factory.mktemp("stdin") / "bytes"
    with ExitStack() as opened:

        def feed(data):
            path.write_bytes(data)
            monkeypatch.setattr(sys, "stdin", opened.enter_context(path.open()))

        yield feed
