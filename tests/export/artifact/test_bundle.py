"""A bundle is read back as it was written; anything that is not right is one line with the command that repairs it."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re

import pytest

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.common.json_files import shortened
from seq2engine.errors import BundleError, CheckpointError
from seq2engine.export.artifact.bundle import MANIFEST, manifest_from_dict, open_bundle, write_text
from seq2engine.model.checkpoint import load_checkpoint


def mend(bundle):
    return f"export the checkpoint again with: seq2engine export CHECKPOINT {bundle.root} --force"


def refusal(action, *arguments):
    """The one line of a refusal."""
    with pytest.raises(BundleError) as error:
        action(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_manifest(bundle, change):
    """Applies `change` to the manifest's values and opens the bundle again."""
    path = bundle.root / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return open_bundle(bundle.root)


# --- what is right ----------------------------------------------------------------------------------------------------


def test_the_manifest_survives_the_round_trip(bundles):
    for cache_form in ("static", "growing"):
        manifest = bundles("tiny", cache_form).manifest
        assert manifest_from_dict(json.loads(manifest.to_json())) == manifest
        assert open_bundle(str(bundles("tiny", cache_form).root)).manifest == manifest


def test_an_opened_bundle_lists_its_content(bundles):
    bundle = bundles("tiny", "growing")
    assert bundle.precisions == ("fp32", "fp16")
    assert bundle.cache_form == "growing"
    assert bundle.specs("fp16")["decoder_step"].input("self_k.0").dtype == "float16"
    assert bundle.graph_path("fp16", "encoder") == (bundle.root / "onnx/fp16/encoder.onnx").resolve()


def test_a_bundle_may_be_moved(own_bundle):
    moved = own_bundle.root.rename(own_bundle.root.with_name("elsewhere"))
    assert open_bundle(moved).graph_path("fp32", "encoder").is_file()


def test_the_fingerprint_of_a_graph_tells_its_weights_apart(bundles):
    """The graph file alone is the same for all weights of one shape."""
    entry = bundles("tiny").graph("fp32", "encoder")
    others = [dataclasses.replace(entry, **{field: "0" * 64}) for field in ("sha256", "data_sha256")]
    swapped = dataclasses.replace(entry, sha256=entry.data_sha256, data_sha256=entry.sha256)
    assert len({made.fingerprint for made in (entry, swapped, *others)}) == 4
    assert dataclasses.replace(entry, path="elsewhere.onnx").fingerprint == entry.fingerprint


def test_a_small_file_is_written_whole_and_readable_by_all(tmp_path):
    path = tmp_path / "reports" / "parity.json"
    write_text(path, "first")
    write_text(path, "second")
    assert path.read_text() == "second"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


# --- what cannot be opened --------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    assert refusal(open_bundle, tmp_path / "none") == (
        f"no bundle at {tmp_path / 'none'}; make one with: seq2engine export CHECKPOINT {tmp_path / 'none'}"
    )


def test_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(open_bundle, "owner/model").endswith(
        "; if it is a model of the Hugging Face hub, the checkpoint is hf:owner/model"
    )


def test_a_folder_without_a_manifest(tmp_path):
    assert refusal(open_bundle, tmp_path) == (
        f"{tmp_path} has no {MANIFEST}, so it is not a bundle; make one with: seq2engine export CHECKPOINT DIR"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe\x00", b"[]", b"null", b'"text"', b"3"])
def test_a_manifest_that_is_not_a_json_object(content, own_bundle):
    (own_bundle.root / MANIFEST).write_bytes(content)
    message = refusal(open_bundle, own_bundle.root)
    assert message.startswith(f"{own_bundle.root / MANIFEST} cannot be used (")
    assert message.endswith(mend(own_bundle))


def other_format(values):
    values["format"] = 2


def unknown_precision(values):
    values["graphs"]["int3"] = values["graphs"].pop("fp16")


def unknown_cache_form(values):
    values["cache_form"] = "paged"


def a_graph_too_few(values):
    del values["graphs"]["fp16"]["encoder"]


def an_entry_too_few(values):
    del values["graphs"]["fp16"]["encoder"]["data_sha256"]


def an_entry_too_many(values):
    values["graphs"]["fp16"]["encoder"]["command"] = "rm -rf /"


def a_bad_config(values):
    values["config"]["d_model"] = -1


def a_config_of_another_kind(values):
    values["config"] = []


def graphs_of_another_kind(values):
    values["graphs"] = ["fp32"]


def no_checkpoint_hash(values):
    del values["checkpoint_sha256"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_format, "format 2, this version reads 4"),
        (unknown_precision, "unknown precision 'int3'"),
        (unknown_cache_form, "unknown cache form 'paged'"),
        (a_graph_too_few, "every precision needs the graphs encoder, decoder_step"),
        (an_entry_too_few, "data_sha256"),
        (an_entry_too_many, "command"),
        (a_bad_config, "d_model is -1"),
        (a_config_of_another_kind, "config is [], expected an object"),
        (graphs_of_another_kind, "graphs is ['fp32'], expected an object"),
        (no_checkpoint_hash, "checkpoint_sha256"),
    ],
)
def test_a_manifest_that_does_not_fit(change, reason, own_bundle):
    message = refusal(edit_manifest, own_bundle, change)
    assert message.startswith(f"{own_bundle.root / MANIFEST} cannot be used (")
    assert reason in message
    assert message.endswith(mend(own_bundle))


@pytest.mark.parametrize("named", [3, None, "a\0b", "\ud800", "x" * 5000, ""])
def test_a_path_that_is_none(named, own_bundle):
    def name(values):
        values["graphs"]["fp32"]["encoder"]["path"] = named

    assert "cannot be used (" in refusal(edit_manifest, own_bundle, name)


