"""A random model whose output lengths vary with the source, like translations."""

from __future__ import annotations

import dataclasses

import numpy as np

from seq2engine.model.config import PRESETS, ModelConfig
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.step_output import Candidates, Reduced, StepOutput
from seq2engine.runtime.session import State

from ..cases import ordinary_ids

COUNT, LONGEST, MEAN = 256, 200, 24
TINY = dataclasses.replace(PRESETS["tiny"], max_source=LONGEST, max_target=LONGEST)
SMALL = dataclasses.replace(
    TINY, encoder_layers=3, decoder_layers=3, d_model=256, d_ff=1024, source_vocab=4000, target_vocab=4000
)


class RaggedSession(OrtSession):
    """Ends every output after 0.6 to 1.4 times its source's length, determined by the source's tokens."""

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> State:
        state = super().encode(source, source_mask)
        share = 0.6 + 0.8 * ((source * source_mask).sum(axis=1) % 101) / 100  # padding adds nothing
        state["ends"] = np.clip(np.rint(share * source_mask.sum(axis=1)), 1, LONGEST)
        return state

    def step(
        self,
        state: State,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        output = super().step(state, tokens, position, write_index, self_mask, slot_position)
        if state.form.candidates:  # nothing but the two best tokens is read
            assert output.reduced is not None
            return with_ends(output, output.reduced, position + 1 >= state["ends"], self.config.end_id)
        output.logits[..., self.config.end_id] = np.where(position + 1 >= state["ends"], 1e3, -1e3)[:, None]
        return StepOutput(output.logits)

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        super().replace(state, rows, newcomers, width)
        state["ends"][rows] = newcomers["ends"]


def with_ends(output: StepOutput, reduced: Reduced, ends: np.ndarray, end: int) -> StepOutput:
    """The end token is the best one where a source [B] ends, and nowhere else."""
    tokens = reduced.candidates.tokens.copy()  # [B, K, C]
    first, second = tokens[..., 0], tokens[..., 1]
    tokens[..., 0] = np.where(ends[:, None], end, np.where(first == end, second, first))
    return StepOutput(output.raw, Reduced(Candidates(tokens, reduced.candidates.logits), reduced.exp_sum))


def ragged_sources(config: ModelConfig, count: int = COUNT, seed: int = 0) -> list[list[int]]:
    """Lengths are lognormal with a mean of 24 tokens and at most 200, in no order."""
    rng = np.random.default_rng(seed)
    spread = 0.8
    lengths = np.clip(np.rint(rng.lognormal(np.log(MEAN) - spread**2 / 2, spread, count)), 1, LONGEST).astype(int)
    return [rng.choice(ordinary_ids(config), length).tolist() for length in lengths]
