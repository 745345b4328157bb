"""Bundles and engines that several tests of the export share, and how a graph is run and compared with PyTorch."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.builds import build_engines

from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.engines.to_engine import name_of
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.layers import append_slots, write_slots
from seq2engine.model.presets import PRESETS

CONFIGS = {
    "tiny": PRESETS["tiny"],
    # The width of the base model, whose kernels TensorRT chooses by; layers and vocabulary only cost time.
    "base": ModelConfig(
        encoder_layers=2, decoder_layers=2, source_vocab=1000, target_vocab=1000, max_source=64, max_target=64
    ),
}
STORES = {"static": write_slots, "growing": append_slots}
EPSILON = {"fp32": np.finfo(np.float32).eps, "fp16": np.finfo(np.float16).eps}
TORCH_TYPE = {"fp32": torch.float32, "fp16": torch.float16}
# Another order of the same sums errs differently, and a few numbers may be right by luck: the worst seen in a thousand
# comparisons was 8 times the reference's own error, and a weight that is off by a thousandth is hundreds of times that.
FACTOR = 16


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    """(model name, cache form) -> a bundle in fp32 and fp16. Shared: not to be written to."""

    @cache
    def export(name, cache_form, precisions):
        folder = tmp_path_factory.mktemp("bundles") / f"{name}-{cache_form}"
        return onnx_from_model(random_model(CONFIGS[name]), folder, precisions, cache_form)

    return lambda name="tiny", cache_form="static", precisions=("fp32", "fp16"): export(name, cache_form, precisions)


@pytest.fixture
def own_bundle(bundles, tmp_path):
    """A copy of the tiny bundle to damage or to build into."""
    return open_bundle(shutil.copytree(bundles("tiny").root, tmp_path / "bundle", ignore=lambda *_: ["engines"]))


@pytest.fixture(scope="session")
def feeds_for():
    """(spec, sizes, seed) -> inputs of a graph by name: sources padded at the end, every beam seeing its own slot.

    New slots stand at the step's position, all others anywhere.
    """

    def feeds(spec, sizes, seed=0, vocab=256, positions=64):
        rng = np.random.default_rng(seed)
        slots = sizes.get("L", 0)
        limits = {"source_ids": vocab, "tokens": vocab, "position": positions}
        made = {}
        for tensor in spec.inputs:
            shape = tensor.shape(sizes)
            if tensor.name == "write_index":
                made[tensor.name] = rng.integers(0, slots - sizes["K"] + 1, shape)
            elif tensor.name == "slot_position":
                start = made["write_index"][:, None] if "write_index" in made else np.full((sizes["B"], 1), slots)
                made[tensor.name] = rng.integers(0, positions, shape)
                new = start + np.arange(sizes["K"])  # [B, K]
                np.put_along_axis(made[tensor.name], new, made["position"][:, None], axis=1)
            elif tensor.dtype == "int64":
                made[tensor.name] = rng.integers(0, limits[tensor.name], shape)
            elif tensor.name == "source_mask":
                made[tensor.name] = np.arange(sizes["S"]) < rng.integers(1, sizes["S"] + 1, (sizes["B"], 1))
            elif tensor.name == "self_mask":
                start = made["write_index"][:, None] if "write_index" in made else slots
                own = np.arange(shape[-1]) == (start + np.arange(sizes["K"]))[..., None]  # [B or none, K, slots]
                made[tensor.name] = (rng.random(shape) < 0.5) | own
            else:
                made[tensor.name] = rng.normal(size=shape).astype(tensor.dtype)
        return made

    return feeds


@pytest.fixture(scope="session")
def open_onnx():
    """A model or the path of one -> a function from feeds to outputs by name, in ONNX Runtime."""

    def opened(model):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # as our sessions have it
        source = os.fspath(model) if isinstance(model, str | Path) else model.SerializeToString()
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))

    return opened


@pytest.fixture(scope="session")
def run_onnx(open_onnx):
    """(model or path, feeds) -> outputs by name, in ONNX Runtime."""
    return lambda model, feeds: open_onnx(model)(feeds)


@pytest.fixture(scope="session")
def run_torch():
    """(model, spec, feeds, cache form, dtype) -> what the reference model computes, by the contract's names."""

    copies = WeakKeyDictionary()  # of a model, by dtype: copying costs more than running

    def run(model, spec, feeds, cache_form="static", dtype=torch.float32):
        by_dtype = copies.setdefault(model, {})
        if dtype not in by_dtype:
            by_dtype[dtype] = copy.deepcopy(model).to(dtype)
        model = by_dtype[dtype]
        given = {name: torch.tensor(array) for name, array in feeds.items()}  # copies: the cache is written in place
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()}
        layers = range(model.config.decoder_layers)
        with torch.no_grad():
            if spec.name == "encoder":
                states, cross = model.encode(given["source_ids"], given["source_mask"])
                result = [*(tensor for pair in cross for tensor in pair), states]
            else:
                logits, updated = model.decode_step(
                    given["tokens"],
                    given["position"],
                    given.get("write_index"),
                    given["self_mask"],
                    given["source_mask"],
                    [(given[f"cross_k.{i}"], given[f"cross_v.{i}"]) for i in layers],
                    [(given[f"self_k.{i}"], given[f"self_v.{i}"]) for i in layers],
                    STORES[cache_form],
                    given.get("slot_position"),
                )
                result = [logits, *(tensor for pair in updated for tensor in pair)]
        return {tensor.name: value.numpy() for tensor, value in zip(spec.outputs, result, strict=True)}

    return run


