"""Sessions with fused operators of the kernel library, against the forms for ONNX Runtime's own operators."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
from support.rounding import tensor_error

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.kernels.mapped_weights import FILES
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import StepForm

pytestmark = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
SOURCES = [[5, 6, 7, 8, 9, 2], [5, 2], [9, 8, 7, 2], [6, 6, 6, 6, 6, 6, 6, 6, 2]]
MODELS = {
    "post-norm, sinusoidal, tied": {},
    "pre-norm, rotary": {"norm": "pre", "positions": "rotary"},
    "relative, rms, gated": {"positions": "relative", "max_distance": 4, "norm_kind": "rms", "gated": True},
    "learned, gelu, untied": {"positions": "learned", "activation": "gelu", "tie_output": False},
}
OPTIONS = {
    "greedy without scores": SearchOptions(max_length=12, scores=False),
    "greedy": SearchOptions(max_length=12),
    "four beams, two best": SearchOptions(max_length=12, beam=4, nbest=2),
    "beams, rules that read all logits": SearchOptions(max_length=12, beam=3, no_repeat_ngram=2, min_length=4),
    "a forced first token with its score": SearchOptions(max_length=12, beam=2, forced_bos=7),
    "a shortlist": SearchOptions(max_length=12, beam=2, shortlist=(2, 5, 7, 11, 13)),
    "sampling": SearchOptions(max_length=12, sample=True, top_k=5, seed=3),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    found = {}
    for number, (name, changed) in enumerate(MODELS.items()):
        model = random_model(dataclasses.replace(PRESETS["tiny"], **changed), seed=number)
        found[name] = onnx_from_model(model, folder / str(number), precisions=("fp32", "w8a8"))
    return found


def session_of(bundle, kernels: bool, precision: str = "fp32", **settings) -> OrtSession:
    return OrtSession(model_from_bundle(bundle, precision), OrtSettings(threads=1, kernels=kernels, **settings))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_same_with_kernels_and_without(bundles, name):
    with session_of(bundles[name], True) as fused, session_of(bundles[name], False) as plain:
        assert fused.form.kernels
        assert not plain.form.kernels
        for case, options in OPTIONS.items():
            found, wanted = (generate(session, SOURCES, options) for session in (fused, plain))
            assert [[one.tokens for one in source] for source in found] == [
                [one.tokens for one in source] for source in wanted
            ], case


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_step_are_those_of_the_step_that_ranks_them(bundles, name, precision):
    """Candidates come without logits; where these are read all the same, the step is computed again with them."""
    with session_of(bundles[name], True, precision) as session:
        given = np.array([[1, 3]]), np.array([0]), np.array([0]), np.eye(2, 8, dtype=bool)[None]
        if session.config.relative:
            given = (*given, np.zeros((1, 8), dtype=np.int64))
        outputs = []
        for form in (StepForm(), StepForm(best=3), StepForm(candidates=3)):
            state = session.encode(np.array([[5, 6, 7]]), np.ones((1, 3), dtype=bool))
            session.reserve(state, 8, form)
            outputs.append(session.step(state, *given))
        whole, scored, unscored = outputs
        tokens = np.argsort(-whole.logits, axis=-1, kind="stable")[..., :3]
        for output in (scored, unscored):
            assert np.array_equal(output.candidates.tokens, tokens)
            assert np.array_equal(output.candidates.logits, np.take_along_axis(whole.logits, tokens, axis=-1))
            assert np.array_equal(output.logits, whole.logits)
        assert np.array_equal(scored.normaliser, whole.normaliser)
        sums = np.log(np.exp(whole.logits.astype(np.float64)).sum(axis=-1))
        assert np.abs(whole.normaliser - sums).max() <= tensor_error(session.config, whole.logits)


def test_attention_weights_are_those_of_primitive_attention(bundles):
    bundle = bundles["post-norm, sinusoidal, tied"]
    found = []
    for kernels in (True, False):
        with session_of(bundle, kernels, attention=True) as session:
            found.append(generate(session, SOURCES, SearchOptions(max_length=8, beam=2, alignments=True)))
    for one, other in zip(*found, strict=True):
        assert one[0].tokens == other[0].tokens
        assert one[0].alignments == other[0].alignments


def test_sessions_of_a_bundle_map_its_weights_once(bundles):
    bundle = bundles["post-norm, sinusoidal, tied"]

    def mapped() -> dict[str, int]:
        gc.collect()
        return {key[0]: file.bytes.ctypes.data for key, file in FILES.items() if key[0].startswith(str(bundle.root))}

    with session_of(bundle, True) as one:
        generate(one, SOURCES, OPTIONS["greedy"])
        alone = mapped()
        assert alone
        with session_of(bundle, True) as other:
            generate(other, SOURCES, OPTIONS["greedy"])
            assert mapped() == alone


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not list the pages of mappings")
def test_weights_are_read_and_not_mapped_beside_their_packed_form(bundles):
    """How many pages a mapping takes depends on how the file came into the page cache: up to 2 MB for every row."""
    bundle = bundles["post-norm, sinusoidal, tied"]
    with session_of(bundle, True) as session:
        generate(session, SOURCES, OPTIONS["greedy"])
        starts = {f"{file.bytes.ctypes.data:x}-" for key, file in FILES.items() if key[0].startswith(str(bundle.root))}
        lines = Path("/proc/self/smaps").read_text().splitlines()
        places = [place for place, line in enumerate(lines) if line.startswith(tuple(starts))]
        resident = [next(line for line in lines[place:] if line.startswith("Rss:")) for place in places]
    assert len(resident) == len(starts) > 0
    assert all(line.split()[1] == "0" for line in resident)


def test_deterministic_sessions_keep_to_the_operators_that_are_known_to_be(bundles):
    with session_of(bundles["post-norm, sinusoidal, tied"], True, deterministic=True) as session:
        assert not session.form.kernels
