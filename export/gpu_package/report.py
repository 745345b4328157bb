"""The results as one HTML file: no script, no font, no image from anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from timing import timing_text

STYLE = """
:root { color-scheme: light dark; --ink: #16202c; --soft: #5b6b7c; --line: #dfe5eb; --paper: #fff; --good: #12805c;
  --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa8b6; --line: #2b3642; --paper: #0f151b;
  --good: #4cc38a; --bad: #ff8b80 } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } p { color: var(--soft) } div { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; min-width: 4rem } th { color: var(--soft) }
.good { color: var(--good); font-weight: 600 } .bad { color: var(--bad); font-weight: 600 }
"""


def page(found: Mapping[str, Any]) -> str:
    """`found` is what report.json holds."""
    blocks = [
        f"<p>{verdict(found['passed'])} {escape(found['summary'])}</p>",
        "<h2>Stages</h2>",
        table(("stage", "", "", "seconds"), [stage_row(stage) for stage in found["stages"]]),
    ]
    if found["machine"]:
        blocks += ["<h2>Machine and versions</h2>", table(("", ""), list(found["machine"].items()))]
    if found["engines"]:
        rows = [
            (name, f"{entry['bytes'] / 1e6:.1f} MB", f"{entry.get('seconds', '?')} s", entry["sha256"][:12])
            for name, entry in found["engines"]["engines"].items()
        ]
        built = found["engines"]
        how = f"{built['flavour']} {built['version']}, built {built['built']}; targets: {targets_text(built)}"
        blocks += ["<h2>Engines</h2>", f"<p>{escape(how)}</p>", table(("engine", "size", "built in", "sha256"), rows)]
    if found["timing"]:
        columns = (
            "sources",
            "source tokens",
            "steps",
            "encoder, ms",
            "one step, ms",
            "encoder and all steps, ms",
            "tokens / s",
        )
        why = "Medians, and the range of four fifths of the times. Launches and tokens go through Python in every step."
        blocks += ["<h2>Timing</h2>", f"<p>{why}</p>", table(columns, [timing_row(row) for row in found["timing"]])]
    if found["decodes"]:
        head = ("", "source", "output", "reference", "")
        blocks += ["<h2>Decodes, greedy</h2>", table(head, [decode_row(row) for row in found["decodes"]])]
    if found["checks"]:
        checks = [(verdict(check["passed"]), check["check"], check["detail"]) for check in found["checks"]]
        why = "Errors against the model in fp64; allowed is a multiple of PyTorch's own error at this precision."
        blocks += ["<h2>Parity on recorded inputs</h2>", f"<p>{why}</p>", table(("", "check", "error"), checks)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(found['title'])}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(found['title'])}</h1>\n" + "\n".join(blocks) + "\n</body></html>\n"
    )


class Html(str):
    """Text that is HTML already."""


def verdict(passed: bool) -> Html:
    return Html('<span class="good">PASS</span>' if passed else '<span class="bad">FAIL</span>')


def stage_row(stage: Mapping[str, Any]) -> Sequence[object]:
    return stage["name"], verdict(stage["passed"]), stage["detail"], stage["seconds"]


def timing_row(row: Mapping[str, Any]) -> Sequence[object]:
    times = (timing_text(row[name]) for name in ("encoder", "step", "decode"))
    return row["batch"], row["source"], row["steps"], *times, row["tokens_per_second"]


def decode_row(row: Mapping[str, Any]) -> Sequence[object]:
    return verdict(row["passed"]), row["source"], row["output"], row["expected"], row["detail"]


def targets_text(built: Mapping[str, Any]) -> str:
    return ", ".join(built["targets"]) or "the GPU they were built on"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(map(cell, row)) + "</tr>\n" for row in rows)
    return f"<div><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>"


def cell(value: object) -> str:
    return f"<td>{value if isinstance(value, Html) else escape(str(value))}</td>"