@pytest.fixture(scope="session")
def check_close(run_torch):
    """Holds outputs to the error PyTorch itself makes at that precision against fp64; there is no guessed tolerance."""

    def check(have, model, spec, feeds, cache_form="static", precision="fp32"):
        exact = run_torch(model, spec, feeds, cache_form, torch.float64)
        reference = run_torch(model, spec, feeds, cache_form, TORCH_TYPE[precision])
        assert list(have) == [tensor.name for tensor in spec.outputs]
        for tensor in spec.outputs:
            name = tensor.name
            assert have[name].dtype == tensor.dtype
            assert have[name].shape == exact[name].shape
            one_ulp = EPSILON[precision] * np.abs(exact[name]).max(initial=0)
            budget = FACTOR * max(np.abs(reference[name] - exact[name]).max(initial=0), one_ulp)
            error = np.abs(have[name] - exact[name]).max(initial=0)
            assert error <= budget, f"{name} errs by {error:.3g}, PyTorch in {precision} by {budget / FACTOR:.3g}"

    return check


@pytest.fixture
def copy_of():
    """A graph that may be changed."""

    def duplicate(model):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        return made

    return duplicate


# --- engines ----------------------------------------------------------------------------------------------------------

ONE_BEAM, FOUR_BEAMS, ANY_BEAMS = Range(1, 1, 1), Range(4, 4, 4), Range(1, 2, 4)


def ranges_with(beam):
    return ShapeRanges(batch=Range(1, 2, 4), beam=beam, source=Range(1, 8, 32), target=Range(1, 8, 32))


@pytest.fixture(scope="session")
def ranges():
    """Small ranges with one beam."""
    return ranges_with(ONE_BEAM)


@dataclass(frozen=True)
class Built:
    passport: Passport
    folder: Path

    def bytes_of(self, graph):
        return (self.folder / self.passport.engines[graph].file).read_bytes()


@pytest.fixture(scope="session")
def built(bundles, tmp_path_factory):
    """(model name, cache form, precision, beams) -> real engines for sm86 (fp8: sm89).

    Each is built once for all workers: they share an engine cache, in which an encoder serves any number of beams too.
    """
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "engines of all workers"
    beam_ranges = {1: ONE_BEAM, 4: FOUR_BEAMS, "any": ANY_BEAMS}

    @cache
    def build(name, cache_form, precision, beams):
        quantised = precision not in ("fp32", "fp16")
        bundle = bundles(name, cache_form, (precision,)) if quantised else bundles(name, cache_form)
        targets = ["sm89" if precision == "fp8" else "sm86"]
        passport = build_engines(
            bundle,
            targets,
            ranges_with(beam_ranges[beams]),
            precision,
            flavour="tensorrt_rtx",
            cache=shared,
        )
        return Built(passport, bundle.root / "engines" / name_of(passport))

    def get(name="tiny", cache_form="static", precision="fp16", beams=1):
        return build(name, cache_form, precision, beams)

    return get
