"""`inspect` as a page: graphs, engines, fp32 fallback nodes, calibration, files, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seq2engine.common.about import HASH_LENGTH, about_rows
from seq2engine.common.page import badge_html, code_html, page_from_template, words_html
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.engines import listed_passports
from seq2engine.export.artifact.files import FileProblem, listed_files
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.engines.foreign_step import ForeignStep
from seq2engine.inspection.describe import (
    ENGINE_HEAD,
    GRAPH_HEAD,
    HASHES,
    TOKEN_HEAD,
    bundle_summary,
    engine_lines,
    engine_rows,
    graph_rows,
    repair_commands,
    step_rows,
    tensors_text,
    token_rows,
)
from seq2engine.model.config import ModelConfig

SHOWN = len(ENGINE_HEAD) - len(HASHES)  # columns of engines; hashes have a table of their own: all would be too wide


def inspect_html(
    bundle: Bundle,
    problems: Sequence[FileProblem],
    hashed: bool,
    command: str = "",
    foreign: ForeignStep | None = None,
) -> str:
    """The whole page; `hashed`: the files were hashed, not only checked for existence."""
    name = bundle.root.resolve().name
    about = about_rows(name, bundle.config.shape, bundle.manifest.checkpoint_sha256, command)
    made_by = ", ".join(f"{package} {number}" for package, number in bundle.manifest.made_by.items())
    values = {
        "title": f"Bundle {name}",
        "subtitle": bundle_summary(bundle),
        "about_rows": [*about, ("exported with", made_by)],
        "hashed": hashed,
        "problems": [(problem.path, problem.problem) for problem in problems],
        "repairs": repair_commands(bundle, problems),
        "graph_head": GRAPH_HEAD,
        "graphs": graph_rows(bundle),
        "calibration": calibration_text(bundle),
        "fallback_nodes": fallback_rows(bundle),
        "engine_head": ENGINE_HEAD[:SHOWN],
        "token_head": TOKEN_HEAD,
        "hash_head": ("engine", *HASHES),
        "engines": [
            engine_values(path, passport, bundle.config) for path, passport in listed_passports(bundle).items()
        ],
        "foreign": None if foreign is None else step_rows(bundle, foreign),
        "files": file_rows(bundle),
    }
    return page_from_template("seq2engine.inspection", "inspect.html", values)


def calibration_text(bundle: Bundle) -> str:
    """The decodes that measured value ranges, by which nodes stay in fp32; empty where nothing was calibrated."""
    decodes = bundle.manifest.calibration
    return f"{decodes['sources']} sources ({decodes['corpus']}), {decodes['steps']} decoder steps" if decodes else ""


def fallback_rows(bundle: Bundle) -> list[tuple[object, ...]]:
    """Nodes that stay in fp32 where the rest is narrower, and why."""
    return [
        (precision, name, node, words_html(why))
        for precision, graphs in bundle.manifest.graphs.items()
        for name, entry in graphs.items()
        for node, why in entry.fp32_nodes.items()
    ]


def engine_values(name: str, passport: Passport, config: ModelConfig) -> dict[str, Any]:
    rows = engine_rows(passport, config)
    tensors = [
        (engine, side, words_html(tensors_text(found)))
        for engine, entry in passport.engines.items()
        for side, found in (("inputs", entry.inputs), ("outputs", entry.outputs))
    ]
    return {
        "name": name,
        "lines": engine_lines(passport),
        "rows": [row[:SHOWN] for row in rows],
        "tokens": token_rows(passport),
        "hashes": [(row[0], *map(code_html, row[SHOWN:])) for row in rows],
        "tensors": tensors,
    }


def file_rows(bundle: Bundle) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for file in listed_files(bundle):
        path = bundle.root / file.path
        size: object = f"{path.stat().st_size / 1e6:.2f}" if path.is_file() else badge_html("missing", "bad")
        rows.append((file.path, file.what, size, code_html(file.sha256[:HASH_LENGTH])))
    return rows
