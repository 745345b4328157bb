"""The state of a training: another one is refused or replaced, and what is damaged is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seq2engine.errors import BundleError, RequestError
from seq2engine.model.training.state import Cursor, FlatParameters, TrainingFiles

ABOUT = {"seed": 1}


def files(folder: Path, about: dict[str, Any] = ABOUT, force: bool = False, size: int = 3) -> TrainingFiles:
    return TrainingFiles(folder, FlatParameters(nn.Linear(size, 2)), about, force)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    begun = files(tmp_path / "state")
    begun.save(Cursor(slot=1, step=4))
    return tmp_path / "state"


def test_a_state_is_resumed(folder: Path) -> None:
    assert files(folder).cursor.step == 4
    assert files(folder, force=True).cursor.step == 4


def test_another_training_is_refused_or_with_force_begun_anew(folder: Path) -> None:
    with pytest.raises(RequestError, match="was begun with other data or options; name another folder, or add --force"):
        files(folder, {"seed": 2})
    assert files(folder, {"seed": 2}, force=True).cursor == Cursor()
    assert files(folder, {"seed": 2}).cursor == Cursor()


@pytest.mark.parametrize("name", ["about.json", "cursor.json"])
@pytest.mark.parametrize("content", ["", "[]", "[" * 5000, '{"slot": "x"}', '{"slot": 7}', '{"": 1}'])
def test_damaged_files_are_one_line(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(RequestError, match=r"cannot be used|was begun with other"):
        files(folder)


def test_a_history_that_lacks_what_is_done(folder: Path) -> None:
    files(folder).point_at(Cursor(step=9, epoch=3))
    with pytest.raises(RequestError, match=r"lacks epoch 2, which cursor.json has as done"):
        files(folder)
    (folder / "history.jsonl").write_text('{"step": "x"}\n')
    with pytest.raises(RequestError, match=r"history.jsonl cannot be used \(step is 'x', expected a number"):
        files(folder)


@pytest.mark.parametrize(
    ("entry", "lost"),
    [('"dev_loss": 1', "exact_match"), ('"dev_loss": 1, "loss": 1', "exact_match"), ('"loqs": 1', "dev_loss")],
)
def test_an_entry_of_the_history_that_is_not_whole(folder: Path, entry: str, lost: str) -> None:
    (folder / "history.jsonl").write_text(f'{{"step": 0, "epoch": 0, "seconds": 1, {entry}}}\n')
    with pytest.raises(RequestError, match=rf"history.jsonl cannot be used \(an entry without {lost}\)"):
        files(folder)


def test_a_state_of_another_size_is_not_mapped(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"state.bin has \d+ bytes, expected"):
        files(folder, size=5)


def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path) -> None:
    (folder / "state.bin").rename(tmp_path / "elsewhere")
    (folder / "state.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"state.bin is a link"):
        files(folder)


def test_weights_of_epochs(folder: Path) -> None:
    state = files(folder)
    with pytest.raises(RequestError, match="holds no weights"):
        state.average()
    state.save_epoch(0, keep=2)
    assert torch.equal(state.average(), state.flat.state[0])
    (folder / "epochs" / "0000.safetensors").write_bytes(b"x")
    with pytest.raises(RequestError, match="cannot be read"):
        state.average()
