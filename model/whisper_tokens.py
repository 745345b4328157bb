"""OpenAI's two Whisper vocabularies: special ids, and suppressed tokens.

    text tokens, end, start, languages, translate, transcribe, start of language model, start of previous, no speech,
    no timestamps, 0.00 s ... 30.00 s

English-only models have the vocabulary of GPT-2; all others one of their own, with 99 languages
or, since large-v3, 100.
"""

from __future__ import annotations

from dataclasses import dataclass

from .speech import SpeechConfig

CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(CODES.split())
TIMESTAMPS = 1501  # 0.00 to 30.00 s
# Symbols that stand for no speech, such as brackets and notes: single tokens, or the first of several.
ENGLISH_SYMBOLS = (
    "1 2 7 8 9 10 14 25 26 27 28 29 31 58 59 60 61 62 63 90 91 92 93 357 366 438 532 685 705 796 930 1058 1220 1267 "
    "1279 1303 1343 1377 1391 1635 1782 1875 2162 2361 2488 3467 4008 4211 4600 4808 5299 5855 6329 7203 9609 9959 "
    "10563 10786 11420 11709 11907 13163 13697 13700 14808 15306 16410 16791 17992 19203 19510 20724 22305 22935 27007 "
    "30109 30420 33409 34949 40283 40493 40549 47282 49146"
)
MULTILINGUAL_SYMBOLS = (
    "1 2 7 8 9 10 14 25 26 27 28 29 31 58 59 60 61 62 63 90 91 92 93 359 503 522 542 873 893 902 918 922 931 1350 1853 "
    "1982 2460 2627 3246 3253 3268 3536 3846 3961 4183 4667 6585 6647 7273 9061 9383 10428 10929 11938 12033 12331 "
    "12562 13793 14157 14635 15265 15618 16553 16604 18362 18956 20075 21675 22520 26130 26161 26435 28279 29464 31650 "
    "32302 32470 36865 42863 47425 49870 50254"
)
BLANK = 220  # a space alone, in both
# Cross-attention heads that follow the audio, by the model's name, as `layer.head`; published with the models.
ALIGNMENT_HEADS = {
    "tiny.en": "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    "tiny": "2.2 3.0 3.2 3.3 3.4 3.5",
    "base.en": "3.3 4.7 5.1 5.5 5.7",
    "base": "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    "small.en": "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 11.4",
    "small": "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    "medium.en": "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 20.9 20.14 21.12",
    "medium": "13.15 15.4 15.15 16.1 20.0 23.4",
    "large-v1": "9.19 11.2 11.4 11.17 22.7 22.11 22.17 23.2 23.15",
    "large-v2": (
        "10.12 13.17 16.11 16.12 16.13 17.15 17.16 18.4 18.11 18.19 19.11 21.2 21.3 22.3 22.9 22.12 23.5 23.7 23.13 "
        "25.5 26.1 26.12 27.15"
    ),
    "large-v3": "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6",
    "large-v3-turbo": "2.4 2.11 3.3 3.6 3.11 3.14",
}
SAME = {"large": "large-v3", "turbo": "large-v3-turbo"}


@dataclass(frozen=True)
class Layout:
    """The special tokens of a vocabulary, all but the first text token counted from the end token."""

    end: int
    languages: int

    @property
    def start(self) -> int:
        return self.end + 1

    @property
    def tasks(self) -> int:
        """The first token after the languages."""
        return self.start + 1 + self.languages

    @property
    def multilingual(self) -> bool:
        return self.end == 50257

    def special_tokens(self) -> list[str]:
        """Their names in the order of their ids, from the end token on, timestamps last."""
        names = ["endoftext", "startoftranscript", *LANGUAGES[: self.languages], "translate", "transcribe"]
        names += ["startoflm", "startofprev", "nospeech", "notimestamps"]
        return [f"<|{name}|>" for name in names] + [f"<|{i * 0.02:.2f}|>" for i in range(TIMESTAMPS)]


def layout_of(vocabulary: int) -> Layout | None:
    """The layout of a vocabulary of that size; None if it is none of OpenAI's."""
    end = 50256 if vocabulary == 51864 else 50257
    languages = vocabulary - end - 8 - TIMESTAMPS
    return Layout(end, languages) if languages in (99, 100) else None


def speech_from_layout(layout: Layout, heads: tuple[tuple[int, int], ...]) -> SpeechConfig:
    """How OpenAI decodes a model of this vocabulary."""
    tasks = layout.tasks
    symbols = MULTILINGUAL_SYMBOLS if layout.multilingual else ENGLISH_SYMBOLS
    never = [layout.start, *range(tasks, tasks + 5)]  # start, tasks, start of language model and previous, no speech
    first = layout.start + 1
    codes = LANGUAGES[: layout.languages] if layout.multilingual else []
    return SpeechConfig(
        transcribe=tasks + 1,
        translate=tasks,
        start_of_previous=tasks + 3,
        no_speech=tasks + 4,
        no_timestamps=tasks + 5,
        languages={code: first + i for i, code in enumerate(codes)},
        suppressed=tuple(sorted([*map(int, symbols.split()), *never])),
        first_suppressed=(BLANK, layout.end),
        alignment_heads=heads,
    )


def alignment_heads(name: str, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """The heads of a model by its name, such as tiny.en; of one without a name those of the upper layers."""
    known = ALIGNMENT_HEADS.get(SAME.get(name, name))
    if known is not None:
        pairs = [one.split(".") for one in known.split()]
        found = tuple((int(layer), int(head)) for layer, head in pairs)
        if all(layer < layers and head < heads for layer, head in found):
            return found
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