@pytest.mark.parametrize("census", [None, [], {}, {"nodes": "x"}])
def test_a_census_that_is_none(census, own_bundle):
    def change(values):
        values["graphs"]["fp32"]["encoder"]["census"] = census

    assert "graphs.fp32.encoder.census" in refusal(edit_manifest, own_bundle, change)


def test_a_graph_that_is_a_loop_of_links_or_a_pipe(own_bundle):
    path = own_bundle.root / "onnx/fp32/encoder.onnx"
    path.unlink()
    path.symlink_to(path.name)
    assert "though the manifest lists it" in refusal(own_bundle.graph_path, "fp32", "encoder")
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in refusal(own_bundle.graph_path, "fp32", "encoder")


@pytest.mark.parametrize("layers", [1, 3, 10**6])
def test_layers_that_the_graphs_do_not_have(layers, own_bundle):
    def change(values):
        values["config"]["decoder_layers"] = layers

    assert "layers" in refusal(edit_manifest, own_bundle, change)


def test_engines_are_not_written_through_a_link(own_bundle, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (own_bundle.root / "engines").symlink_to(tmp_path / "elsewhere")
    assert "engines is a link" in refusal(own_bundle.place, "engines", "mine")


# --- what cannot be used ----------------------------------------------------------------------------------------------

FILES = [
    (f"onnx/{precision}/{graph}.onnx{data}", lambda bundle, p=precision, g=graph: bundle.graph_path(p, g))
    for precision in ("fp32", "fp16")
    for graph in ("encoder", "decoder_step")
    for data in ("", ".data")
] + [("model.safetensors", lambda bundle: bundle.reference_path())]


@pytest.mark.parametrize(("name", "use"), FILES, ids=[name for name, _ in FILES])
def test_a_file_that_is_gone_or_changed(name, use, own_bundle):
    path = own_bundle.root / name
    use(own_bundle)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert refusal(use, own_bundle) == (
        f"{path.resolve()} is not the file the manifest describes (its hash differs); {mend(own_bundle)}"
    )
    path.unlink()
    assert refusal(use, own_bundle) == f"{path.resolve()} is missing, though the manifest lists it; {mend(own_bundle)}"


def test_only_what_is_used_is_checked(own_bundle):
    (own_bundle.root / "onnx/fp16/encoder.onnx").unlink()
    assert open_bundle(own_bundle.root).graph_path("fp16", "decoder_step").is_file()
    assert own_bundle.graph_path("fp32", "encoder").is_file()


def test_a_precision_that_was_not_exported(own_bundle):
    bundle = edit_manifest(own_bundle, lambda values: values["graphs"].pop("fp16"))
    expected = (
        f"{bundle.root} holds no fp16 graphs, only fp32; add them with: seq2engine export --add fp16 {bundle.root}"
    )
    for use in (bundle.require, bundle.specs, lambda precision: bundle.graph_path(precision, "encoder")):
        assert refusal(use, "fp16") == expected


@pytest.mark.parametrize("field", ["path", "data_path"])
@pytest.mark.parametrize("where", ["../secret", "onnx/../../secret", "{absolute}"])
def test_a_path_that_leads_outside(field, where, own_bundle):
    """The hash is right, so only the place can be what is refused."""
    secret = own_bundle.root.parent / "secret"
    secret.write_text("not part of the bundle")
    named = where.format(absolute=secret)

    def point_outside(values):
        entry = values["graphs"]["fp32"]["encoder"]
        entry[field] = named
        entry[{"path": "sha256", "data_path": "data_sha256"}[field]] = sha256_of(secret)

    message = refusal(edit_manifest, own_bundle, point_outside)
    assert message.startswith(f"{own_bundle.root / MANIFEST} cannot be used ({shortened(named)} lies outside")
    assert message.endswith(mend(own_bundle))


def test_a_link_that_leads_outside(own_bundle):
    path = own_bundle.root / "onnx/fp32/encoder.onnx"
    path.rename(own_bundle.root.parent / "elsewhere.onnx")
    path.symlink_to(own_bundle.root.parent / "elsewhere.onnx")
    assert "lies outside" in refusal(own_bundle.graph_path, "fp32", "encoder")


def test_the_mending_command_survives_a_space_in_the_path(own_bundle):
    root = own_bundle.root.rename(own_bundle.root.with_name("my bundle"))
    (root / MANIFEST).write_text("{")
    assert refusal(open_bundle, root).endswith(f"seq2engine export CHECKPOINT '{root}' --force")


# --- nothing is unpickled ---------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that, once loaded, leaves a file behind."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return open, (str(self.sentinel), "w")


def test_a_pickle_in_the_place_of_any_file_is_not_loaded(own_bundle, tmp_path):
    sentinel = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(sentinel))
    pickle.loads(bomb).close()
    assert sentinel.exists()  # it would go off
    sentinel.unlink()

    reference = own_bundle.root / "model.safetensors"
    reference.write_bytes(bomb)
    digest = sha256_of(reference)
    bundle = edit_manifest(own_bundle, lambda values: values.update(checkpoint_sha256=digest))
    assert bundle.reference_path().is_file()  # its hash is right: what reads it has to refuse it
    with pytest.raises(CheckpointError, match=re.escape(f"{reference} cannot be read (")):
        load_checkpoint(bundle.root)
    for name in ("onnx/fp32/encoder.onnx", "onnx/fp32/encoder.onnx.data"):
        (bundle.root / name).write_bytes(bomb)
        refusal(bundle.graph_path, "fp32", "encoder")
    (bundle.root / MANIFEST).write_bytes(bomb)
    refusal(open_bundle, bundle.root)
    assert not sentinel.exists()
