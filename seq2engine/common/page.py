"""Reports as one self-contained HTML file: no script, no font, no image from anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #16202c; --soft: #5b6b7c; --line: #dfe5eb; --paper: #ffffff; --panel: #f5f7fa;
  --good: #12805c; --bad: #b3261e; --warn: #9a6700; --accent: #1f5fbf; --shade: #16202c40; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa8b6; --line: #2b3642; --paper: #0f151b;
  --panel: #161e27; --good: #4cc38a; --bad: #ff8b80; --warn: #e3b341; --accent: #7db0ff; --shade: #000000c0; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 74rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem }
p { max-width: 58rem } .subtitle, .note { color: var(--soft) } .note { font-size: .92rem }
.scroll { overflow-x: auto; margin: .6rem 0 1rem; background-repeat: no-repeat;
  background-image: linear-gradient(90deg, var(--paper) 40%, transparent),
    linear-gradient(270deg, var(--paper) 40%, transparent),
    linear-gradient(90deg, var(--shade), transparent), linear-gradient(270deg, var(--shade), transparent);
  background-position: left, right, left, right; background-size: 2.4rem 100%, 2.4rem 100%, 1rem 100%, 1rem 100%;
  background-attachment: local, local, scroll, scroll } /* a shade at the side where there is more to scroll to */
table { border-collapse: collapse; width: 100%; font-size: .93rem; font-variant-numeric: tabular-nums }
th, td { padding: .42rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
td.words, td .words { white-space: normal; overflow-wrap: break-word; min-width: 17rem } td .words { display: block }
th { color: var(--soft); font-weight: 600 } thead th { white-space: normal; vertical-align: bottom }
table.wide th, table.wide td { padding: .42rem .45rem } table.wide td:not(.number) { white-space: normal }
td.number, th.number { text-align: right }
.badge { display: inline-block; padding: .12rem .6rem; border-radius: 1rem; font-weight: 600; font-size: .9rem;
  color: var(--paper) } .badge.good { background: var(--good) } .badge.bad { background: var(--bad) }
.badge.warn { background: var(--warn) }
dl.about { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem .9rem; margin: .9rem 0 1.4rem;
  padding: .6rem .9rem; background: var(--panel); border-radius: .4rem; font-size: .88rem }
dl.about dt { color: var(--soft) } dl.about dd { margin: 0; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
a { color: var(--accent) }
@media (max-width: 40rem) { body { padding: 1.2rem .8rem 3rem } h1 { font-size: 1.35rem; overflow-wrap: anywhere }
  th, td { white-space: normal; padding: .38rem .5rem } td.words, td .words { min-width: 12rem }
  table.wide, .wide tbody, .wide tr, .wide td { display: block } .wide thead { display: none }
  .wide tr { padding: .5rem 0; border-bottom: 1px solid var(--line) }
  table.wide td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
    text-align: right } table.wide td:empty { display: none }
  .wide td::before { content: attr(data-name); color: var(--soft); text-align: left }
  table.grid, .grid tbody, .grid th, .grid td { display: block } .grid thead { display: none }
  .grid tr { display: flex; flex-wrap: wrap; gap: .3rem; padding: .4rem 0 } .grid th { flex-basis: 100%; border: 0 }
  .grid td { flex: 0 1 5.6rem; border-radius: .3rem }
  .grid td::before { content: attr(data-name); display: block; font-weight: 400; font-size: .8rem;
    color: var(--soft) } }
code { background: var(--panel); padding: .1rem .3rem; border-radius: .25rem }
"""
FITTING = 4  # columns that a phone shows side by side

LONG = 48  # characters of a cell from which on it is a sentence


class Html(str):
    """Text that is HTML already and must not be escaped again."""


def page_html(title: str, subtitle: str, blocks: Iterable[str]) -> str:
    """A whole page from blocks that are HTML already (made by the functions below)."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f'<p class="subtitle">{escape(subtitle)}</p>\n' + "\n".join(blocks) + "\n</body></html>\n"
    )


def heading_html(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def note_html(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def about_html(rows: Sequence[tuple[str, str]]) -> str:
    """What a report is about, as a compact block under its title; rows as `about.about_rows` makes them."""
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="about">{pairs}</dl>'


def badge_html(text: str, kind: str) -> Html:
    """kind: good, bad or warn."""
    return Html(f'<span class="badge {kind}">{escape(text)}</span>')


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers are set right, sentences are wrapped; cells are text unless they are Html.

    On a phone a row of a table with many columns becomes a list of its cells, each with the name of its column.
    """
    wide = len(head) > FITTING

    def cell(name: str, of_numbers: bool, value: object) -> str:
        text = str(value)
        number = of_numbers or (bool(text) and text[0] in "+-.0123456789")
        content = value if isinstance(value, Html) else escape(text)
        long = not isinstance(value, Html) and len(text) > LONG and " " in text
        kind = " class=words" if long else " class=number" if number else ""
        named = f' data-name="{escape(name)}"' if wide else ""
        return f"<td{kind}{named}>{content}</td>"

    body = [list(row) for row in rows]
    numeric = [bool(body) and str(body[0][i])[:1] in set("+-.0123456789") for i in range(len(head))]
    top = "".join(
        f"<th{' class=number' if number else ''}>{escape(name)}</th>"
        for name, number in zip(head, numeric, strict=True)
    )
    lines = "".join("<tr>" + "".join(map(cell, head, numeric, row)) + "</tr>\n" for row in body)
    kind = ' class="wide"' if wide else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
