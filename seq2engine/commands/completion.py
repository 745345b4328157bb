"""`seq2engine completion`: a script that has a shell complete commands, flags and their values.

The script is written from the parser and lists every word itself: starting Python at each key would be too slow.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from seq2engine.flags.shared import BACKENDS, Commands, add_command

if TYPE_CHECKING:
    from seq2engine.flags.lists import Parser

# Values of flags that argparse itself does not check, by what the flag is called in the arguments.
VALUES = {
    "beam_style": ("huggingface", "ctranslate2"),
    "backend": BACKENDS,
    "cache_form": ("static", "growing"),
    "cluster": ("local", "auto"),
    "flavour": ("tensorrt", "tensorrt_rtx"),
    "metrics": ("errors", "bleu", "chrf"),
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned", "rotary", "relative"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "provider": ("cpu", "cuda", "tensorrt", "nv_tensorrt_rtx"),
    "scenario": ("single", "offline", "server"),
}
PRECISION_FLAGS = ("precision", "add", "draft")
DRAFTS = ("quantised", "none")


@dataclass(frozen=True)
class Flag:
    """A flag for shells. `values` is empty where they cannot be listed; then files are completed."""

    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...]


def add_parser(commands: Commands) -> None:
    summary = "print a script that completes commands and flags: source <(seq2engine completion bash)"
    run = partial(run_completion, commands)
    sub = add_command(commands, "completion", run, summary)
    sub.add_argument("shell", choices=tuple(SCRIPTS), help="bash, zsh or fish")


def run_completion(commands: Commands, args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](commands))
    return 0


def flags_of(parser: Parser) -> list[Flag]:
    formatter = parser._get_formatter()  # puts the default into a help text
    return [
        Flag(
            max(action.option_strings, key=len),
            formatter._expand_help(action) if action.help else "",
            action.nargs != 0,
            values_of(action),
        )
        for action in parser._actions
        if action.option_strings
    ]


def values_of(action: argparse.Action) -> tuple[str, ...]:
    if action.nargs == 0:
        return ()
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.dest in PRECISION_FLAGS:
        from seq2engine.export.contract import PRECISIONS

        auto = ("auto",) if "auto: " in (action.help or "") else ()  # only some commands have it, and explain it
        return (*PRECISIONS, *auto, *(DRAFTS if action.dest == "draft" else ()))
    return VALUES.get(action.dest, ())


def places_of(parser: Parser) -> list[str]:
    """Positional arguments of a command that have a fixed set of values."""
    return [str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()]


def bash_script(commands: Commands) -> str:
    """Completes the value of a flag if its values are known; else flags after a dash, and files."""
    known = {name: flags_of(parser) for name, parser in commands.choices.items()}
    flags = "\n".join(
        f"    {name}) flags='{' '.join(flag.name for flag in found)}'; places='{' '.join(places)}' ;;"
        for name, found in known.items()
        for places in (places_of(commands.choices[name]),)
    )
    values = "\n".join(
        f"    '{name} {flag.name}') values='{' '.join(flag.values)}' ;;"
        for name, found in known.items()
        for flag in found
        if flag.values
    )
    return f"""\
_seq2engine() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command='' flags='--help --version' places='' values='' word
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case "$word" in {"|".join(known)}) command="$word"; break ;; esac
  done
  case "$command" in
    '') places='{" ".join(known)}' ;;
{flags}
  esac
  case "$command $previous" in
{values}
  esac
  if [[ -n "$values" ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  elif [[ -n "$places" ]]; then
    COMPREPLY=($(compgen -W "$places" -- "$current"))
  fi
}}
complete -o default -F _seq2engine seq2engine"""


def zsh_script(commands: Commands) -> str:
    return (
        f"autoload -U +X compinit && compinit -i\nautoload -U +X bashcompinit && bashcompinit\n{bash_script(commands)}"
    )


def fish_script(commands: Commands) -> str:
    lines = [f"complete -c seq2engine -n __fish_use_subcommand -l {name}" for name in ("help", "version")]
    for choice in commands._choices_actions:
        lines.append(f"complete -c seq2engine -f -n __fish_use_subcommand -a {choice.dest} -d {quoted(choice.help)}")
    for name, parser in commands.choices.items():
        seen = f"complete -c seq2engine -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -f -a {quoted(' '.join(places))}" for places in (places_of(parser),) if places]
        for flag in flags_of(parser):
            lines.append(f"{seen} -l {flag.name[2:]}{fish_value(flag)} -d {quoted(flag.help)}")
    return "\n".join(lines)


def fish_value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    return f" -x -a {quoted(' '.join(flag.values))}" if flag.values else " -r"


def quoted(text: str | None) -> str:
    """Quoted for fish, in one line."""
    plain = " ".join((text or "").replace("%%", "%").split())
    return "'" + plain.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
