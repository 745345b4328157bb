"""Flags that take a list, and words in any order: `--precision fp32,fp16`, the flag twice, or words after it.

argparse would give a flag with several values every word up to the next flag, so that a bundle could not come after
it. Here the words after a list flag are its values as long as they look like its items; after a command's last
positional argument (`export CKPT B --precision ...`) all are. If a word could be both, use `=`:
`--precision=fp32 fp16`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

Fits = Callable[[str], object]
MOST_PRECISE = "the most precise supported"  # see export/artifact/default_precision.py
# Flags of other tools -> ours, suggested where a command has it and no spelling is close.
OTHER_NAMES = {"--html": "--out", "--report": "--out", "--device": "--provider", "--dtype": "--precision"}


class ListAction(argparse.Action):
    """Collects the items of a comma-separated value; the flag may be repeated. `fits` tells whether a word is an
    item; `item` converts it."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        fits: Fits,
        item: Callable[[str], Any] = str,
        default: Sequence[Any] | None = None,
        metavar: str | None = None,
        help: str | None = None,
    ):
        super().__init__(option_strings, dest, default=default, metavar=metavar, help=help)
        self.fits, self.item = fits, item

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is self.default else before), *self.items(values)])

    def items(self, text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentError(self, f"an item is missing in {text!r}")
        try:
            return [self.item(part) for part in parts]
        except ValueError:
            raise argparse.ArgumentError(self, f"invalid {self.item.__name__} value: {text!r}") from None


class OptionalValueAction(argparse.Action):
    """A flag with a value, which `fits`, or without one: then it is `const`."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        fits: Fits,
        const: str = "",
        metavar: str | None = None,
        help: str | None = None,
    ):
        super().__init__(option_strings, dest, nargs="?", const=const, metavar=metavar, help=help)
        self.fits = fits

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, with the flag that may have been meant. Flags cannot be abbreviated."""

    renamed: Mapping[str, str] = {}  # flags of older versions -> their names now

    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)
        self.unknown: list[str] = []  # flags of the last command line that this parser does not have

    def error(self, message: str) -> NoReturn:
        if self.unknown and message.startswith("the following arguments are required"):
            message = self.unrecognized(self.unknown)  # a required flag may be the one that was mistyped
        if wrong := re.fullmatch(r"argument command: invalid choice: '(.*)' \(choose from (.*)\)", message):
            message = f"unknown command {wrong[1]}{meant([wrong[1]], re.findall(r'[a-z]+', wrong[2]))}"
        self.exit(2, f"{self.prog}: error: {message}; see: {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)  # argparse's own hides that it could not be written
        else:
            super()._print_message(message, file)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self.with_lists_joined(self.with_command_first(words)), namespace)

    def with_command_first(self, words: Sequence[str]) -> list[str]:
        """Flags may come before the command: `--quiet export` -> `export --quiet`."""
        commands = next((a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)), ())
        at = next((place for place, word in enumerate(words) if word in commands), 0)
        if at and is_flag(words[0]) and self.action_of(words[0]) is None:
            return [words[at], *words[:at], *words[at + 1 :]]
        return list(words)

    def with_lists_joined(self, words: Sequence[str]) -> list[str]:
        """The words with every list in one: `--precision fp32 fp16 CKPT` -> `CKPT --precision=fp32,fp16`.

        Positional words come first: argparse fills all positional arguments, optional ones too, at the first it finds.
        """
        rest = list(words)
        flags: list[str] = []
        placed: list[str] = []
        places = [action for action in self._actions if not action.option_strings]
        free = sum(action.nargs != "*" for action in places)  # positional arguments that are still missing
        if any(isinstance(action, argparse._SubParsersAction) for action in places):
            return rest  # the command's own parser knows its flags
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*placed, *flags, word, *rest]
            if not is_flag(word):
                free -= 1
                placed.append(word)
                continue
            self.refuse_old_name(word)
            action = self.action_of(word)
            if action is None:
                self.unknown.append(word)
            if action is None or "=" in word:
                flags.append(word)
                continue
            if not isinstance(action, ListAction):
                flags += with_value(action, word, rest, free)
                continue
            values = items_at(rest, action.fits if free > 0 else always)
            del rest[: len(values)]
            flags.append(f"{word}={','.join(values)}" if values else word)
        return [*placed, *flags]

    def refuse_old_name(self, word: str) -> None:
        name = word.partition("=")[0]
        if name in self.renamed:
            self.error(f"{name} is now {self.renamed[name]}")

    def action_of(self, word: str) -> argparse.Action | None:
        """The action of the flag that a word names."""
        return self._option_string_actions.get(word.partition("=")[0])

    def unrecognized(self, words: Sequence[str]) -> str:
        """The message for arguments that this parser does not have, with the flags that may have been meant."""
        flags = [word.partition("=")[0] for word in words if is_flag(word)]
        return f"unrecognized arguments: {' '.join(words)}{meant(flags, list(self._option_string_actions))}"


def meant(words: Sequence[str], known: Sequence[str]) -> str:
    """The known words that mistyped words resemble, as the end of an error message; empty where there is none."""
    found = dict.fromkeys(match for word in words if (match := nearest(word, known)))
    return f" (did you mean {', '.join(found)}?)" if found else ""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that a word abbreviates, resembles or is another name of."""
    import difflib

    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1 and len(word) > len("--"):
        return begun[0]
    names = {name.strip("-"): name for name in known}  # without dashes: those alone would make short flags alike
    close = difflib.get_close_matches(word.strip("-"), names, 1)
    if close:
        return names[close[0]]
    return OTHER_NAMES[word] if OTHER_NAMES.get(word) in known else None


def is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and re.fullmatch(r"-\d+(\.\d+)?", word) is None


def with_value(action: argparse.Action, flag: str, rest: list[str], free: int) -> list[str]:
    """A flag that is not a list, with its value, which is removed from the front of `rest`."""
    if action.nargs not in (None, 1, "?") or not rest or is_flag(rest[0]):
        return [flag]
    if isinstance(action, OptionalValueAction) and free > 0 and not action.fits(rest[0]):
        return [f"{flag}={action.const}"]
    return [flag, rest.pop(0)]


def items_at(words: Sequence[str], fits: Fits) -> list[str]:
    """The words up to the next flag: the first in any case, then those that fit."""
    found: list[str] = []
    for word in words:
        if is_flag(word) or (found and not all(fits(part) for part in word.split(","))):
            break
        found.append(word)
    return found


def always(word: str) -> bool:
    return True


# --- what items look like ---------------------------------------------------------------------------------------------


def is_precision(word: str) -> bool:
    from seq2engine.export.contract import PRECISIONS  # late: `seq2engine --help` has no need of it

    return word in PRECISIONS


def is_gpu(word: str) -> bool:
    return re.fullmatch(r"(sm_?)?\d{2,3}|\d{1,2}\.\d", word) is not None


def is_range(word: str) -> bool:
    return re.fullmatch(r"\d+(:\d+:\d+)?", word) is not None


def one_of(*names: str) -> Fits:
    return names.__contains__


def add_precisions(parser: argparse.ArgumentParser, default: Sequence[str] | None, what: str) -> None:
    """`--precision` as a list; `what` describes the default."""
    from seq2engine.export.contract import PRECISIONS

    parser.add_argument(
        "--precision",
        action=ListAction,
        fits=is_precision,
        default=default,
        metavar="PRECISION",
        help=f"one or more of {','.join(PRECISIONS)} (default: {what})",
    )
