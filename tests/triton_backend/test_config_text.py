"""The texts of config.pbtxt, and the folders of a repository."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.stand_in_engines import BEAMS, copied, exported, put_engines
from support.text_bundle import text_bundle

from seq2engine.cli.main import main
from seq2engine.errors import BundleError, RequestError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.passport import PASSPORT, read_passport
from seq2engine.runtime import threads
from seq2engine.runtime.translator import load
from seq2engine.triton import repository
from seq2engine.triton.repository import DESCRIPTION, TritonOptions, repository_from_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("b"))


def test_a_repository_holds_what_the_model_reads(bundle, tmp_path):
    written = repository_from_bundle(bundle, tmp_path, TritonOptions(name="letters", instances=2))
    assert [folder.name for folder in written.folders] == ["letters", "letters_encoder", "letters_decoder_step"]
    config = (tmp_path / "letters" / "config.pbtxt").read_text()
    assert "decoupled: true" in config
    assert "count: 2 kind: KIND_CPU" in config
    assert "TYPE_STRING" not in config
    texts = ["abc", "jihg"]
    with load(tmp_path / "letters" / "1" / "bundle") as copy, load(bundle) as model:
        assert copy.translate(texts) == model.translate(texts)
    assert (tmp_path / "letters" / "requirements.txt").read_text().startswith("seq2engine==")
    weights = next((tmp_path / "letters_encoder" / "1").glob("*.data"))
    assert weights.samefile(bundle.root / "onnx" / "fp32" / weights.name)  # a link: no second copy on the disk


def test_graphs_are_declared_as_they_are(bundle, tmp_path):
    repository_from_bundle(bundle, tmp_path, TritonOptions(name="letters"))
    config = (tmp_path / "letters_decoder_step" / "config.pbtxt").read_text()
    assert 'platform: "onnxruntime_onnx"' in config
    assert '{ name: "tokens" data_type: TYPE_INT64 dims: [ -1, -1 ] }' in config
    heads, width = bundle.config.heads, bundle.config.d_model // bundle.config.heads
    assert f'{{ name: "self_k.0" data_type: TYPE_FP32 dims: [ -1, {heads}, -1, {width} ] }}' in config
    assert 'inputs { key: "position" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }' in config


def test_engines_are_plans(tmp_path):
    folder = put_engines(copied(exported(tmp_path)["static"], tmp_path / "run7"), BEAMS)
    root = folder.parent.parent  # of BUNDLE/engines/NAME
    options = TritonOptions(name="run7", backend="tensorrt")
    written = repository_from_bundle(open_bundle(root), tmp_path / "repo", options)
    config = (tmp_path / "repo" / "run7" / "config.pbtxt").read_text()
    assert "KIND_GPU" in config
    described = json.loads((tmp_path / "repo" / "run7" / DESCRIPTION).read_text())
    assert (tmp_path / "repo" / "run7" / "1" / "bundle" / "engines" / described["engine"] / "passport.json").is_file()
    for path in written.folders[1:]:
        assert 'platform: "tensorrt_plan"' in (path / "config.pbtxt").read_text()
        assert (path / "1" / "model.plan").is_file()


def test_other_models_stay_and_ours_are_replaced_only_when_asked(bundle, tmp_path):
    other = tmp_path / "repo" / "other" / "config.pbtxt"
    other.parent.mkdir(parents=True)
    other.write_text("")
    options = TritonOptions(name="letters")
    repository_from_bundle(bundle, tmp_path / "repo", options)
    with pytest.raises(BundleError, match="exists; name another folder, or add --force"):
        repository_from_bundle(bundle, tmp_path / "repo", options)
    repository_from_bundle(bundle, tmp_path / "repo", options, force=True)
    with pytest.raises(BundleError, match="is not ours to replace"):
        repository_from_bundle(bundle, tmp_path / "repo", TritonOptions(name="other"), force=True)
    assert other.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TritonOptions(name="a/b"), "model name 'a/b', expected letters"),
        (TritonOptions(backend="torch"), "backend torch in Triton, expected onnxruntime or tensorrt"),
    ],
)
def test_what_triton_cannot_hold_is_refused(bundle, tmp_path, options, message):
    with pytest.raises(RequestError, match=message):
        repository_from_bundle(bundle, tmp_path / "repo", options)
    assert not (tmp_path / "repo").exists()


def planned(folder):
    described = json.loads((folder / DESCRIPTION).read_text())
    return described["instances"], described["rows"], described["plan"]


@pytest.mark.parametrize(
    ("cores", "memory", "options", "instances", "rows", "why"),
    [
        (2, 10**10, TritonOptions(), 1, 32, "1 process of 2 threads on 2 cores: it batches across requests"),
        (16, 10**10, TritonOptions(), 8, 32, "8 processes of 2 threads on 16 cores: one would leave cores idle"),
        (16, 8 * 10**8, TritonOptions(), 3, 32, "3 processes of 2 threads on 16 cores: memory holds no more"),
        (16, 10**10, TritonOptions(threads=16), 1, 32, "1 process of 16 threads on 16 cores"),
        (16, 10**10, TritonOptions(instances=2, rows=7), 2, 7, "2 processes, as asked for; 7 rows"),
        (4, None, TritonOptions(), 2, 32, "memory is not known"),
    ],
)
def test_instances_are_planned_for_the_machine(
    bundle, tmp_path, monkeypatch, cores, memory, options, instances, rows, why
):
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    monkeypatch.setattr(repository, "usable_cores", lambda: cores)
    monkeypatch.setattr(repository, "available_memory", lambda: memory)
    named = dataclasses.replace(options, name="letters")
    written = repository_from_bundle(bundle, tmp_path, named)
    assert planned(tmp_path / "letters") == (instances, rows, written.plan.reason)
    assert why in written.plan.reason
    for folder in written.folders:
        assert f"count: {instances} kind: KIND_CPU" in (folder / "config.pbtxt").read_text()


def test_engines_have_one_instance_for_each_gpu_and_as_many_rows_as_fit(tmp_path):
    """Rows are those of the engine, unless the GPU's memory holds fewer; with room for none it is refused."""
    folder = put_engines(copied(exported(tmp_path)["static"], tmp_path / "run7"), BEAMS)
    root = open_bundle(folder.parent.parent)
    free = TritonOptions(name="run7", backend="tensorrt")
    plan = repository_from_bundle(root, tmp_path / "repo", free).plan
    most = read_passport(folder / PASSPORT).ranges.batch.max
    assert (plan.instances, plan.rows) == (1, most)
    assert "1 process of each GPU: it batches across requests" in plan.reason
    tight = dataclasses.replace(free, gpu_memory=plan.bytes - 1)
    assert repository_from_bundle(root, tmp_path / "repo", tight, force=True).plan.rows == most - 1
    small = dataclasses.replace(free, gpu_memory=10**8)
    with pytest.raises(RequestError, match=r"1 instance of one row take about 0.5 GB, and 0.1 GB are free; take a sm"):
        repository_from_bundle(root, tmp_path / "other", small)
    assert not (tmp_path / "other").exists()


def test_the_command(bundle, tmp_path, capsys):
    assert main(["triton", str(bundle.root), str(tmp_path / "repo"), "--name", "letters", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(model).name for model in found["models"]] == ["letters", "letters_encoder", "letters_decoder_step"]
    assert planned(tmp_path / "repo" / "letters") == tuple(
        found["plan"][name] for name in ("instances", "rows", "reason")
    )
    flags = ["--name", "letters", "--force", "--instances", "3", "--batch", "5"]
    assert main(["triton", str(bundle.root), str(tmp_path / "repo"), *flags]) == 0
    assert "instances: 3 processes, as asked for; 5 rows and the weights take about" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["triton", str(bundle.root), str(tmp_path / "repo"), "--gpu-memory", "lots"])
    assert "'lots', expected gigabytes, such as 24" in capsys.readouterr().err
    assert main(["triton", str(bundle.root), str(tmp_path / "repo"), "--name", "letters"]) == 1
    assert "add --force" in capsys.readouterr().err
