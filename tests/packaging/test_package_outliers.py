"""Packages of models with masked tokens and outliers: verify.py, like parity, tells right engines from wrong ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.handed_over import forget_scripts, ran, wrong_engine
from support.outliers import OUTLIERS, outlier_bundle
from support.stand_in_engines import BEAMS, put_engines

from seq2engine.errors import SessionError
from seq2engine.packaging.golden_samples import Tallies
from seq2engine.packaging.package import PackageOptions, package_from_bundle


@pytest.fixture(autouse=True)
def scripts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget_scripts()


def changed_bias(change: Callable[[np.ndarray], None]) -> Callable[[onnx.ModelProto], None]:
    def changed(model: onnx.ModelProto) -> None:
        bias = next(w for w in model.graph.initializer if w.name == "output.bias")
        values = numpy_helper.to_array(bias).copy()
        change(values)
        bias.CopyFrom(numpy_helper.from_array(values, bias.name))

    return changed


def add_to_some(biases: np.ndarray) -> None:
    """A quarter more for half of the tokens that no outlier masks."""
    biases[: len(biases) // 6] += np.array(0.25, biases.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_right_engines_pass_and_wrong_ones_fail(
    outlier: str,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = outlier_bundle(outlier, tmp_path / "bundle", (precision,))
    put_engines(bundle, BEAMS, precision, flavour="tensorrt", name="one")
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(precision, threads=1))
    code, printed, errors = ran(out, "verify", monkeypatch, capsys)
    assert (code, errors) == (0, ""), printed
    assert "Infinity" not in (out / "package.json").read_text()
    decodes = ran(out, "run_all", monkeypatch, capsys, "--rounds", 1, "--out", tmp_path / "report")
    assert decodes[0] == 0, decodes[1]
    wrong_engine(out, "decoder_step", changed_bias(add_to_some))
    code, printed, _ = ran(out, "verify", monkeypatch, capsys)
    failed = [line for line in printed.splitlines() if line.startswith("FAIL  decoder_step logits")]
    steps = json.loads((out / "package.json").read_text())["steps"]
    assert (code, len(failed)) == (1, steps), printed


def test_a_logit_that_is_masked_here_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """-inf agrees with -inf and with what is out of reach, and with nothing else."""
    bundle = outlier_bundle("one token -1e+09", tmp_path / "bundle", ("fp32",))
    put_engines(bundle, flavour="tensorrt", name="one")
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(threads=1))

    def mask(token: int) -> None:
        wrong_engine(out, "decoder_step", changed_bias(lambda biases: biases.put(token, -np.inf)))

    mask(-1)
    code, printed, _ = ran(out, "verify", monkeypatch, capsys)
    assert code == 0, printed
    mask(-2)
    code, printed, _ = ran(out, "verify", monkeypatch, capsys)
    assert code == 1
    assert "FAIL  decoder_step logits, step 0" in printed


def test_a_precision_that_pytorch_cannot_hold_is_refused() -> None:
    tallies = Tallies("fp16")
    exact = np.full((2, 3), 1e5)
    with np.errstate(over="ignore"):
        tallies.add("encoder encoder_states", exact, exact.astype(np.float16))
    with pytest.raises(SessionError, match=r"^encoder encoder_states: PyTorch itself is not finite in fp16, "):
        tallies.budgets()
