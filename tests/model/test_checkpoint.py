"""Checkpoints come back as they went, and a damaged or foreign one is reported in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from seq2engine.errors import BundleError, CheckpointError, ConfigError
from seq2engine.model import checkpoint
from seq2engine.model.checkpoint import load_checkpoint, model_from_weights, random_model, save_checkpoint
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS
from seq2engine.model.transformer import Transformer

SMALL = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "heads": 2,
    "d_model": 8,
    "d_ff": 12,
    "max_source": 6,
    "max_target": 6,
}


def small_config(**values: object) -> ModelConfig:
    return ModelConfig(**SMALL | {"source_vocab": 11, "target_vocab": 11} | values)


def small_model(seed: int = 0, **values: object) -> Transformer:
    return random_model(small_config(**values), seed)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(small_model(tie_output=False), tmp_path / "saved")


def error_of(folder: Path) -> str:
    """What loading a folder complains about."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def same_weights(one: Transformer, other: Transformer) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def logits_of(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        source = torch.tensor([[3, 4, 5, 0]])
        return model(source, source != 0, torch.tensor([[1, 6, 7]]))


# Round trips


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_a_model_comes_back_to_the_bit(tmp_path: Path, share: bool, tie: bool) -> None:
    model = small_model(share_embeddings=share, tie_output=tie)
    assert save_checkpoint(model, tmp_path / "saved") == tmp_path / "saved"
    loaded = load_checkpoint(tmp_path / "saved")
    assert loaded.config == model.config
    assert not loaded.training
    assert same_weights(loaded, model)
    assert torch.equal(logits_of(loaded), logits_of(model))
    table = loaded.target_embedding.tokens.weight
    assert (loaded.source_embedding.tokens.weight is table) == share
    assert (loaded.output.weight is table) == tie
    stored = load_file(tmp_path / "saved" / "model.safetensors")  # one table is one tensor in the file too
    assert ("source_embedding.tokens.weight" not in stored) == share
    assert ("output.weight" not in stored) == tie


@pytest.mark.parametrize(
    "variant",
    [
        {"positions": "learned"},
        {"positions": "rotary", "norm": "pre"},
        {"output_bias": True, "activation": "silu"},
        {"source_vocab": 7, "share_embeddings": False},
    ],
    ids=lambda variant: ",".join(map(str, variant)),
)
def test_every_variant_comes_back(tmp_path: Path, variant: dict[str, object]) -> None:
    model = small_model(**variant)
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "saved"))
    assert loaded.config == model.config
    assert same_weights(loaded, model)
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_checkpoint_is_two_files_of_plain_data(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((saved / "config.json").read_text())["d_model"] == 8


def test_half_precision_weights_load_as_fp32(tmp_path: Path) -> None:
    model = small_model().half()
    loaded = load_checkpoint(save_checkpoint(model, str(tmp_path / "saved")))
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert same_weights(loaded, model.float())


# What is not a checkpoint


def test_no_folder(tmp_path: Path) -> None:
    expected = f"no checkpoint at {tmp_path}/none; expected a folder with config.json and model.safetensors"
    assert error_of(tmp_path / "none") == expected


def test_a_file_is_not_a_folder(saved: Path) -> None:
    assert error_of(saved / "config.json").startswith(f"no checkpoint at {saved}/config.json;")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert error_of(saved) == f"{saved} has no {name}; expected a folder with config.json and model.safetensors"


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(saved)
    assert message.startswith(f"{file} cannot be read (")
    assert message.endswith("); copy the checkpoint again")


def test_weights_of_another_format(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))  # how a pickled torch file begins
    assert "model.safetensors cannot be read (" in error_of(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"heads: 8\n", b"\xff\xfe{}"])
