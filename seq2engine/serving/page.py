"""The page to try a model: one self-contained file that calls the server it was loaded from."""

from __future__ import annotations

from seq2engine.common.heat_map import heat_style, legend_html
from seq2engine.common.page import page_from_template
from seq2engine.runtime.translator import Translator

PACKAGE = "seq2engine.serving"
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_html(model: Translator, name: str, protected: bool) -> str:
    session, own = model.session, model.options()
    values = {
        "title": name,
        "subtitle": f"{session.backend} {session.precision}, {session.config.shape}",
        "heat_style": heat_style(),
        "legend": legend_html(),
        "beam": own.beam,
        "takes_text": model.takes_text,
        "protected": protected,
    }
    return page_from_template(PACKAGE, "try.html", values)
