"""The shipped checkpoint is as its card describes it: small, whole, licensed, and able."""

from __future__ import annotations

import re

import pytest

from seq2engine.errors import RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.shipped import TEST_SPLIT, shipped_checkpoint
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.quality.metrics import quality_of_session, references_from_file
from seq2engine.runtime.translator import load

FOLDER = shipped_checkpoint("g2p")
CARD = (FOLDER / "README.md").read_text()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("g2p") / "bundle"
    return onnx_from_model(load_checkpoint(FOLDER), folder, ("fp32", "fp16"), companions=FOLDER)


def test_it_is_small_and_has_its_licence():
    assert (FOLDER / "model.safetensors").stat().st_size < 30e6
    assert "Carnegie Mellon University" in (FOLDER / "LICENSE.cmudict").read_text()
    assert 2e6 < sum(parameter.numel() for parameter in load_checkpoint(FOLDER).parameters()) < 6e6


def test_the_test_split_is_the_documented_one():
    words = list(references_from_file(FOLDER / TEST_SPLIT))
    assert words == sorted(words)
    assert len(words) == 6303


def test_it_outputs_words(bundle):
    with load(bundle, threads=1) as model:
        outputs = model.translate(["transformer", "Knight", ""])
    assert outputs == ["T R AE0 N S F AO1 R M ER0", "N AY1 T", ""]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_its_error_rates_match_the_card(bundle, precision):
    """On 300 words of the split; the card's figures are of all 6303, so there is room for a sample's chance."""
    references = references_from_file(FOLDER / TEST_SPLIT, 300)
    with open_session(bundle, precision=precision, threads=1) as session:
        quality = quality_of_session(session, bundle.tokenizer(), references, beam=1)
    (row,) = re.findall(r"^\| greedy \|(.*)\|$", CARD, flags=re.MULTILINE)
    per, wer, plain_per, plain_wer = (float(cell.strip().rstrip("%")) / 100 for cell in row.split("|"))
    assert quality.unmarked is not None
    for counted, stated, room in (
        (quality.marked.tokens, per, 0.02),
        (quality.marked.lines, wer, 0.07),
        (quality.unmarked.tokens, plain_per, 0.02),
        (quality.unmarked.lines, plain_wer, 0.07),
    ):
        assert abs(counted - stated) < room


def test_no_other_is_shipped():
    with pytest.raises(RequestError, match="no shipped checkpoint 'g2q', expected one of g2p"):
        shipped_checkpoint("g2q")
