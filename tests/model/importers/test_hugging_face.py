"""Imported models compute what the real library computes: its states, its logits, its outputs token for token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fast_cases import rest_slow
from support.hugging_face_models import END, LENGTH, batch_of, in_double, library_outputs, saved, small_model, sources
from support.rounding import double_error

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint, save_checkpoint
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.model.importers.imported import Imported
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import options_from_values
from seq2engine.runtime.session import Session
from seq2engine.runtime.torch_session import TorchSession

UNTIED = {"tie_word_embeddings": False}
SCALED = {"scale_embedding": True}
GATED = {"feed_forward_proj": "gated-gelu"}
# name -> family, seed (those whose outputs wander), fields of the config, fields of the generation config
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "marian, starts on its padding": (
        "marian",
        2,
        {"pad_token_id": 59, "decoder_start_token_id": 59, "activation_function": "swish", "biased": True, **SCALED},
        {"bad_words_ids": [[59]], "forced_eos_token_id": END},
    ),
    "marian, two vocabularies": (
        "marian",
        4,
        {
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 45,
            "biased": True,
            "pad_token_id": 7,
            **SCALED,
        },
        {},
    ),
    "marian, untied": ("marian", 7, {**UNTIED, "activation_function": "relu"}, {"forced_eos_token_id": END}),
    "bart": ("bart", 3, {"biased": True}, {"forced_bos_token_id": 0, "no_repeat_ngram_size": 3}),
    "bart, scaled": ("bart", 2, {"activation_function": "relu", "pad_token_id": 5, **SCALED}, {}),
    "bart, untied": ("bart", 4, {"decoder_layers": 1, **UNTIED}, {"early_stopping": True}),
    "mbart": ("mbart", 2, {"activation_function": "relu", **SCALED}, {"length_penalty": 0.6}),
    "mbart, untied": ("mbart", 2, {"biased": True, "pad_token_id": 4, **UNTIED}, {"forced_bos_token_id": 9}),
    # A padding token that is output has no position in M2M100, and one in ours: no trained model says one.
    "m2m_100": ("m2m_100", 0, {}, {"bad_words_ids": [[1]], "forced_bos_token_id": 11}),
    "m2m_100, padding 6": (
        "m2m_100",
        3,
        {"pad_token_id": 6, "scale_embedding": False, "activation_function": "swish", **UNTIED},
        {"bad_words_ids": [[6]]},
    ),
    "m2m_100, starts on its padding": (
        "m2m_100",
        3,
        {"decoder_start_token_id": 1, "d_model": 28},
        {"bad_words_ids": [[1]]},
    ),
    "pegasus": (
        "pegasus",
        0,
        {"activation_function": "relu", "pad_token_id": 0, "bos_token_id": None, **SCALED},
        {"length_penalty": 0.8},
    ),
    "pegasus, untied": ("pegasus", 1, {"biased": True, **UNTIED}, {}),
    "blenderbot": ("blenderbot", 0, {"biased": True}, {"encoder_no_repeat_ngram_size": 3, "min_length": 3}),
    "blenderbot, scaled": ("blenderbot", 3, {"activation_function": "silu", **SCALED}, {"early_stopping": "never"}),
    "t5": ("t5", 0, {}, {"length_penalty": 0.8}),
    "t5, untied but scaled": ("t5", 1, {"tied": False, "feed_forward_proj": "gelu"}, {}),
    "t5 v1.1": ("t5", 2, {"tied": False, **UNTIED, **GATED}, {"no_repeat_ngram_size": 2}),
    "t5, tied but not scaled": ("t5", 3, {**UNTIED, "feed_forward_proj": "gated-silu", "num_layers": 2}, {}),
    "mt5": ("mt5", 4, {"tied": False}, {"early_stopping": True}),
    "mt5, tied": ("mt5", 5, {"d_kv": 8, "feed_forward_proj": "relu"}, {}),
    "umt5": ("umt5", 1, {"tied": False}, {}),
    "umt5, tied": ("umt5", 6, {"relative_attention_max_distance": 9}, {"forced_bos_token_id": 9}),
}
MAX_LENGTH, BEAM = 14, 4
GREEDY = {"num_beams": 1}


@dataclass(frozen=True)
class Pair:
    """One model twice. `theirs` was read back from the folder, so that it is what a user of the library gets."""

    theirs: Any
    folder: Path
    imported: Imported

    @cached_property
    def expected(self) -> dict[int | None, list[list[int]]]:
        """The library's outputs by beam: greedy, and with its own number of beams."""
        return {1: library_outputs(self.theirs, self.rows, **GREEDY), None: library_outputs(self.theirs, self.rows)}

    @property
    def rows(self) -> list[list[int]]:
        return sources(self.imported.model.config.source_vocab)


