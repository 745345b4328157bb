"""Whole files of every kind that a command reads, to be mutated: tiny bundles, checkpoints of every library, texts."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import soundfile
import torch
from PIL import Image

from seq2engine.cli.main import main
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.exporting import export_checkpoint
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.tokenizers.base import Tokenizer
from seq2engine.model.tokenizers.byt5 import ByteTokenizer
from seq2engine.model.tokenizers.byte_level import tokenizer_json
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from support import text_bundle
from support.bench_results import STEADY, result
from support.foreign_exports import foreign_graphs
from support.hugging_face_models import saved, small_model
from support.multilingual_bundle import multilingual_bundle
from support.nn_reference import Reference
from support.speech_models import WINDOW, sound, speech_model
from support.tokenizer_cases import pieces, processor, stored
from support.trocr_models import pictures, saved_trocr, small_trocr
from support.whisper_models import small_whisper

from .cluster import CLUSTER, one_worker
from .hashes import TRAINING, mend_hashes

TESTS = Path(__file__).parents[2]
PAIRS = "abc\tcab\nab\tba\nhij\tjih\nfa de\ted af\n"


def write_materials(root: Path) -> None:
    """Everything that cases mutate, in folders by kind. Engines are some bytes: without a GPU none is ever loaded."""
    root.mkdir(parents=True)
    write_texts(root / "texts")
    write_bundle(root / "text", root / "texts")
    multilingual_bundle(root / "pieces")
    write_tokenizers(root)
    speech = speech_model(root / "speech")
    for suffix in ("wav", "flac", "ogg", "mp3", "aiff"):
        soundfile.write(root / "speech" / f"sound.{suffix}", sound(WINDOW), 16_000)
    assert speech.bundle.root == root / "speech" / "bundle"
    write_images(root / "images")
    write_checkpoints(root)
    write_openai(root / "openai")
    write_hub(root)
    write_foreign(root / "foreign")
    write_training(root / "training", root / "texts")
    write_cluster(root / "cluster", root / "text" / "bundle")
    bundle = str(root / "text" / "bundle")
    assert main(["triton", bundle, str(root / "triton" / "repo"), "--name", "text", "--instances", "1", "--quiet"]) == 0


def write_images(folder: Path) -> None:
    """A model that takes images, as the library has it and as a bundle, and a picture of several kinds."""
    saved_trocr(small_trocr(8), folder / "library")
    export_checkpoint(folder / "library", folder / "bundle", precisions=("fp32",))
    for kind in ("png", "jpg", "tif", "gif", "webp", "bmp", "ppm"):
        Image.fromarray(pictures(1)[0]).save(folder / f"line.{kind}")


def write_foreign(folder: Path) -> None:
    """Graphs that another exporter made, and our bundle of the same model."""
    model = small_model("marian").eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder / "library")
    onnx_from_model(checkpoint_from_hugging_face(folder / "library").model, folder / "bundle", ("fp32",))
    foreign_graphs(model, folder)
    shutil.rmtree(folder / "library")


def write_texts(folder: Path) -> None:
    folder.mkdir()
    (folder / "pairs.tsv").write_text(PAIRS)
    (folder / "corpus.txt").write_text("abc\nhij fa\n\nde\n")
    for side, lines in (("source", "abc\nab\n"), ("target", "cab\nba\n")):
        (folder / f"aligned.{side}").write_text(lines)
    (folder / "secret.token").write_text("abc123\n")
    (folder / "gate.json").write_text('{"verdict": true, "min_equal": 0.9, "max_kl": 1.5}')
    (folder / "gate.toml").write_text("verdict = true\nmin_equal = 0.9\n")
    for name in ("before", "after"):
        (folder / f"{name}.json").write_text(result(STEADY).to_json())


def write_cluster(folder: Path, bundle: Path) -> None:
    """A corpus of all kinds of files, and the folder that decoding it has left."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    (corpus / "a.tsv").write_text("abc\tx\nab\ty\n")
    (corpus / "b.txt").write_text("hij\nzzz\nde\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["fa", None, "de"], "n": [1, 2, 3]}), corpus / "c.parquet")
    command = ["run", str(bundle), "--input", str(corpus), "--out", str(folder / "out"), *CLUSTER.split()]
    with one_worker():
        assert main(command) == 0


def write_tokenizers(root: Path) -> None:
    """Bundles whose tokenizers are of the other kinds: fairseq's dictionaries and codes, a tokenizer.json, bytes."""
    of_fairseq = module_at(TESTS / "model" / "tokenizers" / "test_fairseq.py")
    letters = tokenizer_json({letter: 3 + i for i, letter in enumerate("abcdefghij ")}, [], [(2, "</s>", True)])
    made: dict[str, tuple[Tokenizer, int]] = {
        "words": (of_fairseq.tokenizer(), 200),
        "letters": (HuggingFaceTokenizer(letters, "</s>"), 20),
        "bytes": (ByteTokenizer(3), 262),
    }
    for name, (tokenizer, size) in made.items():
        config = dataclasses.replace(text_bundle.CONFIG, source_vocab=size, target_vocab=size, max_source=40)
        checkpoint = stored(tokenizer, root / name / "checkpoint")
        onnx_from_model(random_model(config, 3), root / name / "bundle", ("fp32",), companions=checkpoint)
        shutil.rmtree(checkpoint)


def write_openai(folder: Path) -> None:
    """A file of OpenAI's Whisper with its tokenizer; and a folder of Hugging Face's with vocabulary and merges."""
    writers = module_at(TESTS / "model" / "importers" / "test_whisper.py")
    sizes = {"vocab_size": 51866, "max_target_positions": 448, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    folder.mkdir()
    writers.openai_file(folder, small_whisper(3, 128, **sizes))
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"abc"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "multilingual.tiktoken").write_text("\n".join(lines) + "\n")


def write_hub(root: Path) -> None:
    """Folders that are served as repositories of a hub: a model of another library and a bundle."""
    shutil.copytree(root / "marian", root / "hub-model")
    (root / "hub-model" / "README.md").write_text("---\nlicense: mit\n---\ntext\n")
    shutil.copytree(root / "text" / "bundle", root / "hub-bundle", ignore=shutil.ignore_patterns("reports"))


def write_bundle(folder: Path, texts: Path) -> None:
    """A bundle that takes text, with engines and reports, and its checkpoint."""
    tokenizer = folder / "companions" / "tokenizer"
    tokenizer.mkdir(parents=True)
    text_bundle.TOKENIZER.write(tokenizer)
    generation = {"beam": 2, "length_penalty": 0.8, "banned": [[5, 6]], "prefix": [], "forced_eos": None}
    (folder / "companions" / "generation.json").write_text(json.dumps(generation))
    model = random_model(text_bundle.CONFIG, 3)
    onnx_from_model(model, folder / "bundle", ("fp32", "w8a8"), companions=folder / "companions")
    save_checkpoint(model, folder / "checkpoint")
    shutil.copytree(folder / "companions", folder / "checkpoint", dirs_exist_ok=True)
    bundle = str(folder / "bundle")
    assert main(["build", bundle, "--precision", "fp32", "--gpu", "sm89", "--no-engine-cache", "--quiet"]) == 0
    assert main(["parity", bundle, "--count", "2", "--precision", "fp32", "--quiet"]) == 0
    shutil.copy(texts / "before.json", folder / "bundle" / "reports" / "bench-torch-20260102-030405.json")
    for engine in (folder / "bundle" / "engines").glob("*/*.engine"):
        engine.write_bytes(hashlib.sha256(engine.name.encode()).digest() * 8)
    for page in (folder / "bundle" / "reports").glob("*.html"):
        page.unlink()
    mend_hashes(folder / "bundle")


def write_checkpoints(root: Path) -> None:
    """A folder of every library whose checkpoints are imported."""
    marian = saved(small_model("marian", vocab_size=123), root / "marian", num_beams=2, bad_words_ids=[[5]])
    model = pieces("bpe")
    names = {processor(model).id_to_piece(i): i for i in range(3, 120)}
    (marian / "source.spm").write_bytes(model)
    (marian / "target.spm").write_bytes(model)
    (marian / "vocab.json").write_text(json.dumps({"<unk>": 0, "</s>": 2, ">>fra<<": 121, **names}))
    (marian / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    bart = saved(small_model("bart"), root / "bart")
    torch.save({name: t.clone() for name, t in small_model("bart").state_dict().items()}, bart / "pytorch_model.bin")
    (bart / "model.safetensors").unlink()
    shutil.copy(root / "speech" / "library" / "tokenizer.json", bart)
    (bart / "tokenizer_config.json").write_text('{"tokenizer_class": "BartTokenizer", "eos_token": "<|endoftext|>"}')
    t5 = saved(small_model("t5"), root / "t5")
    (t5 / "spiece.model").write_bytes(model)
    shards = root / "shards"
    small_model("m2m_100").save_pretrained(shards, max_shard_size="20KB")
    (shards / "sentencepiece.bpe.model").write_bytes(model)
    (shards / "vocab.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **names}))
    pegasus = saved(small_model("pegasus"), root / "pegasus")
    (pegasus / "spiece.model").write_bytes(model)
    mbart = saved(small_model("mbart"), root / "mbart")
    (mbart / "sentencepiece.bpe.model").write_bytes(model)
    write_pickled_shards(root / "pickled", small_model("bart"))
    write_merges(root)
    tests = TESTS / "model" / "importers"
    fairseq, opennmt, plain = (module_at(tests / f"test_{n}.py") for n in ("fairseq", "opennmt", "torch_transformer"))
    (root / "fairseq").mkdir()
    (root / "fairseq" / "codes").write_text("#version: 0.2\na b</w>\nw o\n")
    reference = Reference(positions=fairseq.sinusoids())
    options = fairseq.argparse.Namespace(**fairseq.fairseq_options())
    fairseq.write(root / "fairseq", {"args": options, "model": fairseq.fairseq_weights(reference, learned=False)})
    (root / "opennmt").mkdir()
    opennmt.write(root / "opennmt" / "model.pt", opennmt.reference_of())
    plain.write(root / "torch", Reference())


def write_pickled_shards(folder: Path, model: Any) -> None:
    """Weights in two files of torch.save, and the index that names them."""
    saved(model, folder)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(weights)
    halves = {"pytorch_model-1.bin": names[: len(names) // 2], "pytorch_model-2.bin": names[len(names) // 2 :]}
    for file, half in halves.items():
        torch.save({name: weights[name] for name in half}, folder / file)
    places = {name: file for file, half in halves.items() for name in half}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()


def write_merges(root: Path) -> None:
    """A Whisper model of Hugging Face's whose tokenizer is in vocab.json and merges.txt."""
    folder = root / "merges"
    shutil.copytree(root / "speech" / "library", folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(made["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in made["added_tokens"]}))


def module_at(path: Path) -> Any:
    """The tests of importers know how each library writes its files."""
    spec = importlib.util.spec_from_file_location(f"writers_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_training(folder: Path, texts: Path) -> None:
    folder.mkdir()
    data = str(texts / "pairs.tsv")
    assert main(["train", data, str(folder / "model"), "--dev", data, *TRAINING.split(), "--quiet"]) == 0
    shutil.rmtree(folder / "model")  # what a killed training leaves: its state
