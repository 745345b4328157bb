"""Mutations of bytes, and of what a path is: cut off, flipped, doubled; a pipe, a loop of links, a link out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random


def mutated_bytes(rng: Random, content: bytes) -> bytes:
    data = bytearray(content)
    how = rng.random()
    if not data or how < 0.03:
        return rng.choice((b"", b"\0" * 64, os.urandom(0) + bytes(rng.randrange(256) for _ in range(64))))
    if how < 0.55:
        head = len(data) if rng.random() < 0.5 else min(len(data), 2048)  # headers are at the beginning
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            data[rng.randrange(head)] = rng.randrange(256)
    elif how < 0.7:
        del data[rng.randrange(len(data)) :]
    elif how < 0.8:
        start = rng.randrange(len(data))
        del data[start : start + rng.choice((1, 2, 8, 64))]
    elif how < 0.9:
        start = rng.randrange(len(data))
        data[start:start] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8, 64))))
    else:
        start = rng.randrange(len(data))
        size = rng.choice((4, 8))
        data[start : start + size] = rng.choice(
            (b"\xff" * size, b"\0" * size, b"\x7f" * size, b"\xff" * (size - 1) + b"\x7f")
        )
    return bytes(data)


def mutated_path(rng: Random, path: Path, outside: Path) -> str:
    """Puts something else in the place of a file; returns what."""
    kinds = ("fifo", "loop", "link out", "folder", "missing", "device", "hard link", "dangling", "link in")
    kind = rng.choice(kinds)
    content = path.read_bytes()
    if kind == "hard link":
        os.link(path, path.with_name(path.name + ".second"))
        return kind
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link out":
        (outside / "copy").write_bytes(content)
        path.symlink_to(outside / "copy")
    elif kind == "link in":
        path.with_name("moved").write_bytes(content)
        path.symlink_to("moved")
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    return kind


def planted_folder(rng: Random, bundle: Path, outside: Path) -> str:
    """Makes a folder that commands write into a link to elsewhere."""
    name = rng.choice(("reports", "engines"))
    shutil.rmtree(bundle / name, ignore_errors=True)
    (bundle / name).symlink_to(outside)
    return f"{name} is a link out"
