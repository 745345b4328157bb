"""Torch and ONNX Runtime behind one protocol: same tokens for every scheme, cache form, beam and batch."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import BundleError, ConfigError, RequestError, SessionError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import decode, generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.options import SearchOptions

SCHEMES = [(p, n) for p in ("sinusoidal", "learned", "rotary") for n in ("post", "pre")]
SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)


def sources_of(count, seed, config=SMALL):
    rng = np.random.default_rng(seed)
    lengths = [1, config.max_source, *rng.integers(1, config.max_source + 1, count)][:count]
    return [rng.integers(3, config.source_vocab, length).tolist() for length in lengths]


def tokens_of(results):
    return [[found.tokens for found in nbest] for nbest in results]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("bundles") / "small", ("fp32", "fp16"))


@pytest.mark.each_value
@pytest.mark.parametrize(("positions", "norm"), SCHEMES)
@pytest.mark.parametrize("form", ["static", "growing"])
def test_tokens_equal_torch_for_every_scheme_and_cache(tmp_path, positions, norm, form):
    config = dataclasses.replace(SMALL, positions=positions, norm=norm)
    bundle = onnx_from_model(random_model(config, 5), tmp_path / "b", ("fp32",), cache_form=form)
    sources = sources_of(12, 3)
    with open_session(bundle, "torch") as reference, open_session(bundle, "onnxruntime", threads=1) as session:
        for beam in (1, 2, 5):
            options = SearchOptions(max_length=config.max_target, beam=beam, nbest=beam)
            assert tokens_of(generate(session, sources, options)) == tokens_of(generate(reference, sources, options))


@pytest.mark.parametrize("asked", [1, 3, None])
def test_threads_of_a_torch_session_are_its_own(bundle, monkeypatch, asked):
    """PyTorch has one number for the whole process: a session sets it while it computes, and leaves it as it was."""
    torch.set_num_threads(2)
    used = []
    with open_session(bundle, "torch", threads=asked) as session:
        assert torch.get_num_threads() == 2
        for name in ("encode", "decode_step"):
            compute = getattr(session.model, name)
            monkeypatch.setattr(
                session.model, name, lambda *given, of=compute: (used.append(torch.get_num_threads()), of(*given))[1]
            )
        generate(session, sources_of(2, 3), SearchOptions(max_length=3, beam=2))
        assert torch.get_num_threads() == 2
        with pytest.raises(IndexError):  # a call that fails gives them back, too
            session.encode(np.array([[SMALL.source_vocab]]), np.ones((1, 1), dtype=bool))
    assert torch.get_num_threads() == 2
    assert (session.threads or 0) >= (asked or 0)  # more where all tests are run with more
    assert set(used) == {session.threads or 2}


def test_cache_forms_agree(tmp_path, bundle):
    growing = onnx_from_model(random_model(SMALL, 1), tmp_path / "growing", ("fp32",), cache_form="growing")
    options = SearchOptions(max_length=24, beam=4)
    with open_session(bundle) as static, open_session(growing) as other:
        assert tokens_of(generate(static, sources_of(9, 1), options)) == tokens_of(
            generate(other, sources_of(9, 1), options)
        )


def test_fp16_graphs_decode_in_range(bundle):
    with open_session(bundle, precision="fp16") as session:
        results = generate(session, sources_of(6, 2), SearchOptions(max_length=24, beam=3))
    assert all(0 <= token < SMALL.target_vocab for nbest in results for token in nbest[0].tokens)
    assert all(np.isfinite(nbest[0].score) for nbest in results)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), beam=st.sampled_from([1, 3]), count=st.integers(2, 9))
def test_decodes_are_batch_invariant(bundle, seed, beam, count):
    sources = sources_of(count, seed)
    options = SearchOptions(max_length=16, beam=beam)
    with open_session(bundle, threads=1) as session:
        together = tokens_of(generate(session, sources, options))
        backwards = tokens_of(generate(session, sources[::-1], options))[::-1]
        alone = [tokens_of(generate(session, [source], options))[0] for source in sources]
    assert together == alone == backwards


def test_the_static_cache_is_written_in_place(bundle):
    """The step's cache output is bound to the memory of its input: no copy, the same array before and after."""
    with open_session(bundle) as session:
        assert isinstance(session, OrtSession)
        state = session.encode(*padded(sources_of(2, 1), SMALL.pad_id))
        session.reserve(state, 4)
        cache = state["self_k.0"]
        mask = np.zeros((2, 1, 4), dtype=bool)
        mask[..., 1] = True
        session.step(state, np.full((2, 1), 5), np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64), mask)
        assert state["self_k.0"] is cache
        assert np.abs(cache[:, :, 1]).min() > 0
        assert not cache[:, :, [0, 2, 3]].any()


