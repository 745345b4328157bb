"""What a large batch needed goes back with the next one; lanes share what they can; arrays are as numpy's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import PRESETS
from seq2engine.runtime.ort_memory import OWN_PAGES, zeros
from seq2engine.runtime.session import open_session

VOCAB, SOURCES, BEAM = 40_000, 64, 4
WIDE = dataclasses.replace(
    PRESETS["tiny"],
    encoder_layers=1,
    decoder_layers=1,
    d_model=16,
    heads=2,
    d_ff=16,
    source_vocab=64,
    target_vocab=VOCAB,
    share_embeddings=False,
)
DECODES = """
import sys
from seq2engine.benchmarks.fixed_decode import fixed_decode
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search import SearchOptions
from seq2engine.runtime.session import open_session

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon:")).split()[1]) * 1024

beam, sources = int(sys.argv[2]), int(sys.argv[3])
options = SearchOptions(max_length=4, beam=beam)
with open_session(sys.argv[1], threads=2) as session:
    assert len(session.lanes(sources, sources * beam)) == 2
    decode = {"lanes": generate, "alone": fixed_decode}[sys.argv[4]]
    held = []
    for count in (1, sources, 1):
        decode(session, [[5, 6, 7]] * count, options)
        held.append(resident())
print(held[2] - held[0])
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(WIDE, seed=0), tmp_path_factory.mktemp("memory") / "bundle")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")
@pytest.mark.parametrize("how", ["lanes", "alone"])
def test_what_a_large_batch_needed_goes_back_with_the_next(bundle, how):
    command = [sys.executable, "-c", DECODES, str(bundle.root), str(BEAM), str(SOURCES), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    logits = SOURCES * BEAM * VOCAB * 4
    assert int(done.stdout) < logits / 2, "a step has several tensors of the size of its logits"


def test_lanes_have_a_decoder_of_their_own_and_nothing_else(bundle):
    with open_session(bundle, threads=2) as session:
        lane = session.lanes(SOURCES, SOURCES * BEAM)[0]
        assert lane.sessions["encoder"] is session.sessions["encoder"]
        assert lane.sessions["decoder_step"] is not session.sessions["decoder_step"]


@pytest.mark.parametrize("size", [3, OWN_PAGES])
def test_zeros_are_as_those_of_numpy(size):
    array = zeros((2, size), "int64")
    assert array.shape == (2, size)
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    assert not array.any()
    array[1, -1] = 7
    assert array.sum() == 7
