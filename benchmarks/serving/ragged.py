"""A model whose output lengths vary with the source, like translations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np

from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.ort.graphs import OrtModel
from seq2engine.runtime.ort.session import DEFAULT_SETTINGS, OrtSession, OrtSettings
from seq2engine.runtime.search.step_output import Candidates, Reduced, StepOutput
from seq2engine.runtime.session import State

from ..cases import ordinary_ids

COUNT, LONGEST = 256, 200
TINY = dataclasses.replace(PRESETS["tiny"], max_source=LONGEST, max_target=LONGEST)
SMALL = dataclasses.replace(
    TINY, encoder_layers=3, decoder_layers=3, d_model=256, d_ff=1024, source_vocab=4000, target_vocab=4000
)


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths of sources: of sentences and, for a share of the requests, of paragraphs.

    `spread` is the standard deviation of the logarithm, `mean` that of the lengths before they are cut at `most`.
    """

    mean: float
    spread: float
    most: int
    paragraphs: float = 0.0  # share of the requests
    paragraph_mean: float = 0.0
    paragraph_spread: float = 0.0

    def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
        lengths = lognormal(rng, self.mean, self.spread, count)
        if self.paragraphs:
            long = rng.random(count) < self.paragraphs
            lengths = np.where(long, lognormal(rng, self.paragraph_mean, self.paragraph_spread, count), lengths)
        return np.clip(np.rint(lengths), 1, self.most).astype(int)


def lognormal(rng: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    return rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)


# What a server may get: sentences, from a word to a very long one; or nine sentences for every paragraph of some six,
# as where people paste texts beside programs that send sentence by sentence.
LENGTHS = {
    "sentences": Lengths(24, 0.8, LONGEST),
    "paragraphs": Lengths(24, 0.6, 400, paragraphs=0.1, paragraph_mean=150, paragraph_spread=0.5),
}


class RaggedSession(OrtSession):
    """Ends every output after 0.6 to 1.4 times its source's length, determined by the source's tokens."""

    def __init__(self, model: OrtModel, settings: OrtSettings = DEFAULT_SETTINGS):
        super().__init__(model, settings)
        self.ahead = None  # outputs are ended between two steps

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> State:
        state = super().encode(source, source_mask)
        share = 0.6 + 0.8 * ((source * source_mask).sum(axis=1) % 101) / 100  # padding adds nothing
        state["ends"] = np.clip(np.rint(share * source_mask.sum(axis=1)), 1, self.config.max_target)
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
        if state.form.candidates:  # nothing but the best tokens is read
            assert output.reduced is not None
            return with_ends(output, output.reduced, position + 1 >= state["ends"], self.config)
        output.logits[..., self.config.end_id] = np.where(position + 1 >= state["ends"], 1e3, -1e3)[:, None]
        return StepOutput(output.logits)

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        super().replace(state, rows, newcomers, width)
        state["ends"][rows] = newcomers["ends"]


def with_ends(output: StepOutput, reduced: Reduced, ends: np.ndarray, config: ModelConfig) -> StepOutput:
    """The end token is the best one where a source [B] ends, and nowhere else.

    In its place stands the second best token or, of a step that puts out the best one only, any other.
    """
    tokens = reduced.candidates.tokens.copy()  # [B, K, C]
    first, end = tokens[..., 0], config.end_id
    other = tokens[..., 1] if tokens.shape[2] > 1 else ordinary_id(config)
    tokens[..., 0] = np.where(ends[:, None], end, np.where(first == end, other, first))
    return StepOutput(output.raw, Reduced(Candidates(tokens, reduced.candidates.logits), reduced.exp_sum))


@cache
def ordinary_id(config: ModelConfig) -> int:
    return int(ordinary_ids(config)[0])


def ragged_sources(
    config: ModelConfig, count: int = COUNT, seed: int = 0, lengths: Lengths = LENGTHS["sentences"]
) -> list[list[int]]:
    """Random sources of such lengths, in no order."""
    rng = np.random.default_rng(seed)
    found = np.minimum(lengths.drawn(count, rng), config.max_source)
    return [rng.choice(ordinary_ids(config), length).tolist() for length in found]