def test_a_config_that_is_not_json(saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    message = error_of(saved)
    assert message.startswith(f"{saved}/config.json cannot be used (not ")
    assert message.endswith("); copy the checkpoint again")


@pytest.mark.parametrize(("content", "kind"), [("[]", "[]"), ("3", "3"), ("null", "None")])
def test_a_config_that_holds_no_fields(saved: Path, content: str, kind: str) -> None:
    (saved / "config.json").write_text(content)
    assert (
        error_of(saved)
        == f"{saved}/config.json cannot be used (it is {kind}, expected an object); copy the checkpoint again"
    )


@pytest.mark.parametrize(
    ("foreign", "kind"),
    [
        ({"model_type": "marian", "architectures": ["MarianMTModel"], "d_model": 512}, "'marian'"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "'another library'"),
    ],
)
def test_the_config_of_another_library(saved: Path, foreign: dict[str, object], kind: str) -> None:
    (saved / "config.json").write_text(json.dumps(foreign))
    mend = f"make it ours with: seq2engine import {saved} CHECKPOINT"
    assert error_of(saved) == f"{saved}/config.json describes a model of {kind}; {mend}"


def test_a_config_with_other_fields_lists_them(saved: Path) -> None:
    values = json.loads((saved / "config.json").read_text())
    del values["heads"]
    (saved / "config.json").write_text(json.dumps(values | {"n_heads": 2}))
    assert error_of(saved) == f"{saved}/config.json: unknown field 'n_heads'; missing field 'heads'"


def test_a_config_with_wrong_values_names_its_file(saved: Path) -> None:
    values = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(values | {"heads": 3, "norm": "both"}))
    problems = "norm is 'both', expected one of post, pre; d_model 8 is not divisible by heads 3"
    assert error_of(saved) == f"{saved}/config.json: {problems}"


def test_weights_that_do_not_fit_are_all_listed(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["output.weight"], weights["decoder.0.cross_attn.q.bias"]
    weights["encoder.1.extra"] = torch.zeros(1)
    weights["encoder.0.feed_forward.up.weight"] = torch.zeros(8, 12)
    save_file(weights, saved / "model.safetensors")
    assert error_of(saved) == (
        f"{saved}/model.safetensors does not fit its config: missing decoder.0.cross_attn.q.bias; "
        "missing output.weight; unexpected 'encoder.1.extra'; "
        "encoder.0.feed_forward.up.weight is [8, 12], expected [12, 8]"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"source_vocab": 10**7, "target_vocab": 10**7},
        {"encoder_layers": 10**6},
        {"encoder_layers": 1000},
        {"d_model": 10**9},
        {"d_ff": 2**62},
        {"d_ff": 2**20},
        {"max_source": 10**6},
        {"heads": 1024, "d_kv": 2**17},
    ],
)
def test_sizes_are_held_against_the_file_before_anything_is_made(
    saved: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(config: ModelConfig) -> Transformer:
        raise AssertionError(f"a model of {config} was made")

    monkeypatch.setattr(checkpoint, "build_model", never)
    values = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**values, "positions": "learned", **sizes}))
    assert re.search("does not fit its config|expected at most|expected", error_of(saved))


def test_a_tied_name_in_the_file_is_unexpected(tmp_path: Path) -> None:
    # It would be a second opinion on a weight that the model has only once.
    saved = save_checkpoint(small_model(), tmp_path / "tied")
    weights = load_file(saved / "model.safetensors") | {"output.weight": torch.zeros(11, 8)}
    save_file(weights, saved / "model.safetensors")
    assert error_of(saved).endswith(" does not fit its config: unexpected 'output.weight'")


def test_a_long_list_of_problems_is_cut_and_counted() -> None:
    model = small_model()
    expected = len(model.state_dict()) - 2  # but for the two tied names
    with pytest.raises(CheckpointError) as caught:
        model_from_weights(model.config, {}, where="here")
    message = str(caught.value)
    assert message.count("missing ") == 8
    assert message.endswith(f"; and {expected - 8} more")


# Random models


def test_the_same_seed_gives_the_same_model() -> None:
    torch.manual_seed(1)
    one = small_model(seed=5, positions="learned", output_bias=True, norm="pre")
    torch.manual_seed(2)
    other = small_model(seed=5, positions="learned", output_bias=True, norm="pre")
    assert same_weights(one, other)


