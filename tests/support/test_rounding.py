"""The bounds hold for every way to compute the same, and still see a mistake in the third decimal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.numerics.teacher_forcing import ForcedRun
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.session import Session
from seq2engine.runtime.torch_session import TorchSession
from support.rounding import LANES, Rounding, rounding_from_config, rounding_from_session, sum_error

SOURCES = [[5, 6, 7], [9], [40, 41, 42, 43, 44, 45], [13, 12]]
TARGETS = np.random.default_rng(0).integers(4, 200, (len(SOURCES), 10))
PLANTED = 1e-3
TINY = PRESETS["tiny"]
CONFIGS = {
    "post": dataclasses.replace(TINY, norm="post", output_bias=True),
    "pre": dataclasses.replace(TINY, norm="pre", positions="rotary", output_bias=True),
    "deep": dataclasses.replace(TINY, encoder_layers=6, decoder_layers=6, norm="pre", output_bias=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model, folder = random_model(CONFIGS[request.param], 3), tmp_path_factory.mktemp(request.param)
    return onnx_from_model(model, folder / "b", precisions=("fp32", "fp16"))


@pytest.fixture
def exact(bundle: Bundle) -> Iterator[Session]:
    with open_session(bundle, "torch", "fp64") as session:
        yield session


def forced_logits(session: Session, sources: list[list[int]] = SOURCES, targets: np.ndarray = TARGETS) -> np.ndarray:
    """[T, B, V] in fp64."""
    run = ForcedRun(session, sources, targets.shape[1])
    return np.stack([run.step(column).astype(np.float64) for column in targets.T])


def log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def furthest(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def assert_fits(found: np.ndarray, expected: np.ndarray, near: Rounding) -> None:
    assert furthest(found, expected) <= near.logit
    assert furthest(log_probs(found), log_probs(expected)) <= near.log_prob
    target_ids = TARGETS.T[..., None]
    totals = [np.take_along_axis(log_probs(logits), target_ids, axis=-1).sum(axis=0) for logits in (found, expected)]
    assert furthest(*totals) <= near.score(len(TARGETS.T))
    length = len(TARGETS.T)
    assert furthest(*(total / length**0.7 for total in totals)) <= near.score(length, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_every_backend_fits(bundle: Bundle, exact: Session, backend: str, threads: int, precision: str) -> None:
    with open_session(bundle, backend, precision, threads=threads) as session:
        near = rounding_from_session(session, SOURCES, TARGETS.shape[1])
        assert_fits(forced_logits(session), forced_logits(exact), near)


def test_other_batches_and_rounded_doubles_fit(bundle: Bundle, exact: Session) -> None:
    expected = forced_logits(exact)
    with open_session(bundle, "torch", threads=1) as session:
        near = rounding_from_session(session, SOURCES, TARGETS.shape[1])
        assert_fits(expected.astype(np.float32).astype(np.float64), expected, near)
        together = forced_logits(session)
        alone = [forced_logits(session, [source], TARGETS[i : i + 1]) for i, source in enumerate(SOURCES)]
        assert_fits(np.concatenate(alone, axis=1), together, near)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_bias_that_is_off_by_a_thousandth_does_not_fit(backend: str, bundle: Bundle) -> None:
    """One token of 256: its logit, and every log-probability and score that it is a part of."""
    token = int(TARGETS[0, 0])
    model = random_model(bundle.config, 3)
    with torch.no_grad():
        model.output.bias[token] += PLANTED
    with open_session(bundle, backend, threads=1) as session, TorchSession(model) as planted:
        near = rounding_from_session(session, SOURCES, TARGETS.shape[1])
        wrong, right = forced_logits(planted), forced_logits(session)
    assert furthest(wrong, right) > near.logit
    assert furthest(log_probs(wrong)[..., token], log_probs(right)[..., token]) > near.log_prob
    assert near.score(1) < PLANTED
    assert near.score(9, 1.0) < PLANTED


def test_a_projection_alone_errs_less(bundle: Bundle) -> None:
    near = rounding_from_config(bundle.config, largest=10.0)
    assert near.of_projection(bundle.config).logit < near.logit / 5
    assert near.of_projection(bundle.config).log_prob < PLANTED / 20


@pytest.mark.parametrize("width", [8, 64, 512, 2048])
def test_sums_in_any_order_fit(width: int) -> None:
    """Each element of a product of random matrices, summed in every order that a kernel may have."""
    rng = np.random.default_rng(width)
    x, w = rng.normal(size=(8, width)).astype(np.float32), rng.normal(size=(width, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    bound = sum_error(width) * np.abs(exact).max()
    terms = x[:, :, None] * w[None]  # [8, width, 256]
    orders = {
        "blas": x @ w,
        "torch": (torch.from_numpy(x) @ torch.from_numpy(w)).numpy(),
        "reversed": x[:, ::-1].copy() @ w[::-1].copy(),
        "pairs": terms.transpose(0, 2, 1).copy().sum(axis=-1),
        "lanes": sum(terms[:, lane::LANES].cumsum(axis=1)[:, -1] for lane in range(LANES)),
        "rounded": exact.astype(np.float32),
    }
    for name, found in orders.items():
        assert np.abs(found - exact).max() <= bound, name
    worst = max(np.abs(found - exact).max() for found in orders.values())
    assert worst > bound / 40, "the bound is of the size of the errors"


def test_it_grows_as_it_should() -> None:
    base = rounding_from_config(TINY, 10.0)
    assert rounding_from_config(TINY, 20.0).logit == pytest.approx(2 * base.logit)
    assert rounding_from_config(TINY, 10.0, "fp16").logit > 50 * base.logit
    assert rounding_from_config(TINY, 10.0, "int4").logit == rounding_from_config(TINY, 10.0, "fp16").logit
    deeper: ModelConfig = dataclasses.replace(TINY, encoder_layers=8, decoder_layers=8)
    assert rounding_from_config(deeper, 10.0).logit == pytest.approx(2 * base.logit, rel=0.02)
    assert base.score(9, 0.5) == pytest.approx(3 * base.log_prob)
    assert dataclasses.replace(base, stretch=1.5).logit == pytest.approx(1.5 * base.logit)
