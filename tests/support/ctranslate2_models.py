"""One random Marian model twice: in CTranslate2, and imported by us."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters.transformers import MarianMTLoader
from transformers import MarianMTModel

from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.torch_session import TorchSession
from support.hugging_face_models import wandering_marian

VOCAB, END, PAD = 41, 0, 40  # CTranslate2 drops the padding token, which has to be the last one
TOKENS = [f"t{token}" for token in range(PAD)]
PENALTIES = (0.0, 0.6, 1.0, 2.0)

# name -> scale of the output weights, what the end token's logit is raised by
MODELS = {
    "flat": (1.0, 1.5),
    "flat, ends at once": (1.0, 6.0),
    "middling": (2.0, 4.0),
    "peaky": (4.0, 8.0),
    "very peaky": (12.0, 18.0),
    "never ends": (4.0, -100.0),
}


def marian(name: str) -> MarianMTModel:
    model = wandering_marian(VOCAB, PAD, END, *MODELS[name], forced_eos_token_id=None)
    with torch.no_grad():
        for part in (model.model.encoder, model.model.decoder):
            part.embed_tokens.weight[PAD] = 0.0  # CTranslate2 starts from zeros
    return model


@dataclass(frozen=True)
class Pair:
    """One model twice: in CTranslate2, and imported by us."""

    theirs: ctranslate2.Translator
    ours: TorchSession


@cache
def pair(name: str, zero_start: bool = True) -> Pair:
    """`zero_start`: the decoder starts from zeros, as Marian's does; else from the end token, fed by both.

    CTranslate2 takes all heads of the last layer for its attention, as we do; its own choice would be the first one.
    """
    model = marian(name)
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "hugging_face"))
        imported = checkpoint_from_hugging_face(Path(folder, "hugging_face"))
        loader = MarianMTLoader()  # the converter itself would ask for a tokenizer
        spec = loader.get_model_spec(model)
        loader.set_vocabulary(spec, TOKENS)
        spec.decoder.start_from_zero_embedding = zero_start
        spec.decoder.alignment_heads = np.int16(0)
        spec.config.eos_token, spec.config.unk_token, spec.config.decoder_start_token = TOKENS[END], "t1", TOKENS[END]
        spec.validate()
        Path(folder, "ctranslate2").mkdir()
        spec.save(str(Path(folder, "ctranslate2")))
        translator = ctranslate2.Translator(
            str(Path(folder, "ctranslate2")), compute_type="float32", inter_threads=1, intra_threads=1
        )
    return Pair(translator, TorchSession(imported.model, "fp32", attention=True))