def test_another_seed_changes_every_weight() -> None:
    one, other = (small_model(seed, positions="learned", output_bias=True, norm="pre").state_dict() for seed in (1, 2))
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_no_two_weights_of_a_random_model_are_equal() -> None:
    weights = list(small_model(share_embeddings=False, tie_output=False, positions="learned", norm="pre").parameters())
    for i, one in enumerate(weights):
        assert one.isfinite().all()
        assert one.std() > 0
        assert not any(torch.equal(one, other) for other in weights[i + 1 :])


def test_decodes_of_a_random_model_wander_and_end() -> None:
    # One that repeats a token for ever would let any search and any cache look right.
    model = random_model("tiny")
    source = torch.randint(3, 256, (16, 12), generator=torch.Generator().manual_seed(0))
    decoded = torch.full((16, 1), model.config.start_id)
    with torch.no_grad():
        for _ in range(40):
            logits = model(source, torch.ones_like(source, dtype=torch.bool), decoded)
            decoded = torch.cat((decoded, logits[:, -1:].argmax(dim=-1)), dim=1)
    end = model.config.end_id
    decodes = [row[: row.index(end)] if end in row else row for row in decoded.tolist()]
    assert len({len(decode) for decode in decodes}) >= 4
    assert sum(len(set(decode)) >= 4 for decode in decodes) >= 6


def test_a_preset_is_a_name_or_a_config() -> None:
    by_name = random_model("tiny", seed=3)
    assert by_name.config == PRESETS["tiny"]
    assert not by_name.training
    assert same_weights(by_name, random_model(PRESETS["tiny"], seed=3))


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        random_model("huge")
    assert str(caught.value) == f"unknown preset 'huge', expected one of {', '.join(PRESETS)}"


# Saving over something


def test_an_existing_folder_is_refused(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(BundleError, match="exists; name another folder, or add --force to replace it"):
        save_checkpoint(small_model(seed=1), saved)
    assert (saved / "model.safetensors").read_bytes() == before


def test_force_replaces_all_of_it(saved: Path) -> None:
    (saved / "notes.txt").write_text("of the old one")
    model = small_model(seed=1)
    save_checkpoint(model, saved, force=True)
    assert same_weights(load_checkpoint(saved), model)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert list(saved.parent.iterdir()) == [saved]


def test_force_does_not_replace_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match=r"has no config\.json, so it is not ours to replace"):
        save_checkpoint(small_model(), tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("force", [True, False], ids=["replacing", "new"])
def test_a_failure_half_way_leaves_things_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, force: bool
) -> None:
    model = small_model()
    if force:
        save_checkpoint(model, tmp_path / "saved")

    def fail_half_way(weights: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of")
        raise failure

    monkeypatch.setattr(checkpoint, "save_file", fail_half_way)
    with pytest.raises(type(failure)):
        save_checkpoint(small_model(seed=1), tmp_path / "saved", force)
    assert list(tmp_path.iterdir()) == ([tmp_path / "saved"] if force else [])
    if force:
        assert same_weights(load_checkpoint(tmp_path / "saved"), model)


@pytest.mark.parametrize("name", ["generation.json", "speech.json", "tokenizer/about.json"])
def test_companions_are_regular_files(tmp_path: Path, name: str) -> None:
    """A copy of /dev/zero would fill the disk; a pipe or a link to nowhere is not what a checkpoint has."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "tokenizer").mkdir(parents=True)
    for kind in ("pipe", "device", "nowhere"):
        if kind == "pipe":
            os.mkfifo(source / name)
        else:
            (source / name).symlink_to("/dev/zero" if kind == "device" else "nowhere")
        target.mkdir()
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file; copy the checkpoint again"):
            checkpoint.copy_companions(source, target)
        (source / name).unlink()
        shutil.rmtree(target)
