"""docs/CLI.md, made of the parser: `python -m seq2engine.cli.reference > docs/CLI.md` writes it again."""

from __future__ import annotations

import argparse

from seq2engine.cli.main import make_parser

OPENING = """# Command line

Flags may come before or after the other arguments. Lists take commas or spaces, and flags may be repeated.
Every reporting command has `--json`.
Exit codes: 0 done, 1 an error or a failed parity or comparison, 2 wrong usage, 130 interrupted, 141 closed pipe.
"""


def reference_text() -> str:
    """The whole page: a section for each command, with its arguments and flags."""
    (commands,) = [one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    summaries = {one.dest: one.help or "" for one in commands._choices_actions}
    sections = [section(name, parser, summaries.get(name, "")) for name, parser in commands.choices.items()]
    return "\n".join([OPENING, *sections])


def section(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    """One command: what it does, and a table of what it takes."""
    shown = [one for one in parser._actions if one.help != argparse.SUPPRESS and "--help" not in one.option_strings]
    rows = [row(one, parser) for one in shown]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return f"## seq2engine {name}\n\n{summary[:1].upper()}{summary[1:]}.\n\n{table}\n"


def row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """One argument. Values in its help, such as a default, are filled in as `--help` does it."""
    named = ", ".join(action.option_strings)
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = parser._get_formatter()._format_args(action, metavar) if action.nargs != 0 else ""
    meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| `{cell(f'{named} {value}'.strip())}` | {cell(meaning)} |"


def cell(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference_text(), end="")
