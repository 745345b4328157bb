"""Languages of requests on a real tritonserver: outputs are those of `run --from --to`; an unknown one is an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.hugging_face_models import saved, small_model
from support.tokenizer_cases import pieces
from transformers import NllbTokenizer

from seq2engine.benchmarks.serving.triton_server import MISSING, PYTHON, TritonServer, present
from seq2engine.cli.main import main
from seq2engine.exporting import export_checkpoint
from seq2engine.triton.repository import TritonOptions, repository_from_bundle

CLIENT = Path(__file__).parent.parent / "support" / "triton_client.py"
LANGUAGES = ("eng_Latn", "fra_Latn", "zho_Hans")
TEXTS = ("hello", "a longer line of words", "x")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not present(), reason=MISSING)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """NLLB as the library makes it: an M2M100 with random weights, and its tokenizer of three languages."""
    folder = tmp_path_factory.mktemp("nllb")
    (folder / "bare").mkdir()
    (folder / "bare" / "sentencepiece.bpe.model").write_bytes(pieces("bpe"))
    tokenizer = NllbTokenizer.from_pretrained(folder / "bare", extra_special_tokens=list(LANGUAGES))
    checkpoint = saved(small_model("m2m_100", seed=3, vocab_size=len(tokenizer)), folder / "checkpoint")
    tokenizer.save_pretrained(checkpoint)
    return export_checkpoint(checkpoint, folder / "bundle")


def run_output(capsys, bundle, text, source, target, beam):
    assert main(["run", str(bundle.root), text, "--from", source, "--to", target, "--beam", str(beam)]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def asked(server, requests):
    lines = "\n".join(json.dumps(request) for request in requests)
    command = [str(PYTHON), str(CLIENT), f"127.0.0.1:{server.grpc}", "nllb"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


def test_languages_are_request_parameters(bundle, tmp_path, capsys):
    """All pairs of languages at the same time, among them requests whose language the model does not have."""
    repository_from_bundle(bundle, tmp_path / "repo", TritonOptions(name="nllb", rows=8, timeout=600, threads=1))
    pairs = [(source, target) for source in LANGUAGES for target in LANGUAGES]
    cases = [(text, *pair, 1 + 2 * (number % 2)) for number, pair in enumerate(pairs) for text in TEXTS]
    requests = [
        {"text": text, "parameters": {"source_language": source, "target_language": target, "beam": beam}}
        for text, source, target, beam in cases
    ]
    wrong = [{"text": "x", "parameters": {name: "deu_Latn"}} for name in ("source_language", "target_language")]
    server = TritonServer(tmp_path / "repo", tmp_path, "nllb")
    try:
        server.wait()
        *answers, no_source, no_target = asked(server, [*requests, *wrong])
    finally:
        server.kill()
    found = [(answer["error"], answer["responses"][0]["text"]) for answer in answers]
    assert found == [(None, run_output(capsys, bundle, *case)) for case in cases]
    assert len({text for _, text in found}) > len(TEXTS)  # languages make a difference
    for answer in (no_source, no_target):
        assert "deu_Latn" in answer["error"]
        assert "\n" not in answer["error"]
        assert not answer["responses"]
