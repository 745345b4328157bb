"""Files of other people: read without running anything in them, and in one line when they cannot be read."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import CheckpointError
from seq2engine.model.importers.fairseq import checkpoint_from_fairseq
from seq2engine.model.importers.files.pickles import pickle_in, read_pickle, resaving, settings_of, tensors
from seq2engine.model.importers.opennmt import checkpoint_from_opennmt

PLAIN = {"model": {"a": torch.zeros(3)}, "args": argparse.Namespace(heads=4), "step": 7}


class Trap:
    """Runs something when it is unpickled without care."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


def message_of(path: Path, read: Callable[[Path], Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        (read or read_pickle)(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_values_and_options_come_back(tmp_path: Path) -> None:
    torch.save(PLAIN, tmp_path / "x.pt")
    content = read_pickle(tmp_path / "x.pt")
    assert settings_of(content["args"], "args", tmp_path) == {"heads": 4}
    assert torch.equal(tensors(content["model"], tmp_path)["a"], torch.zeros(3))


@pytest.mark.parametrize("read", [None, checkpoint_from_fairseq, checkpoint_from_opennmt])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_in_a_file_does_not_run(tmp_path: Path, read: Callable[[Path], Any] | None, zipped: bool) -> None:
    path, made = tmp_path / "x.pt", tmp_path / "made"
    torch.save({**PLAIN, "extra": Trap(made)}, path, _use_new_zipfile_serialization=zipped)
    message = message_of(path, read)
    assert not made.exists()
    assert message.startswith(f"{path} holds a posix.mkdir, and code is never unpickled here; ")
    torch.load(path, weights_only=False)  # the trap is a real one
    assert made.exists()


@pytest.mark.slow
def test_the_command_to_resave_a_file_works(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({**PLAIN, "extra_state": Path("a")}, path)
    code = message_of(path, checkpoint_from_fairseq).partition('python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", code], check=True)
    content = read_pickle(tmp_path / "plain.pt")
    assert content["args"] == PLAIN["args"]
    assert content.keys() == {"args", "model"}


def test_the_error_has_the_code_that_makes_a_file_plain(tmp_path: Path) -> None:
    hint = resaving(tmp_path / "x.pt", "omegaconf.dictconfig.DictConfig")
    compile(hint.partition('python -c "')[2].removesuffix('"'), "hint", "exec")
    assert "c['cfg'] = OmegaConf.to_container(c['cfg'], resolve=True)" in hint
    assert "tools/convertv2_v3.py" in resaving(tmp_path / "x.pt", "torchtext.data.field.Field")


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.pt file; expected best\.pt or one \.pt file: name it"):
        pickle_in(tmp_path, ("best.pt",))
    for name in ("a.pt", "best.pt"):
        (tmp_path / name).touch()
        assert pickle_in(tmp_path, ("best.pt",)) == tmp_path / name
    with pytest.raises(CheckpointError, match=r"has a\.pt, best\.pt; expected one \.pt file: name it"):
        pickle_in(tmp_path)
    assert pickle_in(tmp_path / "a.pt") == tmp_path / "a.pt"


def test_no_file(tmp_path: Path) -> None:
    assert message_of(tmp_path / "x.pt") == f"no file at {tmp_path}/x.pt; expected a .pt file"


def saved_bytes(zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(PLAIN, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


WHOLE = {zipped: saved_bytes(zipped) for zipped in (True, False)}


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.floats(0.0, 0.999))
def test_a_truncated_file_is_an_error_of_one_line(tmp_path_factory: Any, zipped: bool, part: float) -> None:
    path = tmp_path_factory.getbasetemp() / "truncated.pt"
    path.write_bytes(WHOLE[zipped][: int(part * len(WHOLE[zipped]))])
    assert message_of(path).startswith(f"{path} ")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_other_file_is_an_error_of_one_line(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "other.pt"
    path.write_bytes(b"\x80\x02" + content)
    assert message_of(path).startswith(str(path))


def test_a_pickle_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickle.dumps([1, 2], protocol=2))
    assert str(path) in message_of(path, checkpoint_from_fairseq)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1], "holds a list; expected names and tensors of a state dict"),
        ({"a": 1}, "'a' is not a tensor but a int"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a tensor on meta, without numbers"),
        (
            {"a": torch.ones(2).to_sparse()},
            "'a' is a tensor of torch.float32 in torch.sparse_coo, expected plain numbers",
        ),
        ({"a": torch.ones(2) * 1j}, "'a' is a tensor of torch.complex64 in torch.strided, expected plain numbers"),
        ({"\ud800": torch.ones(2)}, r"'\ud800' is no name"),
        ({}, "nothing is in it"),
    ],
)
def test_what_is_not_a_state_dict(tmp_path: Path, values: Any, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tensors(values, tmp_path)
    whole = (
        f"does not hold a state dict ({problem}); expected names and tensors" if isinstance(values, dict) else problem
    )
    assert str(caught.value) == f"{tmp_path} {whole}"


def test_options_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'opt' is a list; expected options by name"):
        settings_of([], "opt", tmp_path)
