"""The page in a real browser: type, watch it stream, see n-best and the heat map, on a desk and on a phone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.chromium import BINARY, MISSING, Chromium
from support.served import Served

from seq2engine.exporting import export_checkpoint
from seq2engine.runtime.translator import load

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason=MISSING)]
# every text that the page has put there, however many of them the browser tells of at once
WATCH = """
window.seen = [];
new MutationObserver(records => records.forEach(one => one.addedNodes.forEach(node => window.seen.push(node.data))))
  .observe(document.getElementById('output'), {childList: true});
"""
DONE = "document.getElementById('times').textContent"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_checkpoint("shipped:g2p", tmp_path_factory.mktemp("b") / "g2p")


@pytest.fixture(scope="module")
def served(bundle):
    with Served(bundle.root) as server:
        yield server


@pytest.mark.parametrize(("width", "height", "mobile"), [(1280, 900, False), (390, 844, True)])
def test_a_person_tries_the_model(bundle, served, tmp_path, width, height, mobile):
    pictures = Path(os.environ.get("SEQ2ENGINE_PICTURES", tmp_path))
    with load(bundle, threads=1) as model:
        greedy, best = model.translate("internationalisation", beam=1), model.translate("internationalisation", beam=4)
    with Chromium(tmp_path / "profile", width, height, mobile) as page:
        page.open(served.address)
        page.value(WATCH)
        page.type("#text", "internationalisation")
        page.click("#go")
        assert "ms" in page.wait(DONE)
        assert page.value("document.getElementById('output').textContent") == greedy
        seen = page.value("window.seen")
        assert len({len(text) for text in seen if text}) > 3  # it came piece by piece
        assert all(greedy.startswith(text) for text in seen)

        page.type("#beam", "4")
        page.type("#nbest", "3")
        page.click("#go")
        page.wait("document.querySelectorAll('#best li').length === 3 && !document.getElementById('best').hidden")
        assert page.value("document.getElementById('output').textContent") == best

        page.click("#show")
        cells = page.wait("document.querySelectorAll('#map td').length")
        rows = page.value("document.querySelectorAll('#map tbody tr').length")
        assert cells == rows * (len("internationalisation") + 1)
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")  # nothing hangs over the side
        page.picture(pictures / f"serve-{width}.png")

        page.type("#text", "x" * 100)
        page.click("#go")
        assert "101 tokens" in page.wait("document.querySelector('#output.bad')?.textContent")
        page.open(f"{served.address}/docs")
        assert "/translate" in page.value("document.body.textContent")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        page.picture(pictures / f"docs-{width}.png")
        problems = [problem for problem in page.problems if "favicon" not in problem and "404" not in problem]
        assert not problems