# A model of each family, untied ones among them; the others run in `make test-slow`.
FAST = (
    "marian, two vocabularies",
    "bart",
    "mbart, untied",
    "m2m_100, padding 6",
    "pegasus, untied",
    "blenderbot, scaled",
    "t5",
    "t5 v1.1",
    "umt5",
)


@pytest.fixture(scope="module", params=rest_slow(CASES, FAST))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, seed, changes, generation = CASES[request.param]
    model = small_model(family, seed, **changes)
    folder = saved(model, tmp_path_factory.mktemp("model"), max_length=MAX_LENGTH, num_beams=BEAM, **generation)
    return Pair(type(model).from_pretrained(folder).eval(), folder, checkpoint_from_hugging_face(folder))


def test_states_and_logits_are_the_library_s_in_fp64(pair: Pair) -> None:
    """Teacher forcing on a ragged batch, so that a padded position that leaks, or moves a position, is seen."""
    config = pair.imported.model.config
    ids, mask = batch_of(pair.rows, config.pad_id)
    forced = torch.randint(8, config.target_vocab, (len(ids), LENGTH), generator=torch.Generator().manual_seed(5))
    forced[:, 0] = config.start_id
    theirs, ours = in_double(pair.theirs), checkpoint_from_hugging_face(pair.folder).model
    with torch.inference_mode():
        rounded_states, rounded_logits = ours.encode(ids, mask.bool())[0], ours(ids, mask.bool(), forced)
        ours = ours.double()
        their_states = theirs.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        our_states, _ = ours.encode(ids, mask.bool())
        if config.start_id == config.pad_id and theirs.config.model_type == "m2m_100":
            # What stands before counts as a position only step by step, which is how the library generates.
            answers, cache = [], None
            for token in forced.split(1, dim=1):
                states = (their_states,)
                answer = theirs(
                    encoder_outputs=states, attention_mask=mask, decoder_input_ids=token, past_key_values=cache
                )
                cache = answer.past_key_values
                answers.append(answer.logits)
            their_logits = torch.cat(answers, dim=1)
        else:
            their_logits = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=forced).logits
        our_logits = ours(ids, mask.bool(), forced)
    pair.theirs.float()
    own = mask.bool()
    near = double_error(rounded_states[own], our_states[own])
    torch.testing.assert_close(our_states[own], their_states[own], rtol=0, atol=near)
    near = double_error(rounded_logits, our_logits)
    torch.testing.assert_close(our_logits, their_logits, rtol=0, atol=near)
    assert their_logits.std() > 0.1


def outputs(session: Session, pair: Pair, beam: int | None) -> list[list[int]]:
    """Ours, with the imported options, the beam among them unless another is asked for."""
    options = options_from_values(pair.imported.generation, session.limits.target, "generation", beam=beam)
    assert options.max_length == MAX_LENGTH - 1
    return [list(best.tokens) for best, *_ in generate(session, pair.rows, options)]


def test_outputs_are_the_library_s_token_for_token(pair: Pair, tmp_path: Path) -> None:
    expected = pair.expected
    save_checkpoint(pair.imported.model, tmp_path / "checkpoint")
    with TorchSession(load_checkpoint(tmp_path / "checkpoint")) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected
    with open_session(onnx_from_model(pair.imported.model, tmp_path / "bundle", ("fp32",))) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected


def test_the_outputs_compared_are_worth_comparing(pair: Pair) -> None:
    """They depend on the source, use many tokens, and end at various lengths."""
    decoded = [row for rows in pair.expected.values() for row in rows]
    assert len({tuple(row) for row in decoded}) >= 4
    assert len({len(row) for row in decoded}) >= 2
    assert len({token for row in decoded for token in row}) >= 5
