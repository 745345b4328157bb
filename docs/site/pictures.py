"""Pictures of the reports for README: `python docs/site/pictures.py FOLDER` needs chromium on the PATH.

The shipped model is exported, compared and looked into; the benchmark's page is made of a committed result, so that it
does not depend on what else runs here. The top of each page becomes a small PNG in docs/images.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from seq2engine.benchmarks.report.page import bench_html
from seq2engine.benchmarks.result_files import result_from_path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RESULT = ROOT / "benchmarks" / "results" / "base.json"  # the table of docs/BENCHMARK.md
SIZE = "1100,820"
COMMANDS = (
    ("export", "shipped:g2p", "{bundle}", "--force"),
    ("parity", "{bundle}", "--precision", "fp32", "--references", "shipped:g2p", "--count", "256"),
    ("attention", "{bundle}", "transformer"),
)
PAGES = {"parity": "parity-*.html", "bench": "bench.html", "attention": "attention*.html"}


def pictures(folder: Path) -> list[Path]:
    """Writes docs/images/{parity,bench,attention}.png and returns their paths."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: chromium not found, which takes the pictures; install it, for example: apt install chromium")
    bundle = folder / "g2p"
    for command in COMMANDS:
        words = [word.format(bundle=bundle) for word in command]
        subprocess.run([sys.executable, "-m", "seq2engine", *words], check=True, stdout=subprocess.DEVNULL)
    (bundle / "reports" / "bench.html").write_text(bench_html(result_from_path(RESULT)), encoding="utf-8")
    return [screenshot(browser, newest(bundle / "reports", pattern), name) for name, pattern in PAGES.items()]


def newest(reports: Path, pattern: str) -> Path:
    return max(reports.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def screenshot(browser: str, page: Path, name: str) -> Path:
    path = IMAGES / f"{name}.png"
    flags = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}", f"--screenshot={path}")
    subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True)
    return path


if __name__ == "__main__":
    for path in pictures(Path(sys.argv[1])):
        print(f"{path.relative_to(Path.cwd())}  {path.stat().st_size // 1000} kB")
