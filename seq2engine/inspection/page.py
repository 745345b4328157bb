"""`inspect` as a page: graphs, engines, fp32 fallback nodes, calibration, files, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from seq2engine.common.about import HASH_LENGTH, about_rows
from seq2engine.common.page import Html, about_html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.engines import listed_passports
from seq2engine.export.artifact.files import FileProblem, listed_files
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.engines.foreign_step import ForeignStep
from seq2engine.inspection.describe import (
    ENGINE_HEAD,
    GRAPH_HEAD,
    HASHES,
    bundle_summary,
    engine_lines,
    engine_rows,
    graph_rows,
    mending_commands,
    step_rows,
    tensors_text,
)
from seq2engine.model.config import ModelConfig


def inspect_html(
    bundle: Bundle,
    problems: Sequence[FileProblem],
    hashed: bool,
    command: str = "",
    foreign: ForeignStep | None = None,
) -> str:
    """The whole page; `hashed` says whether the files were hashed or only looked for."""
    name = bundle.root.resolve().name
    about = about_rows(name, bundle.config.shape, bundle.manifest.checkpoint_sha256, command)
    made_by = ", ".join(f"{package} {number}" for package, number in bundle.manifest.made_by.items())
    blocks = [
        about_html([*about, ("exported with", made_by)]),
        f"<p>{verdict_html(problems, hashed)}</p>",
        *problem_blocks(bundle, problems),
        heading_html("Graphs"),
        note_html("Products and weights are counted in the ONNX files; attentions are single nodes of their own."),
        table_html(GRAPH_HEAD, graph_rows(bundle)),
        *fallback_blocks(bundle),
        *(
            block
            for path, passport in listed_passports(bundle).items()
            for block in engine_blocks(path, passport, bundle.config)
        ),
        *foreign_blocks(bundle, foreign),
        heading_html("Files"),
        table_html(("file", "what", "MB", "sha256"), file_rows(bundle)),
    ]
    return page_html(f"Bundle {name}", bundle_summary(bundle), blocks)


def verdict_html(problems: Sequence[FileProblem], hashed: bool) -> str:
    if problems:
        return f"{badge_html('damaged', 'bad')} {len(problems)} of its files are missing or changed."
    if hashed:
        return f"{badge_html('whole', 'good')} Every file has the hash that was recorded when it was written."
    return f"{badge_html('complete', 'good')} Every file is there; their bytes were not checked (inspect --check does)."


def problem_blocks(bundle: Bundle, problems: Sequence[FileProblem]) -> list[str]:
    if not problems:
        return []
    return [
        table_html(("file", "problem"), ((problem.path, problem.problem) for problem in problems)),
        *(note_html(command) for command in mending_commands(bundle, problems)),
    ]


def fallback_blocks(bundle: Bundle) -> list[str]:
    """Nodes that stay in fp32 where the rest is narrower, and by which decodes they were chosen."""
    scan = bundle.manifest.scan
    blocks = []
    if scan:
        listed = ", ".join(f"{key} {value}" for key, value in scan.items() if not isinstance(value, dict | list))
        blocks += [heading_html("Calibration"), note_html(f"Ranges were measured on: {listed}.")]
    rows = [
        (precision, name, node, Html(f'<span class="words">{escape(str(why))}</span>'))
        for precision, graphs in bundle.manifest.graphs.items()
        for name, entry in graphs.items()
        for node, why in entry.islands.items()
    ]
    if rows:
        blocks += [heading_html("fp32 fallback nodes"), table_html(("precision", "graph", "node", "why"), rows)]
    return blocks


def engine_blocks(name: str, passport: Passport, config: ModelConfig) -> list[str]:
    lines = engine_lines(passport)
    shown = len(ENGINE_HEAD) - len(HASHES)  # the hashes have a table of their own: all would be too wide
    rows = engine_rows(passport, config)
    tensors = [
        (engine, side, Html(f'<span class="words">{escape(tensors_text(found))}</span>'))
        for engine, entry in passport.engines.items()
        for side, found in (("inputs", entry.inputs), ("outputs", entry.outputs))
    ]
    return [
        heading_html(f"Engines {name}"),
        *map(note_html, lines),
        table_html(ENGINE_HEAD[:shown], (row[:shown] for row in rows)),
        table_html(("engine", *HASHES), ((row[0], *map(code_html, row[shown:])) for row in rows)),
        table_html(("engine", "side", "tensors"), tensors),
    ]


def foreign_blocks(bundle: Bundle, foreign: ForeignStep | None) -> list[str]:
    if foreign is None:
        return []
    head, rows = step_rows(bundle, foreign)
    return [heading_html("Beside another exporter"), table_html(head, rows)]


def file_rows(bundle: Bundle) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for file in listed_files(bundle):
        path = bundle.root / file.path
        size: object = f"{path.stat().st_size / 1e6:.2f}" if path.is_file() else badge_html("missing", "bad")
        rows.append((file.path, file.what, size, code_html(file.sha256[:HASH_LENGTH])))
    return rows


def code_html(value: object) -> Html:
    return Html(f"<code>{escape(str(value))}</code>")
