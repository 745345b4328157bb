"""How far two computations of the same logits, log-probabilities and scores may lie apart by rounding alone.

Nothing here is a guessed tolerance. One operation errs by at most u times its result (u: the unit roundoff, half a unit
in the last place of 1.0). A logit is the end of a chain of sums, and each element of the chain errs anew:

    a sum of n terms      n roundings one after the other; kernels have at least LANES partial sums side by side, so a
                          term passes n / LANES of them, and log2(LANES) where the partial sums meet
    a tensor in memory    one rounding to the type that it is stored in (in fp16 only this one is coarse: sums are fp32)

The roundings of one chain are independent and their mean is zero (Higham and Mary, "A new approach to probabilistic
rounding error analysis", 2019), so they add up by their squares. Norms keep the size of the states as it is, so an
error made in an early layer arrives as large as it was, in relation to the largest logit of its row:

    |logit - exact|  <=  LAMBDA * max|logit| * sqrt(sum over the chain of  passes * u_sum^2 + u_stored^2)

and never more than the plain sum of all these roundings, which is the lesser where they are few. Hoeffding's inequality
gives the factor: a number misses its bound with a chance of 2 exp(-LAMBDA^2 / 2), and LAMBDA = 5 makes that 7e-6 if
every rounding were as large as it can be (they are evenly spread: 8.7 standard deviations). What is left over pays for
layers that amplify: of 26 models (random and trained, both norms, all positions) the worst logit errs by half of its
bound. Two computations err independently, so they lie apart by sqrt(2) times as much. From there:

    log-probability   logit - log(sum of exp(logits)): the second is a mean of the logits' errors off, so both together
                      twice a logit's; it scales with max|logit| and *not* with the log-probability, which may be near 0
    sum of T of them  T times that, for errors of one decode are not independent of each other: they share the source
    score             that sum / length ** length_penalty

Where two computations have all but the output projection in common, bit by bit, the chain is that projection alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from seq2engine.model.config import ModelConfig
from seq2engine.runtime.numerics.teacher_forcing import ForcedRun
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.session import Session

LAMBDA = 5.0
LANES = 4  # of fp32 in SSE2 and NEON; AVX2 has 8, AVX-512 16
FP64, FP32, FP16, BF16 = 2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8
EXP = 6  # roundings in one exponential: vectorised ones are right to 3 units in the last place
UNITS = {  # precision -> unit roundoff of sums and of tensors in memory
    "fp64": (FP64, FP64),
    "fp32": (FP32, FP32),
    "fp16": (FP32, FP16),
    "bf16": (FP32, BF16),
    "w8a8": (FP32, FP32),  # its int8 sums are exact
}


def unit(precision: str) -> tuple[float, float]:
    """Of sums and of tensors; weights in int8, int4 and fp8 are restored to fp16."""
    return UNITS.get(precision, UNITS["fp16"])


def apart(roundings: Sequence[tuple[float, float]]) -> float:
    """How far two computations may lie apart, relative to the largest number, after these roundings (count, size)."""
    likely = LAMBDA * math.sqrt(2 * sum(count * roundoff**2 for count, roundoff in roundings))
    return min(likely, 2 * sum(count * roundoff for count, roundoff in roundings))


def sum_error(width: int, roundoff: float = FP32) -> float:
    """How far two sums of this many products may lie apart, as a part of the largest partial sum."""
    return apart([(passes(width), roundoff)])


def passes(width: int) -> float:
    """Roundings on a term's way through a sum: its product, its lane, and the meeting of the lanes."""
    return 1 + width / LANES + math.log2(LANES)


def exp_sum_error(width: int, roundoff: float = FP32) -> float:
    """Of two sums of this many exponentials, as a part of the sum: so much their logarithms may lie apart."""
    return sum_error(width, roundoff) + apart([(EXP, roundoff)])


def attention_sums(config: ModelConfig, keys: int) -> list[int]:
    """Widths of a block: query (keys and values beside it), scores, softmax, its mean of values, output, norm."""
    return [config.d_model, config.head_dim, keys, keys, config.d_model, config.d_model]


def chain_of(config: ModelConfig, source: int, target: int) -> list[int]:
    """Widths of all sums that a logit is made of, from the first encoder layer to the output projection."""
    feed_forward = [config.d_model, config.d_ff, config.d_model]  # up, down, norm
    encoder = [*attention_sums(config, source), *feed_forward] * config.encoder_layers
    decoder = [*attention_sums(config, target), *attention_sums(config, source), *feed_forward] * config.decoder_layers
    return [*encoder, *decoder, config.d_model, config.d_model]  # the last norm and the projection


