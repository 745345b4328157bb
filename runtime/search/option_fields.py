"""The fields of the search options and what follows from them. Values are unchecked here: `option_checks` does that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .constraints.timestamps import Timestamps
from .constraints.trie import Trie

LEAST_CANDIDATES = 2  # of one beam: its best and, if that is the end token, the next


@dataclass(frozen=True)
class OptionFields:
    """The fields of `SearchOptions`, which documents them, with unchecked values.

    What several parts of a search ask for is kept: single words of a small model take less than a millisecond.
    """

    max_length: int = 64
    beam: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"
    nbest: int = 1
    min_length: int = 0
    start: int | None = None  # what the decoder is fed first; None: the model's own start token
    forced_bos: int | None = None
    forced_eos: int | None = None
    prompt: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    first_banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    shortlist: tuple[int, ...] | None = None
    no_repeat_ngram: int = 0
    source_no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    beam_style: str = "huggingface"
    patience: float = 1.0
    coverage_penalty: float = 0.0
    phrases: tuple[tuple[int, ...], ...] = ()
    trie: Trie | None = None
    timestamps: Timestamps | None = None
    alternatives: bool = False
    min_alternative_expansion_prob: float = 0.0
    alignments: bool = False
    scores: bool = True
    allowed_log_probs: bool = False
    ignore_eos: bool = False

    @cached_property
    def greedy(self) -> bool:
        """Whether greedy search suffices. With one beam CTranslate2 scores hypotheses in its own way, but if no
        rule changes logits it chooses the same tokens."""
        same_tokens = not self.scores and self.unruled and not self.coverage_penalty
        return self.beam == 1 and (self.beam_style == "huggingface" or same_tokens)

    @cached_property
    def unscored(self) -> bool:
        """Whether only the likeliest tokens are asked for, without scores."""
        return not self.scores and self.greedy and not self.sample and not self.alternatives

    @cached_property
    def unruled(self) -> bool:
        """Whether no rule changes the model's logits at any step."""
        forced = self.forced_start or self.forced_eos is not None or self.alternatives
        return not forced and self.candidates == LEAST_CANDIDATES

    @cached_property
    def candidates(self) -> int:
        """How many of the likeliest tokens always include an allowed one; 0 if no number does.

        Rules that ban tokens by name ban no more than those, and a forced token needs no candidates.
        """
        listed = self.allowed is not None or self.phrases or self.trie is not None or self.timestamps is not None
        repeating = self.no_repeat_ngram or self.source_no_repeat_ngram or self.repetition_penalty != 1.0
        if listed or repeating or any(len(tokens) > 1 for tokens in self.banned):
            return 0
        return LEAST_CANDIDATES + len(self.banned) + len(self.first_banned) + self.bars_eos

    @property
    def greedy_candidates(self) -> int:
        """How many of the likeliest tokens always include the one that greedy search takes; 0 if no number does.

        One fewer than a beam needs: where the model is confident, the second best is far below the best, and to find it
        among many equally unlikely tokens takes longer than all the rest.
        """
        return max(0, self.candidates - LEAST_CANDIDATES + 1)

    @cached_property
    def best(self) -> int:
        """How many of a beam's likeliest tokens, with their scores, suffice where no token is forced; 0 if
        no number does: then searches read all logits."""
        # over what the rules leave:
        renormalises = (self.beam_style == "ctranslate2" or self.allowed_log_probs) and not self.unruled
        if self.sample or self.alternatives or renormalises or not self.candidates:
            return 0
        return self.beam - 1 + self.candidates

    @property
    def bars_eos(self) -> bool:
        """Whether the end token may not come before some length."""
        return self.min_length > 1 and not self.ignore_eos

    @property
    def width(self) -> int:
        """How many sequences of a source are decoded together: K."""
        return self.beam * (self.nbest if self.sample or self.alternatives else 1)

    @property
    def kept(self) -> int:
        """How many hypotheses one search returns: every alternative is a search of its own."""
        return 1 if self.alternatives else self.nbest

    @property
    def needs_attention(self) -> bool:
        return self.alignments or self.coverage_penalty != 0.0

    @property
    def forced_start(self) -> tuple[int, ...]:
        """The tokens that every output is forced to begin with."""
        return self.prefix or (() if self.forced_bos is None else (self.forced_bos,))

    @cached_property
    def always_banned(self) -> frozenset[int]:
        """Single tokens that are banned everywhere. A ban of the end token has no effect, as a search must end."""
        return frozenset(tokens[0] for tokens in self.banned if len(tokens) == 1)
