"""Where fewer sequences exist than hypotheses are asked for, each is given once; `transformers` repeats them."""

from __future__ import annotations

import numpy as np
import torch
from support.hugging_face_models import batch_of, small_model, sources
from transformers import GenerationConfig

from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession

NOTHING = -1e9  # the sum of log-probabilities of a beam that never was
LARGEST_LOGIT = 8.0


def test_an_output_of_one_forced_token_is_one_hypothesis(tmp_path):
    """With one token, which is the forced end, there is one sequence: `generate` of transformers fills up with copies
    of it whose score marks them as none."""
    model = small_model("marian").eval()
    config, rows = model.config, sources()[:2]
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=1,
        forced_eos_token_id=config.eos_token_id,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: getattr(config, name) for name in names},
    )
    ids, mask = batch_of(rows, config.pad_token_id)
    with torch.inference_mode():
        theirs = model.generate(ids, attention_mask=mask)
    assert theirs.sequences[:, 1:].tolist() == [[config.eos_token_id]] * 6
    assert theirs.sequences_scores.tolist() == [0.0, NOTHING, NOTHING] * 2
    model.save_pretrained(tmp_path)
    session = TorchSession(checkpoint_from_hugging_face(tmp_path).model)
    options = SearchOptions(max_length=1, beam=4, nbest=3, forced_eos=config.eos_token_id)
    for found in generate(session, rows, options):
        (only,) = found
        assert only.tokens == (config.eos_token_id,)
        assert (
            abs(only.score) <= LARGEST_LOGIT * np.finfo(np.float32).eps
        )  # a forced token is certain; its logit is rounded
