"""What the decoder is fed before it decodes: the text of before, the start token, language, task and no-timestamps.

A prompt is no output: it is not searched, costs nothing and has no length. What the model makes of the start token is
read on the way: the probability that there is no speech, and the language.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seq2engine.model.speech import SpeechConfig

from ..search.step_output import StepOutput
from ..tree_cache import TreeStep


def prompt_tokens(
    speech: SpeechConfig,
    start: int,
    room: int,
    language: str | None,
    task: str,
    timestamps: bool,
    previous: Sequence[int] = (),
) -> list[int]:
    """The prompt of one window. Of the text before it, as many tokens are kept as leave half of the `room`."""
    asked = [start, *speech.prompt(language, task, timestamps)]
    kept = list(previous)[-(room // 2 - 1) :] if room // 2 > 1 else []
    return [speech.start_of_previous, *kept, *asked] if kept else asked


class PromptedStep:
    """A `Step` that feeds each source its prompt before the first call, which then feeds the prompts' last tokens.

    What comes behind the start token is of one length for all. `at_start` are the logits [B,V] after that token: from
    the call that reads the prompts or, where it is their last token, from the first step.
    """

    def __init__(self, tree: TreeStep, prompts: Sequence[Sequence[int]], start: int):
        self.tree = tree
        found = tree.feed(np.arange(len(prompts)), prompts, [list(prompt).index(start) for prompt in prompts])
        self.at_start = np.stack([found[row] for row in range(len(prompts))]) if found else None

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        answer = self.tree(tokens, parents)
        if self.at_start is None:
            self.at_start = np.array(answer.logits[:, 0])
        return answer

    def keep(self, rows: np.ndarray) -> None:
        self.tree.keep(rows)

    def attention(self) -> np.ndarray:
        return self.tree.attention()


def probabilities_of(logits: np.ndarray, token: int) -> np.ndarray:
    """Logits [B,V] -> the probability [B] of one token, in fp64."""
    exact = logits.astype(np.float64)
    likely = np.exp(exact - exact.max(axis=1, keepdims=True))
    found: np.ndarray = likely[:, token] / likely.sum(axis=1)
    return found


def likeliest_language(logits: np.ndarray, speech: SpeechConfig) -> tuple[str, float]:
    """The logits [V] after the start token -> the code of the language, and its probability among all languages."""
    codes = list(speech.languages)
    own = logits[[speech.languages[code] for code in codes]].astype(np.float64)
    likely = np.exp(own - own.max())
    best = int(own.argmax())
    return codes[best], float(likely[best] / likely.sum())
