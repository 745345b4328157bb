"""Reports as one self-contained HTML file: no script, no font, no image from anywhere else.

Pages are Jinja templates in the folder `templates` of the package that makes them. They extend `page.html` and use the
macros of `blocks.html`, both of this package; the functions below are the same macros for pages put together in Python.
Values are escaped unless they are Html.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from seq2engine.common.tables import without_empty_columns

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = "seq2engine.common"
FITTING = 3  # columns that a phone shows side by side
LONG = 48  # characters from which on a cell is wrapped as a sentence
LONGEST = 160  # characters of a cell from which on a phone shows its table like one of many columns
NUMERIC = frozenset("+-.0123456789")  # first characters of a number


class Html(str):
    """Text that is HTML already and must not be escaped again."""

    def __html__(self) -> str:
        """What Jinja asks for."""
        return str(self)


@dataclass(frozen=True)
class Cell:
    kind: str  # number, words or nothing: its CSS class
    column: str
    content: object


@dataclass(frozen=True)
class Table:
    """A table as `blocks.html` draws it."""

    wide: bool  # on a phone a row becomes a list of its cells, each with the name of its column
    columns: list[tuple[str, bool]]  # name, whether it holds numbers
    rows: list[list[Cell]]


def page_from_template(package: str, template: str, values: Mapping[str, object]) -> str:
    """The page that a template of a package makes of values; `title` and `subtitle` are among them."""
    return environment_of(package).get_template(template).render(values)


@lru_cache
def environment_of(package: str) -> Environment:
    """The templates of a package, and those of this one."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    packages = dict.fromkeys((package, HERE))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(table_of=table_of)
    return environment


def macro_html(package: str, template: str, macro: str, *arguments: object) -> Html:
    """One macro of a template, for cells and figures that Python puts in their place."""
    module: Any = environment_of(package).get_template(template).module
    return Html(getattr(module, macro)(*arguments))


def block_html(macro: str, *arguments: object) -> Html:
    return macro_html(HERE, "blocks.html", macro, *arguments)


def page_html(title: str, subtitle: str, blocks: Iterable[str]) -> str:
    """A whole page from blocks that are HTML already (made by the functions below)."""
    return page_from_template(HERE, "page.html", {"title": title, "subtitle": subtitle, "blocks": blocks})


def heading_html(text: str) -> Html:
    return block_html("heading", text)


def note_html(text: str) -> Html:
    return block_html("note", text)


def about_html(rows: Sequence[tuple[str, str]]) -> Html:
    """What a report is about, as a compact block under its title; rows as `about.about_rows` makes them."""
    return block_html("about", rows)


def badge_html(text: str, kind: str) -> Html:
    """kind: good, bad or warn."""
    return block_html("badge", text, kind)


def code_html(text: object) -> Html:
    return block_html("code", text)


def link_html(text: str, address: str) -> Html:
    return block_html("link", text, address)


def words_html(text: object, long: bool = True) -> Html:
    """Text in a cell that is never set as a number; long text is wrapped."""
    return block_html("words", text, long)


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Numbers are set right, sentences are wrapped; cells are text unless they are Html."""
    return block_html("table", head, rows)


def table_of(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A column holds numbers if half of its values are such. Columns without any value are left out."""
    head, body = without_empty_columns(head, [list(row) for row in rows])
    numeric = [holds_numbers([str(row[i]) for row in body]) for i in range(len(head))]
    cells = [[cell_of(*named) for named in zip(head, numeric, row, strict=True)] for row in body]
    wide = len(head) > FITTING or any(len(str(cell.content)) > LONGEST for row in cells for cell in row)
    return Table(wide, list(zip(head, numeric, strict=True)), cells)


def cell_of(column: str, of_numbers: bool, value: object) -> Cell:
    text = str(value)
    if not hasattr(value, "__html__") and len(text) > LONG and " " in text:
        return Cell("words", column, value)
    return Cell("number" if of_numbers or is_number(text) else "", column, value)


def holds_numbers(cells: Sequence[str]) -> bool:
    values = [cell for cell in cells if cell]
    return bool(values) and 2 * sum(map(is_number, values)) >= len(values)


def is_number(text: str) -> bool:
    return text[:1] in NUMERIC