def test_steps_stream_as_they_are_made(bundle):
    with open_session(bundle) as session:
        emitted = list(decode(session, sources_of(3, 1), SearchOptions(max_length=5)))
    assert [e.step for e in emitted] == list(range(len(emitted)))
    assert len(emitted) <= 5


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([], {}, "batch is empty"),
        ([[]], {}, "source 0 is empty"),
        ([[3] * 21], {}, "source 0 has 21 tokens, at most 20"),
        ([[3], [40]], {}, "source 1 has token 40, the vocabulary has 40"),
        ([[-1]], {}, "source 0 has token -1"),
        ([[3]], {"max_length": 25}, "max length 25, at most 24"),
        ([[], [3] * 21, [99]], {}, "source 0 is empty; source 1 has 21 tokens, at most 20; source 2 has token 99"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(bundle, sources, options, message):
    with open_session(bundle) as session, pytest.raises(RequestError, match=message):
        generate(session, sources, SearchOptions(**{"max_length": 8, **options}))


def test_bad_options_are_listed_together():
    with pytest.raises(ConfigError, match=r"max length 0.*beam 0.*nbest 3.*early stopping 'often'"):
        SearchOptions(max_length=0, beam=0, nbest=3, early_stopping="often")


def test_what_cannot_be_opened_is_reported_with_the_reason(bundle):
    with pytest.raises(SessionError, match="unknown backend 'onnx', expected one of torch, onnxruntime, tensorrt"):
        open_session(bundle, "onnx")
    with pytest.raises(SessionError, match="ONNX Runtime has no bf16 products on the CPU; run fp16 or fp32 here"):
        open_session(bundle, precision="bf16")
    with pytest.raises(BundleError, match=r"holds no int8 graphs, only fp32, fp16; .* export --add int8 "):
        open_session(bundle, precision="int8")
    with pytest.raises(BundleError, match="holds no int8 graphs"):  # whose rounded weights PyTorch would take
        open_session(bundle, "torch", "int8")
    with open_session(bundle, "torch", "bf16") as session:  # rounds the reference by itself
        assert session.precision == "bf16"


@pytest.mark.parametrize("precision", ["int3", "fp61", "", "FP16", "fp64:int3"])
def test_an_unknown_precision_is_refused_with_the_known_ones(bundle, precision):
    """And not with a command that would refuse it once more."""
    with pytest.raises(ConfigError, match=f"unknown precision '{precision}', expected one of fp32, fp16, bf16, int8"):
        open_session(bundle, precision=precision)
    with pytest.raises(ConfigError, match=f"unknown precision '{precision}', expected one of fp32, fp16, bf16, int8"):
        open_session(bundle, "tensorrt", precision=precision)
    with pytest.raises(SessionError, match=r"PyTorch (runs fp64, fp32, fp16, bf16, int8|takes the weights of int8)"):
        open_session(bundle, "torch", precision)


@pytest.mark.parametrize("name", ["encoder", "decoder_step"])
def test_a_graph_onnx_runtime_cannot_load_is_one_line(tmp_path, bundle, name):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x07garbage")
    model = model_from_bundle(bundle, "fp32")
    with pytest.raises(SessionError, match=r"broken.onnx cannot be used as a graph \(it is not an ONNX file\); export"):
        OrtSession(dataclasses.replace(model, graphs={**model.graphs, name: broken}))


def test_an_encoder_leaves_the_cores_to_the_decoder(tmp_path):
    """Its threads sleep when it is done; a busy loop of theirs would show in this process's own time."""
    wide = dataclasses.replace(SMALL, d_model=256, d_ff=512, heads=4, max_source=200)  # work enough for two threads
    wide_bundle = onnx_from_model(random_model(wide, 1), tmp_path / "wide", ("fp32",))
    ids, mask = padded(sources_of(8, 3, wide), wide.pad_id)
    with open_session(wide_bundle, threads=2) as session:
        spent = []
        for _ in range(5):
            session.encode(ids, mask)
            started = time.process_time()
            time.sleep(0.03)
            spent.append(time.process_time() - started)
    assert min(spent) < 0.01


def test_a_compaction_in_place_leaves_the_step_bound_and_another_does_not(tmp_path):
    """A binding references its arrays: one that stayed too long would write to memory that is no longer read."""
    bundle = onnx_from_model(random_model(SMALL), tmp_path / "small", ("fp32",))
    with open_session(bundle, "onnxruntime", threads=1) as session:
        state = session.encode(*padded(sources_of(2, 0), SMALL.pad_id))
        session.reserve(state, 8)
        tokens, place = np.full((2, 1), 5), np.zeros(2, dtype=np.int64)
        mask = np.zeros((2, 1, 8), dtype=bool)
        mask[..., 0] = True
        session.step(state, tokens, place, place, mask)
        bound, cache = state.bound, state["self_k.0"]
        assert cache[:, :, 0].any()
        assert not cache[:, :, 1:].any()
        session.select(state, None, np.tile(np.arange(8), (2, 1)))
        assert state.bound is bound
        assert state["self_k.0"] is cache
        session.select(state, None, np.zeros((2, 16), dtype=np.int64))
        assert state.bound.binding is None, "it let go of the cache"
        session.step(state, tokens, place + 1, place + 1, np.pad(mask, ((0, 0), (0, 0), (0, 8))))
        assert (state["self_k.0"][:, :, 1] != state["self_k.0"][:, :, 0]).any()
        session.select(state, np.array([1]), None)
        assert state.bound is None


def test_a_closed_session_is_an_error(bundle):
    ids, mask = padded(sources_of(2, 1), SMALL.pad_id)
    session = open_session(bundle, threads=1)
    state = session.encode(ids, mask)
    session.close()
    with pytest.raises(SessionError, match="this session is closed; open it again with: open_session"):
        session.encode(ids, mask)
    with pytest.raises(SessionError, match="this session is closed"):
        session.reserve(state, 4)
