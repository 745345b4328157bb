"""The documentation is code: its commands are parsed or run, its Python runs, its links and lists match the tree."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "model" / "g2p" / "README.md"]
README_LINES = 120


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    """Lines such as `    seq2engine run BUNDLE  # what it does`, in blocks that are indented or fenced."""
    found = re.findall(r"(?m)^(?:    )?(seq2engine .+)$", re.sub(r"\\\n\s*", "", page.read_text()))
    return [re.sub(r"\s+#.*$", "", line) for line in found if "..." not in line]


def environment() -> dict[str, str]:
    """The commands of this installation first on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path):
    (script,) = blocks(ROOT / "README.md", "sh")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = {path.name.split("-")[0] for path in (tmp_path / "out" / "g2p" / "reports").glob("*.html")}
    assert {"parity", "bench", "index.html"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path):
    """All blocks of a page, one after the other, as a reader would run them."""
    code = "\n".join(blocks(page, "python"))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_is_public(page):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("seq2engine.")], page.name


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES if page.name not in ("LOG.md", "CHANGELOG.md") for line in commands(page)],
    ids=lambda given: given.name if isinstance(given, Path) else given[:60],
)
def test_commands_have_the_flags_of_the_docs(page, line, monkeypatch):
    """They are also right as far as that does not depend on files; peers count as installed."""
    from seq2engine.benchmarks.peers import processes
    from seq2engine.cli.main import parsed
    from seq2engine.cli.usage import check_usage

    monkeypatch.setattr(processes, "python_of", lambda environments, kind: Path(sys.executable))
    words = shlex.split(line.split(" < ")[0].split(" > ")[0])
    args = parsed(words[1:])
    assert args.command
    check_usage(args)


def test_what_is_generated_is_up_to_date():
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import generated
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs" / "CLI.md").read_text() == generated.reference_text(), "run: make readme"
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert contributing == generated.with_tree(contributing), (
        "run: make readme"
    )  # files without a name, names without a file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert not target.startswith("http"), f"{page.name} links outside: {target}"
        assert page.parent.joinpath(target).exists(), f"{page.name} -> {target}"
    for target in re.findall(r"`((?:model|export|runtime|benchmarks|tests|seq2engine|docs)/[\w./]+)`", text):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_the_limits_of_the_security_page_are_those_of_the_code():
    from seq2engine.commands.serving.serve import LONGEST_TOKEN
    from seq2engine.common import inner_paths, json_files
    from seq2engine.export.artifact import graph_files, passport, profiles
    from seq2engine.model import config
    from seq2engine.model.tokenizers.importing import MOST_SENTINELS
    from seq2engine.runtime.cluster.corpus import MOST_ROWS
    from seq2engine.runtime.search.constraints.phrases import MOST
    from seq2engine.runtime.search.option_checks import MOST_BEAMS
    from seq2engine.runtime.serving.fields import MOST_TEXTS
    from seq2engine.runtime.text.lines import LONGEST

    sizes, seen = config.LARGEST, set()

    def all_are(limit: int, *names: str) -> bool:
        seen.update(names)
        return {sizes[name] for name in names} == {limit}

    stated = {
        "256 MB": json_files.LARGEST == 256 << 20,
        "100 levels": json_files.DEEPEST == 100,
        "40 digits": json_files.MOST_DIGITS == 40,
        "255 bytes a name, 1,024 a path": (inner_paths.LONGEST_PART, inner_paths.LONGEST) == (255, 1024),
        "1,024 layers, heads and class tokens": all_are(
            1024, "encoder_layers", "decoder_layers", "heads", "encoder_heads", "class_tokens"
        ),
        "width (of a head, too) 2^17": all_are(1 << 17, "d_model", "d_kv", "encoder_width"),
        "feed-forward 2^20": all_are(1 << 20, "d_ff", "encoder_d_ff"),
        "vocabulary 2^24": all_are(1 << 24, "source_vocab", "target_vocab"),
        "positions 2^20": all_are(1 << 20, "max_source", "max_target", "max_distance"),
        "mel bands and colour channels 2^12": all_are(1 << 12, "mels", "channels"),
        "images and patches 2^14": all_are(1 << 14, "image_height", "image_width", "patch_height", "patch_width"),
        "2^24 numbers": config.LARGEST_TABLE == 1 << 24,
        "10,000 sentinels": MOST_SENTINELS == 10_000,
        "2^31 - 1 bytes": graph_files.LARGEST == (1 << 31) - 1,
        "passport 2^24": passport.LARGEST == 1 << 24,
        "65,536 sources": profiles.MOST_SOURCES == 65_536,
        "4,096 beams": MOST_BEAMS == 4096,
        "62 phrases": MOST == 62,
        "lines of 1 MB": LONGEST == 1 << 20,
        "2^27 rows": MOST_ROWS == 1 << 27,
        "256 texts": MOST_TEXTS == 256,
        "64 KB": LONGEST_TOKEN == 64 << 10,
    }
    page = (ROOT / "docs" / "SECURITY.md").read_text()
    assert [words for words in stated if words not in page] == []
    assert [words for words, true in stated.items() if not true] == []
    assert seen == set(sizes), "a size that the page does not state"


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config), "-d", str(tmp_path)]
    done = subprocess.run(argv, env={**environment(), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "GUIDE.html").is_file()


def test_make_test_cpus_names_tests_that_are_there():
    makefile = (ROOT / "Makefile").read_text()
    (named,) = re.findall(r"^TESTS \?= (.*)$", makefile, re.M)
    assert [path for path in named.split() if not (ROOT / path).exists()] == []
