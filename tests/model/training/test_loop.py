"""Training: it learns, it is the same for a seed, and a kill at any moment costs nothing but the running step."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import FP32, apart, rounding_from_config

from seq2engine.errors import ConfigError, RequestError
from seq2engine.model.config import ModelConfig
from seq2engine.model.pairs import read_pairs
from seq2engine.model.tokenizers.symbols import END, PAD, START
from seq2engine.model.training.data import batch_from_pairs, batch_order
from seq2engine.model.training.loop import TrainOptions, greedy_ids, initial_model, loss_of, train_model
from seq2engine.model.training.state import FlatParameters

VOCAB = 9
CONFIG = ModelConfig(
    encoder_layers=1,
    decoder_layers=1,
    heads=2,
    d_model=32,
    d_ff=64,
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    norm="pre",
    positions="learned",
    max_source=8,
    max_target=8,
    dropout=0.1,
)


def copy_pairs(count, seed=0):
    """A task that is learnt fast: copy the source."""
    rng = random.Random(seed)
    words = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(count)]
    return [([*word, END], [*word, END]) for word in words]


def train(folder, epochs=3, seed=0, config=CONFIG, **options):
    model = initial_model(config, seed)
    pairs = copy_pairs(300)
    settings = TrainOptions(**{"epochs": epochs, "batch_tokens": 300, "warmup": 60, "average": 2, **options})
    history = train_model(model, pairs, copy_pairs(40, seed=1), folder, settings)
    return model, history


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    # Twice as long as most seeds need to pass, as another CPU or number of threads rounds otherwise.
    return train(tmp_path_factory.mktemp("train") / "a", epochs=50, label_smoothing=0.0)


@pytest.mark.slow
def test_it_learns(trained):
    _, history = trained
    epochs = [entry for entry in history if "dev_loss" in entry]
    assert epochs[-1]["dev_loss"] < 0.3 * epochs[0]["dev_loss"]
    assert epochs[-1]["exact_match"] > 0.8


@pytest.mark.slow
def test_the_trained_model_outputs_it(trained):
    model, _ = trained
    pairs = copy_pairs(20, seed=2)
    batch = batch_from_pairs(pairs)
    with torch.inference_mode():
        decoded = greedy_ids(model, batch.source, batch.source_mask, 8)
    assert sum(ids == target for ids, (_, target) in zip(decoded, pairs, strict=True)) >= 16


def test_relative_positions_are_learnt(tmp_path):
    config = dataclasses.replace(CONFIG, positions="relative", max_distance=4)
    before = initial_model(config, 0)
    model, history = train(tmp_path / "a", epochs=6, config=config)
    epochs = [entry for entry in history if "dev_loss" in entry]
    assert epochs[-1]["dev_loss"] < 0.8 * epochs[0]["dev_loss"]
    for name in ("encoder_distances", "decoder_distances"):
        for own, other in zip(getattr(model, name).parameters(), getattr(before, name).parameters(), strict=True):
            assert own.shape == other.shape
            assert not torch.equal(own, other)


def test_same_seed_same_model(tmp_path):
    first, second = (weights_of(train(tmp_path / name)[0]) for name in "ab")
    assert torch.equal(first, second)
    assert not torch.equal(first, weights_of(train(tmp_path / "c", seed=1)[0]))


def test_the_result_is_the_average_of_the_last_epochs(tmp_path):
    from safetensors.torch import load_file

    model, _ = train(tmp_path / "a")
    kept = sorted((tmp_path / "a" / "epochs").iterdir())
    assert [path.name for path in kept] == ["0001.safetensors", "0002.safetensors"]
    mean = torch.stack([load_file(path)["weights"] for path in kept]).mean(dim=0)
    assert torch.equal(weights_of(model), mean)


@pytest.mark.slow
def test_a_kill_costs_nothing(tmp_path):
    """SIGKILL in the middle, three times over, then on to the end: the very weights of an undisturbed run."""
    code = (
        f"import sys; sys.path[:0] = {[os.path.dirname(__file__)]!r}\n"
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from test_loop import train\n"
        f"train(Path({str(tmp_path / 'killed')!r}), epochs=4)"
    )
    cursor = tmp_path / "killed" / "cursor.json"
    seen = b""
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 600
        moves = 0
        while moves < 3 and process.poll() is None and time.monotonic() < deadline:  # let it make a few steps
            now = cursor.read_bytes() if cursor.exists() else b""
            moves += now != seen
            seen = now
        process.send_signal(signal.SIGKILL)
        process.wait()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are added up in another order by more threads
    try:
        resumed, history = train(tmp_path / "killed", epochs=4)
        undisturbed, expected = train(tmp_path / "whole", epochs=4)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(weights_of(resumed), weights_of(undisturbed))
    assert [e["dev_loss"] for e in history if "dev_loss" in e] == [e["dev_loss"] for e in expected if "dev_loss" in e]


def test_other_options_do_not_resume(tmp_path):
    train(tmp_path / "a", epochs=1)
    with pytest.raises(RequestError, match="begun with other data or options"):
        train(tmp_path / "a", epochs=1, warmup=61)


def test_a_time_limit_ends_it_with_what_was_learnt(tmp_path):
    model, history = train(tmp_path / "a", epochs=1000, minutes=0.01)
    assert [e for e in history if "dev_loss" in e]
    assert not model.training


def test_bad_options_are_listed_together():
    with pytest.raises(ConfigError, match=r"epochs 0.*warmup -1.*label smoothing 1.0"):
        TrainOptions(epochs=0, warmup=-1, label_smoothing=1.0)


def test_padding_has_no_part_in_the_loss():
    model = initial_model(CONFIG, 0)
    short, long = ([4, END], [5, END]), ([4, 5, 6, 7, END], [7, 6, 5, 4, END])
    with torch.inference_mode():
        alone = [float(loss_of(model, batch_from_pairs([pair]), 0.0)) for pair in (short, long)]
        together = float(loss_of(model, batch_from_pairs([short, long]), 0.0))
    near = rounding_from_config(CONFIG, largest=20.0).log_prob  # a mean of log-probabilities
    assert together == pytest.approx((2 * alone[0] + 5 * alone[1]) / 7, rel=0, abs=near)


def test_adam_is_adam():
    """Against torch.optim.Adam, on the same gradients, where no clipping happens."""
    ours, theirs = (torch.nn.Linear(7, 5) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    flat = FlatParameters(ours)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for step in range(1, 5):
        torch.manual_seed(step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = torch.randn_like(other)
            mine.grad.copy_(other.grad)
        flat.adam(0.01, step, clip=1e9)
        optimizer.step()
    expected = weights_of(theirs)
    near = apart([(4 * 10, FP32)]) * expected.abs().max().item()  # four steps of ten operations each
    torch.testing.assert_close(weights_of(ours), expected, rtol=0, atol=near)


def test_gradients_are_clipped():
    flat = FlatParameters(torch.nn.Linear(2, 1, bias=False))
    flat.grads.copy_(torch.tensor([3.0, 4.0]))
    flat.adam(0.0, 1, clip=1.0)
    torch.testing.assert_close(flat.state[1], 0.1 * torch.tensor([0.6, 0.8]))
    assert not flat.grads.any()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60),
    tokens=st.integers(1, 100),
)
def test_every_pair_is_in_one_batch_and_batches_keep_their_size(lengths, tokens):
    pairs = [([4] * source, [4] * target) for source, target in lengths]
    batches = batch_order(pairs, tokens, seed=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(pairs)))
    for batch in batches:
        widest = max(lengths[i][0] for i in batch) + max(lengths[i][1] for i in batch)
        assert len(batch) == 1 or len(batch) * widest <= tokens


def test_inputs_are_the_targets_shifted():
    batch = batch_from_pairs([([4, END], [5, 6, END]), ([7, 8, END], [6, END])])
    assert batch.inputs.tolist() == [[START, 5, 6], [START, 6, END]]
    assert batch.targets.tolist() == [[5, 6, END], [6, END, PAD]]
    assert batch.source_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.tokens == 5 + 5


def test_data_files(tmp_path):
    (tmp_path / "a.tsv").write_text("ab\tA B\ncd\tC D\n")
    assert read_pairs(tmp_path / "a.tsv") == [("ab", "A B"), ("cd", "C D")]
    (tmp_path / "p.source").write_text("x\ny\n")
    (tmp_path / "p.target").write_text("X\nY\n")
    assert read_pairs(tmp_path / "p") == [("x", "X"), ("y", "Y")]
    (tmp_path / "p.target").write_text("X\n")
    with pytest.raises(RequestError, match="2 and 1 lines"):
        read_pairs(tmp_path / "p")
    with pytest.raises(RequestError, match="no data at"):
        read_pairs(tmp_path / "none")
    (tmp_path / "b.tsv").write_text("ab\tA B\nbroken\n")
    with pytest.raises(RequestError, match=r"b.tsv line 2 has 1 columns"):
        read_pairs(tmp_path / "b.tsv")
    (tmp_path / "c.tsv").write_bytes(b"ab\tA\nc\xff\tC\n")
    with pytest.raises(RequestError, match=r"c.tsv line 2 is not UTF-8"):
        read_pairs(tmp_path / "c.tsv")
