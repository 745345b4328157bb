"""The page of a training: every epoch in it, axes with round numbers."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from support.rounding import FP64

from seq2engine.model.config import ModelConfig
from seq2engine.model.training.delivered import Delivered, Sample
from seq2engine.model.training.loop import TrainOptions
from seq2engine.model.training.report import smoothed, ticks, training_html

HISTORY = [
    {"step": 50, "epoch": 0, "seconds": 30.0, "loss": 4.0, "rate": 0.001},
    {"step": 70, "epoch": 0, "seconds": 42.0, "dev_loss": 2.0, "exact_match": 0.25},
    {"step": 100, "epoch": 1, "seconds": 60.0, "loss": 3.0, "rate": 0.0005},
    {"step": 140, "epoch": 1, "seconds": 84.0, "dev_loss": 1.5, "exact_match": 0.125},
]

DELIVERED = Delivered(1.25, 0.5, (Sample("12 <a>", "x", "x"), Sample("b", "y", "z")))


def test_every_epoch_is_in_it():
    page = training_html(HISTORY, "a<b", ModelConfig(), TrainOptions(average=3), DELIVERED, [("date", "today")])
    assert "Training of a&lt;b" in page
    assert "best epoch 1 with 25.0%" in page
    assert "average of the last 2 epochs, 50.0%" in page
    assert "The checkpoint (mean of the last 2 epochs): dev loss 1.250, exact match 50.0%. Last epoch alone: " in page
    assert "<dt>date</dt><dd>today</dd>" in page
    assert re.findall(r"<td class=number[^>]*>(\d\.\d{4})</td>", page) == ["2.0000", "1.5000"]
    assert page.count("<svg") == 3  # loss, exact match, learning rate
    assert page.count("<polyline") == 5


def test_one_short_epoch_has_no_training_curve():
    page = training_html(HISTORY[1:2], "x", ModelConfig(), TrainOptions(), DELIVERED)
    assert page.count("<polyline") == 3


def test_decodes_of_the_delivered_weights_are_shown_as_text():
    page = training_html(HISTORY, "x", ModelConfig(), TrainOptions(), DELIVERED)
    cells = re.findall(r"<td[^>]*><span[^>]*>(.*?)</span></td>", page)
    assert cells[:3] == ["12 &lt;a&gt;", "x", "x"]
    assert re.findall(r'class="badge \w+">(\w+)<', page) == ["right", "wrong"]


def test_smoothing_starts_at_the_first_point_and_follows():
    assert smoothed([(0, 1.0), (1, 2.0)], share=0.5) == [(0, 1.0), (1, 1.5)]


@given(st.floats(0, 1e3), st.floats(1e-3, 1e4))
def test_ticks_are_few_and_reach_over_the_values(low, span):
    marks = ticks(low, low + span)
    assert 2 <= len(marks) <= 9
    near = 0.5e-10 + 4 * FP64 * (low + span)  # marks are rounded to ten decimals
    assert marks[0] <= low + near
    assert marks[-1] >= low + span - near