@dataclass(frozen=True)
class Rounding:
    """The bounds for one model at one precision. `widths` are of the sums that two computations do not share.

    `largest` is the largest |logit| there is, before rules like a repetition penalty stretch them by `stretch`.
    """

    precision: str
    largest: float
    widths: tuple[int, ...]
    vocab: int
    stretch: float = 1.0

    @property
    def relative(self) -> float:
        """Two logits' or two states' distance as a part of the largest."""
        of_sums, of_tensors = unit(self.precision)
        return apart([*((passes(width), of_sums) for width in self.widths), (len(self.widths), of_tensors)])

    @property
    def logit(self) -> float:
        return self.relative * self.largest * self.stretch

    @property
    def log_prob(self) -> float:
        """Logits come as fp32 numbers whatever the precision (an oracle's as fp64), exp(logit - best) is summed up and
        subtracted."""
        given = FP64 if self.precision == "fp64" else FP32
        return 2 * self.logit + exp_sum_error(self.vocab, given) + apart([(2, given)]) * self.largest * self.stretch

    def score(self, tokens: int, length_penalty: float = 0.0) -> float:
        """Of the sum of this many tokens' log-probabilities, over tokens ** length_penalty."""
        return self.log_prob * tokens / tokens**length_penalty

    def scores(self, expected: Sequence[Hypothesis], options: SearchOptions) -> list[Any]:
        """What the same hypotheses may score: a sum, which beam search divides by length ** length_penalty."""
        penalty = options.length_penalty if options.beam > 1 else 0.0
        return [pytest.approx(one.score, rel=0, abs=self.score(len(one.tokens), penalty)) for one in expected]

    @property
    def attention(self) -> float:
        """Of attention weights, relative: a score (which is no larger than the logits are) stands in an exponent."""
        return self.logit

    def of_projection(self, config: ModelConfig) -> Rounding:
        """Where the states are the same bits and only the output projection is computed in two ways."""
        return dataclasses.replace(self, widths=(config.d_model,))

    def of_normaliser(self) -> Rounding:
        """Where the logits are the same bits too, and only their probabilities are made in two ways."""
        return dataclasses.replace(self, widths=())


def assert_same_outputs(
    ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]], near: Rounding, options: SearchOptions
) -> None:
    """The same tokens, and scores that only rounding sets apart."""
    for mine, other in zip(ours, theirs, strict=True):
        assert [best.tokens for best in mine] == [best.tokens for best in other]
        assert [best.score for best in mine] == near.scores(other, options)


def rounding_from_config(
    config: ModelConfig, largest: float, precision: str = "fp32", source: int = 0, target: int = 0
) -> Rounding:
    """For sources and targets of at most these lengths; 0: as long as the model takes them."""
    chain = chain_of(config, source or config.max_source, target or config.max_target)
    return Rounding(precision, largest, tuple(chain), config.target_vocab)


def of_written_logits(vocab: int, largest: float) -> Rounding:
    """Where logits are written down, rounded to fp32, and a search makes log-probabilities of them."""
    return Rounding("fp32", largest, (), vocab)


def tensor_error(config: ModelConfig, tensor: np.ndarray | Tensor, precision: str = "fp32") -> float:
    """Of any tensor inside the model that is compared with the same tensor computed in another way."""
    return rounding_from_config(config, float(np.abs(np.asarray(tensor, dtype=np.float64)).max()), precision).logit


def attention_error(weights: np.ndarray, config: ModelConfig, precision: str = "fp32") -> float:
    """Of attention weights: a score's error is their relative one, and scores are as large as the weights are apart."""
    seen = weights[weights > 0].astype(np.float64)
    return rounding_from_config(config, float(1 + np.log(seen.max() / seen.min())), precision).logit


def double_error(rounded: Tensor, exact: Tensor) -> float:
    """Of two computations in fp64, by what the same model makes of fp32 (`rounded`) and of fp64 (`exact`).

    For models whose layers amplify more than a bound from widths alone allows: where attention scores are far larger
    than logits, their errors are too. The distance of fp32 tells by how much, and in fp64 all errors are as much less.
    """
    return LAMBDA * float((rounded.double() - exact).abs().max()) * FP64 / FP32


def rounding_from_session(
    session: Session, sources: Sequence[Sequence[int]], steps: int, stretch: float = 1.0
) -> Rounding:
    """With the largest logit of a greedy decode of these sources; that of other decodes of them is of its size."""
    run = ForcedRun(session, sources, steps)
    tokens, largest = np.full(len(sources), session.config.start_id, dtype=np.int64), 0.0
    for _ in range(steps):
        logits = run.step(tokens)
        largest = max(largest, float(np.abs(logits[np.isfinite(logits)]).max()))
        tokens = logits.argmax(axis=-1)
    found = rounding_from_config(session.config, largest, session.precision, max(map(len, sources)), steps)
    return dataclasses.replace(found, stretch=stretch)
