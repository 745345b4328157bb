"""Where in the audio a token is: the cheapest monotonic path through the weights of the alignment heads (DTW).

text -> teacher forcing -> weights [heads, tokens, positions] -> normalised, smoothed, mean of heads -> path
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from seq2engine.export.contract import attention_name

from ..session import Session, State
from ..steps.tree_cache import TreeStep

if TYPE_CHECKING:
    from .decoding import Window, WindowDecoder

SMOOTHING = 7  # positions that a median is taken of


@dataclass(frozen=True)
class Forced:
    """Given tokens that were fed to a model: the logits [T,V] after each, and weights [heads,T,S] at each."""

    logits: np.ndarray
    weights: np.ndarray


def alignment_heads(decoder: WindowDecoder) -> Sequence[tuple[int, int]]:
    """The model's own, or all heads of the later half of its layers."""
    layers, heads = decoder.config.decoder_layers, decoder.config.heads
    later = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    return decoder.speech.alignment_heads or later


def forced_run(session: Session, state: State, tokens: Sequence[int], heads: Sequence[tuple[int, int]]) -> Forced:
    """Feeds tokens to a state of one source."""
    tree = TreeStep(session, state, 1, 1, len(tokens))
    layers = sorted({layer for layer, _ in heads})
    logits, weights = [], []
    for token in tokens:
        answer = tree(np.array([[token]], dtype=np.int64), np.zeros((1, 1), dtype=np.int64))
        logits.append(np.array(answer.logits[0, 0], dtype=np.float32))
        seen = {layer: session.tensor(state, attention_name(layer))[0, :, 0] for layer in layers}  # [H, S]
        weights.append(np.stack([seen[layer][head] for layer, head in heads]))
    return Forced(np.stack(logits), np.stack(weights, axis=1).astype(np.float32))


def token_times(decoder: WindowDecoder, window: Window, text: Sequence[int], frames: int) -> tuple[np.ndarray, ...]:
    """The start position of each of N text tokens, and the end of the last [N+1]; and their probabilities [N].

    Only positions of the window's own frames count.
    """
    language = window.language
    asked = [decoder.config.start_id, *decoder.speech.prompt(language, decoder.options.task, timestamps=False)]
    fed = [*asked, *text, decoder.config.end_id]
    run = forced_run(decoder.session, decoder.encoded(window), fed, alignment_heads(decoder))
    matrix = evidence(run.weights[:, :, : frames // 2])[len(asked) - 1 : -1]  # a row for every token that follows
    rows, places = cheapest_path(-matrix.astype(np.float64))
    starts = places[np.flatnonzero(np.diff(rows, prepend=-1))]
    likely = run.logits[len(asked) - 1 : -2, : decoder.config.end_id].astype(np.float64)
    likely = np.exp(likely - likely.max(axis=1, keepdims=True))
    probabilities = likely[np.arange(len(text)), list(text)] / likely.sum(axis=1)
    return starts, probabilities


def evidence(weights: np.ndarray) -> np.ndarray:
    """Weights [heads,T,S] -> [T,S], normalised and filtered: how strongly each token attends to each position."""
    weights = weights / weights.sum(axis=-1, keepdims=True)  # over these positions only
    spread = weights.std(axis=1, keepdims=True)
    usual = np.where(spread > 0, spread, 1.0)
    standing_out = (weights - weights.mean(axis=1, keepdims=True)) / usual
    smooth: np.ndarray = median_filtered(standing_out, SMOOTHING).mean(axis=0)
    return smooth


def median_filtered(values: np.ndarray, width: int) -> np.ndarray:
    """The median of `width` neighbours along the last axis, which is mirrored at its ends; as it is if too short."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    wide = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(wide, width, axis=-1), axis=-1)
    return found


def cheapest_path(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Costs [T,S] -> rows and columns of the cheapest path from the first corner to the last (dynamic time warping).

    A step goes down, right or both. Of equally cheap ways, the one to the right is taken. Cells of one diagonal do not
    depend on each other, so that a diagonal is one operation.
    """
    height, width = cost.shape
    total = np.full((height + 1, width + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0.0
    came = np.zeros((height + 1, width + 1), dtype=np.int8)  # 0 from both, 1 from above, 2 from the left
    for diagonal in range(2, height + width + 1):
        i = np.arange(max(1, diagonal - width), min(height, diagonal - 1) + 1)
        j = diagonal - i
        both, above, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        total[i, j] = cost[i - 1, j - 1] + np.choose(way, (both, above, left))
        came[i, j] = way
    came[0, :], came[:, 0] = 2, 1
    rows, columns = [], []
    row, column = height, width
    while row > 0 or column > 0:
        rows.append(row - 1)
        columns.append(column - 1)
        back = int(came[row, column])
        row, column = row - (back != 2), column - (back != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])
