"""Our beam search is Hugging Face's: same tokens, same scores, on the same random models.

The more sources the surer: SEQ2ENGINE_PROOF=1500 pytest <this file> -k random.
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.hugging_face_models import wandering_marian
from support.rounding import of_written_logits
from support.scripted_step import run
from transformers import GenerationConfig, MarianMTModel

from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, Special
from seq2engine.runtime.search.step_output import StepOutput

VOCAB, PAD, END = 40, 0, 1
SPECIAL = Special(start=PAD, end=END)  # Marian starts on the padding token
MAX_LENGTH = 10
NEVER = MAX_LENGTH + 1
PROOF = int(os.environ.get("SEQ2ENGINE_PROOF", "72"))  # random sources to compare

# name -> scale of the output weights, what the end token's logit is raised by
MODELS = {
    "flat": (1.0, 1.5),
    "flat, ends at once": (1.0, 4.0),
    "middling": (2.0, 4.0),
    "peaky": (4.0, 8.0),
    "very peaky": (12.0, 18.0),
    "never ends": (4.0, -100.0),
}
BEAMS, PENALTIES = (2, 4, 8), (-1.0, 0.0, 0.6, 1.0, 2.0)
EARLY_STOPPING: tuple[bool | str, ...] = (True, False, "never")
# All combinations of options, the models in turn: in this order every model meets every value.
CASES = [
    (*options, name)
    for options, name in zip(itertools.product(BEAMS, EARLY_STOPPING, PENALTIES), itertools.cycle(MODELS), strict=False)
]


@cache
def marian(name: str) -> MarianMTModel:
    """In fp64, so that batching and padding cannot move a logit by a visible amount."""
    return wandering_marian(VOCAB, PAD, END, *MODELS[name], dtype=torch.float64)


@cache
def sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve sources of 1 to 12 tokens, padded: ids and mask [12,12]."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 13))
    ids = torch.from_numpy(np.random.default_rng(1).integers(2, VOCAB, (12, 12)))
    mask = torch.arange(12) < torch.from_numpy(lengths)[:, None]
    return ids.masked_fill(~mask, PAD), mask.long()


class MarianStep:
    """A Step that runs the whole prefix through the library's own model each time: nothing of ours but the search."""

    def __init__(self, model: MarianMTModel, ids: torch.Tensor, mask: torch.Tensor):
        self.model, self.mask = model, mask
        with torch.inference_mode():
            self.states = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        self.prefixes: torch.Tensor | None = None  # [B, K, T]

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        batch, beam = tokens.shape
        new = torch.from_numpy(tokens)[..., None]
        if self.prefixes is None:
            self.prefixes = new
        else:
            before = self.prefixes[torch.arange(batch)[:, None], torch.from_numpy(parents)]
            self.prefixes = torch.cat([before, new], dim=-1)
        with torch.inference_mode():
            answer = self.model(
                encoder_outputs=(self.states.repeat_interleave(beam, dim=0),),
                attention_mask=self.mask.repeat_interleave(beam, dim=0),
                decoder_input_ids=self.prefixes.flatten(0, 1),
                use_cache=False,
            )
        return StepOutput(answer.logits[:, -1].float().numpy().reshape(batch, beam, VOCAB))

    def keep(self, rows: np.ndarray) -> None:
        assert self.prefixes is not None
        kept = torch.from_numpy(rows)
        self.states, self.mask, self.prefixes = self.states[kept], self.mask[kept], self.prefixes[kept]


