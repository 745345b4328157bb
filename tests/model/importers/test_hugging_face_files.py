"""Weights of a Hugging Face folder: four kinds of file, tables stored once or several times, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hugging_face_models import LENGTH, VOCAB, saved, small_model
from torch import Tensor

from seq2engine.errors import CheckpointError, ConfigError
from seq2engine.model.importers.conversion.position_tables import m2m_positions, marian_positions
from seq2engine.model.importers.files.weights import read_weights
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.importers.imported import Imported

SHARED, OUTPUT = "model.shared.weight", "lm_head.weight"
SOURCE, TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


@cache
def bart() -> Any:
    return small_model("bart", biased=True)


def folder_of(tmp_path: Path, model: Any = None) -> tuple[Path, dict[str, Tensor]]:
    """A saved model and its weights, under the names of the file."""
    folder = saved(model or bart(), tmp_path / "model")
    return folder, load_file(folder / "model.safetensors")


def with_weights(folder: Path, weights: dict[str, Tensor]) -> Imported:
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    return checkpoint_from_hugging_face(folder)


def assert_same_model(one: Imported, other: Imported) -> None:
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert one.model.config == other.model.config
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def halves(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(weights)
    first = set(names[::2])
    return {n: weights[n] for n in names if n in first}, {n: weights[n] for n in names if n not in first}


def write_bin(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "pytorch_model.bin")


def write_sharded(folder: Path, weights: dict[str, Tensor], kind: str) -> Path:
    stem, ending = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    places = {}
    for number, part in enumerate(halves(weights), start=1):
        name = f"{stem}-{number:05}-of-00002.{ending}"
        if kind == "safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("kind", ["bin", "old bin", "sharded bin", "sharded safetensors", "shards by the library"])
def test_every_kind_of_file_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    expected = checkpoint_from_hugging_face(folder)
    (folder / "model.safetensors").unlink()
    if kind == "bin":
        write_bin(folder, weights)
    elif kind == "old bin":
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif kind == "shards by the library":
        bart().save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
    else:
        write_sharded(folder, weights, kind.removeprefix("sharded "))
    assert_same_model(checkpoint_from_hugging_face(folder), expected)


def test_half_precision_weights_become_fp32(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    model = with_weights(folder, {name: tensor.half() for name, tensor in weights.items()}).model
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.target_embedding.tokens.weight, weights[SHARED].half().float())


@pytest.mark.parametrize("names", [(SHARED,), (SOURCE,), (TARGET,), (OUTPUT,), (SHARED, SOURCE, TARGET, OUTPUT)])
def test_a_tied_table_may_be_stored_under_any_of_its_names(names: tuple[str, ...], tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    expected = checkpoint_from_hugging_face(folder)
    table = weights.pop(SHARED)
    again = with_weights(folder, weights | dict.fromkeys(names, table))
    assert_same_model(again, expected)
    assert again.model.config.share_embeddings
    assert again.model.config.tie_output
    assert again.notes == expected.notes == ()


def test_tables_that_differ_are_not_tied_whatever_the_config(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    table = weights[SHARED]
    untied = with_weights(folder, weights | {OUTPUT: table + 1})
    assert (untied.model.config.share_embeddings, untied.model.config.tie_output) == (True, False)
    assert torch.equal(untied.model.output.weight, table + 1)
    assert "lm_head.weight" in untied.notes[0]

    separate = with_weights(folder, weights | {SOURCE: table + 2})
    assert (separate.model.config.share_embeddings, separate.model.config.tie_output) == (False, True)
    assert torch.equal(separate.model.source_embedding.tokens.weight, table + 2)
    assert torch.equal(separate.model.target_embedding.tokens.weight, table)
    assert "model.encoder.embed_tokens.weight" in separate.notes[0]

    apart = with_weights(folder, weights | {SOURCE: table + 2, TARGET: table + 2, OUTPUT: table + 2})
    assert torch.equal(apart.model.target_embedding.tokens.weight, table + 2)
    assert "model.shared.weight differs" in apart.notes[0]


def test_an_untied_output_must_be_there(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path, small_model("bart", tie_word_embeddings=False))
    assert not checkpoint_from_hugging_face(folder).model.config.tie_output
    del weights[OUTPUT]
    with pytest.raises(CheckpointError, match=r"no weights for lm_head\.weight; expected one of lm_head\.weight"):
        with_weights(folder, weights)


@pytest.mark.parametrize("family", ["bart", "m2m_100", "marian"])
def test_files_of_the_bare_model_lack_a_prefix(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    expected = checkpoint_from_hugging_face(folder_of(tmp_path, model)[0])
    bare = tmp_path / "bare"
    model.model.save_pretrained(bare)
    assert SHARED not in load_file(bare / "model.safetensors")
    assert_same_model(checkpoint_from_hugging_face(bare), expected)


def test_an_output_bias_of_zeros_is_none(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    assert torch.equal(checkpoint_from_hugging_face(folder).model.output.bias, bart().final_logits_bias[0])
    for changed in ({"final_logits_bias": torch.zeros(1, VOCAB)}, {}):
        del weights["final_logits_bias"]
        weights |= changed
        assert not with_weights(folder, weights).model.config.output_bias


def test_a_stored_sinusoidal_table_is_the_table(tmp_path: Path) -> None:
    """Old files of Marian hold one, which the library reads; old files of M2M100 too, which it does not."""
    folder, weights = folder_of(tmp_path, small_model("marian"))
    table = torch.randn(LENGTH, 32)
    model = with_weights(folder, weights | {"model.decoder.embed_positions.weight": table}).model
    assert torch.equal(model.target_embedding.positions, table)
    assert torch.equal(model.source_embedding.positions, marian_positions(LENGTH, 32))

    folder, weights = folder_of(tmp_path, small_model("m2m_100"))
    model = with_weights(folder, weights | {"model.encoder.embed_positions.weights": torch.randn(9, 32)}).model
    assert torch.equal(model.source_embedding.positions, m2m_positions(LENGTH, 32, pad_id=1))


@pytest.mark.parametrize(("length", "width"), [(512, 64), (100, 33), (1024, 6), (2500, 6)])
def test_computed_tables_are_the_library_s_to_the_last_bit(length: int, width: int) -> None:
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    assert torch.equal(
        marian_positions(length, width), MarianSinusoidalPositionalEmbedding(length, width).create_weight()
    )
    for pad in (0, 1, 9):
        whole = M2M100SinusoidalPositionalEmbedding.get_embedding(length + pad + 1, width, pad)
        assert torch.equal(m2m_positions(length, width, pad), whole[pad + 1 :])


@pytest.mark.parametrize("family", ["marian", "m2m_100"])
def test_a_computed_table_is_limited(family: str, tmp_path: Path) -> None:
    """Positions are a number in a config: a million of them would be gigabytes that no file holds."""
    folder = saved(small_model(family), tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**6}))
    expected = r"config\.json: a computed table of positions has 32000000 numbers, expected at most 16777216"
    with pytest.raises(ConfigError, match=expected):
        checkpoint_from_hugging_face(folder)


def test_missing_and_leftover_weights_are_listed(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    weights["model.encoder.layers.0.extra"] = weights.pop("model.encoder.layers.0.fc1.bias")
    with pytest.raises(CheckpointError, match=r"missing model\.encoder\.layers\.0\.fc1\.bias; not understood .*extra"):
        with_weights(folder, weights)


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    weights[SHARED] = weights[SHARED][:-1]
    with pytest.raises(CheckpointError, match=r"target_embedding\.tokens\.weight is \[59, 32\], expected \[60, 32\]"):
        with_weights(folder, weights)


class NotATensor:
    pass


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()

    def refusal() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_weights(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has no weights; expected one of model.safetensors, " in refusal()

    path = folder / "pytorch_model.bin"
    torch.save({"weight": NotATensor()}, path)
    assert "NotATensor, and nothing but tensors is ever unpickled; save the model as safetensors" in refusal()
    torch.save({"weights": {"inner": torch.zeros(2)}}, path)
    assert "('weights' is not a tensor but a dict); expected names and tensors" in refusal()
    torch.save([torch.zeros(2)], path)
    assert "holds a list; expected names and tensors of a state dict" in refusal()
    for content in (b"", b"not a pickle at all"):
        path.write_bytes(content)
        assert "pytorch_model.bin cannot be read (" in refusal()
    write_bin(folder, weights)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "pytorch_model.bin cannot be read (" in refusal()

    path = folder / "model.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read (" in refusal()


def test_an_index_must_name_files_of_its_own_folder(tmp_path: Path) -> None:
    folder, weights = folder_of(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = write_sharded(folder, weights, "safetensors")
    for outside in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), 7):
        index.write_text(json.dumps({"weight_map": {SHARED: outside}}))
        with pytest.raises(CheckpointError, match=r"expected (a file in its own folder|text)"):
            read_weights(folder)
    index.write_text(json.dumps({"weight_map": {SHARED: "model-00003-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names model-00003-of-00002\.safetensors, which is not in the folder"):
        read_weights(folder)
    index.write_text(json.dumps({"weight_map": {"no such weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="lists no such weight in model-00001"):
        read_weights(folder)
    for content in ("[]", "{}", "{", '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match="is not an index of shards"):
            read_weights(folder)