def library_answer(model: Any, ids: torch.Tensor, mask: torch.Tensor, options: SearchOptions) -> list[list[Hypothesis]]:
    """The result of `generate`, in our types."""
    config = GenerationConfig(
        num_beams=options.beam,
        num_return_sequences=options.nbest,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        max_length=options.max_length + 1,  # the library counts the start token
        do_sample=False,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
        # Marian's defaults rewrite the logits: no padding token may be output, and the end token must be at the maximum
        # length. They are rules about a vocabulary, not part of beam search, so they are off.
        bad_words_ids=None,
        forced_eos_token_id=None,
        forced_bos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # `generate` fills unset options from the model's own generation config, so that one must not say otherwise either.
    model.generation_config = config
    with torch.inference_mode():
        answer = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    scores = answer.sequences_scores.tolist() if options.beam > 1 else [float("nan")] * len(ids)
    found = [
        Hypothesis(without_padding(row[1:]), score)
        for row, score in zip(answer.sequences.tolist(), scores, strict=True)
    ]
    return [found[place : place + options.nbest] for place in range(0, len(found), options.nbest)]


def without_padding(row: list[int]) -> tuple[int, ...]:
    """Up to the end token: what follows it is padding, while a padding token before it was output by the model."""
    return tuple(row[: row.index(END) + 1] if END in row else row)


def assert_same(
    ours: list[list[Hypothesis]], library: list[list[Hypothesis]], model: MarianMTModel, options: SearchOptions
) -> None:
    """Tokens exactly, with no excuse for ties (the closest two candidates of all cases are 2e-5 apart).

    Both read the same fp64 logits, which our search takes in fp32.
    """
    rows = model.lm_head.weight.detach().norm(dim=1).max() * model.config.d_model**0.5  # a norm's output is so long
    near = of_written_logits(VOCAB, float(rows + model.final_logits_bias.abs().max()))
    for our_nbest, library_nbest in zip(ours, library, strict=True):
        assert [found.tokens for found in our_nbest] == [found.tokens for found in library_nbest]
        assert [found.score for found in our_nbest] == near.scores(library_nbest, options)


@pytest.mark.slow
@pytest.mark.parametrize(("beam", "early_stopping", "penalty", "name"), CASES)
def test_a_batch_gives_what_generate_gives_for_each_source_alone(
    beam: int, early_stopping: bool | str, penalty: float, name: str
) -> None:
    model, (ids, mask) = marian(name), sources()
    options = SearchOptions(MAX_LENGTH, beam, penalty, early_stopping, nbest=beam)
    ours, _ = run(beam_search(MarianStep(model, ids, mask), len(ids), SPECIAL, options))
    library = [
        nbest
        for row, length in enumerate(mask.sum(dim=1))
        for nbest in library_answer(model, ids[row, None, :length], mask[row, None, :length], options)
    ]
    assert_same(ours, library, model, options)


@pytest.mark.parametrize("name", MODELS)
def test_random_sources_with_random_options(name: str) -> None:
    model, batch = marian(name), 6
    for case in range(max(PROOF // batch // len(MODELS), 1)):
        random = np.random.default_rng([list(MODELS).index(name), case])
        beam = int(random.choice([1, 2, 4, 8]))
        early_stopping = EARLY_STOPPING[random.integers(3)]
        penalty = float(random.choice([0.0, 0.6, 1.0, 2.0]))
        nbest = int(random.integers(1, beam + 1))
        options = SearchOptions(int(random.integers(4, 14)), beam, penalty, early_stopping, nbest)
        mask = torch.arange(12) < torch.from_numpy(random.integers(1, 13, (batch, 1)))
        ids = torch.from_numpy(random.integers(2, VOCAB, (batch, 12))).masked_fill(~mask, PAD)

        search = greedy_search if beam == 1 else beam_search
        ours, _ = run(search(MarianStep(model, ids, mask.long()), batch, SPECIAL, options))
        library = library_answer(model, ids, mask.long(), options)
        if beam == 1:  # `generate` gives no scores
            library = [[Hypothesis(b.tokens, o.score)] for [b], [o] in zip(library, ours, strict=True)]
        assert_same(ours, library, model, options)


@pytest.mark.each_value
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("name", MODELS)
def test_in_generate_too_a_source_does_not_change_once_it_is_done(name: str, early_stopping: bool | str) -> None:
    model, (ids, mask) = marian(name), sources()
    options = SearchOptions(MAX_LENGTH, 4, 0.6, early_stopping, nbest=4)
    ours, _ = run(beam_search(MarianStep(model, ids, mask), len(ids), SPECIAL, options))
    assert_same(ours, library_answer(model, ids, mask, options), model, options)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_generate_without_beams(name: str) -> None:
    model, (ids, mask) = marian(name), sources()
    options = SearchOptions(MAX_LENGTH)
    ours, _ = run(greedy_search(MarianStep(model, ids, mask), len(ids), SPECIAL, options))
    library = library_answer(model, ids, mask, options)
    assert [nbest[0].tokens for nbest in ours] == [nbest[0].tokens for nbest in library]


def test_the_cases_are_about_what_they_claim() -> None:
    """Every model meets every option, its sources end early, late and never, and they leave the batch on the way."""
    for place, values in enumerate((BEAMS, EARLY_STOPPING, PENALTIES)):
        assert {(case[3], case[place]) for case in CASES} == set(itertools.product(MODELS, values))

    ids, mask = sources()
    lengths: dict[str, set[int]] = {name: set() for name in MODELS}
    sizes: dict[str, set[int]] = {name: set() for name in MODELS}
    likeliest: dict[str, float] = {}
    for name, early_stopping in itertools.product(MODELS, EARLY_STOPPING):
        options = SearchOptions(MAX_LENGTH, beam=4, early_stopping=early_stopping)
        hypotheses, emitted = run(beam_search(MarianStep(marian(name), ids, mask), len(ids), SPECIAL, options))
        lengths[name] |= {len(best.tokens) if best.tokens[-1] == END else NEVER for best, *_ in hypotheses}
        sizes[name] |= {len(emission.sources) for emission in emitted}
        likeliest[name] = float(torch.from_numpy(emitted[0].answer.logits).softmax(dim=-1).max(dim=-1).values.mean())
    assert lengths["flat, ends at once"] == {1}
    assert lengths["never ends"] == {NEVER}
    for name in ("flat", "middling", "peaky", "very peaky"):
        assert len(lengths[name]) >= 4
        assert NEVER in lengths[name]
        assert len(sizes[name]) >= 2
    assert likeliest["flat"] < 0.1 < likeliest["middling"] < 0.3 < likeliest["peaky"] < 0.7 < likeliest["very peaky"]
