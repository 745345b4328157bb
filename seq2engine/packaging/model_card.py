"""The model card of a bundle for the hub: its content, parity and benchmark results, and how to run it.

Verdicts and times come from the bundle's own reports, and only from those of the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.benchmarks.report.tables import conditions, measures
from seq2engine.benchmarks.result import BenchResult
from seq2engine.benchmarks.result_files import result_from_file
from seq2engine.common.about import HASH_LENGTH
from seq2engine.common.json_files import read_json
from seq2engine.common.reports import FOLDER, latest_report, reports_in
from seq2engine.errors import Seq2EngineError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.engines import listed_passports
from seq2engine.export.artifact.files import listed_files

SPDX_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """The reports of a bundle that are about its current weights."""

    parity: tuple[tuple[Path, dict[str, Any]], ...]  # the latest of every backend and precision
    bench: tuple[Path, BenchResult] | None

    @property
    def files(self) -> list[Path]:
        """The data and the page of every report."""
        data = [path for path, _ in self.parity] + ([] if self.bench is None else [self.bench[0]])
        return [file for path in data for file in (path, path.with_suffix(".html")) if file.is_file()]


def evidence_of(bundle: Bundle) -> Evidence:
    checkpoint = bundle.manifest.checkpoint_sha256
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in reversed(reports_in(bundle.root / FOLDER, "parity")):
        values = report_values(path)
        if ["checkpoint", checkpoint[:HASH_LENGTH]] in values.get("about", []) and not values.get("against"):
            found[f"{values['backend']} {values['precision']}"] = (path, values)
    bench = None
    if (latest := latest_report(bundle.root, "bench")) is not None:
        with suppress(Seq2EngineError):  # a report that cannot be read is no evidence
            result = result_from_file(latest)
            bench = (latest, result) if result.checkpoint_sha256 == checkpoint else None
    return Evidence(tuple(found.values()), bench)


def report_values(path: Path) -> dict[str, Any]:
    """A report's data; empty if it is damaged."""
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) and {"backend", "precision", "verdict"} <= values.keys() else {}


def model_card(bundle: Bundle, name: str, evidence: Evidence) -> str:
    """The README.md of a repository; `name` is the repository's."""
    parts = [
        front_matter(bundle),
        f"# {name.rpartition('/')[2]}",
        source_text(bundle),
        "## What is inside",
        markdown_table(("files", "precision", "MB"), size_rows(bundle)),
        "## Parity",
        parity_text(evidence),
        "## Benchmark",
        bench_text(evidence),
        "## How to run it",
        usage_text(bundle, name),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(bundle: Bundle) -> str:
    """What the hub reads. A licence it does not know would be refused, so an unknown one is left out."""
    origin = bundle.manifest.origin
    lines = ["library_name: seq2engine", "tags: [onnx, encoder-decoder, seq2engine]"]
    if origin.get("license"):
        lines.append(f"license: {origin['license']}")
    if origin.get("name"):
        lines.append(f"base_model: {origin['name'].partition(':')[2]}")
    return "\n".join(["---", *lines, "---"])


def source_text(bundle: Bundle) -> str:
    manifest = bundle.manifest
    origin = manifest.origin
    made = ", ".join(f"{package} {number}" for package, number in manifest.made_by.items())
    lines = [f"An encoder-decoder Transformer ({bundle.config.shape}) as ONNX graphs for seq2engine."]
    if origin.get("name"):
        lines.append(f"Made of `{origin['name']}`, revision {origin['revision']}, commit `{origin['commit']}`.")
    lines.append(f"Licence of the source model: {origin.get('license') or SPDX_UNKNOWN}.")
    lines.append(f"SHA-256 of its weights: `{manifest.checkpoint_sha256}`. Made by {made}.")
    return " ".join(lines)


def size_rows(bundle: Bundle) -> list[tuple[str, str, str]]:
    rows = []
    for precision, graphs in bundle.manifest.graphs.items():
        paths = [path for entry in graphs.values() for path in (entry.path, entry.data_path)]
        rows.append((" and ".join(graphs), precision, megabytes(bundle.inside(path) for path in paths)))
    for name, passport in listed_passports(bundle).items():
        folder = bundle.root / "engines" / name
        engines = [folder / engine.file for engine in passport.engines.values()]
        what = f"TensorRT engine {name} ({', '.join(passport.targets)})"
        rows.append((what, passport.precision, megabytes(engines)))
    others = [file.path for file in listed_files(bundle) if not file.path.startswith(("onnx/", "engines/"))]
    rows.append(("reference weights, tokenizer, defaults", "fp32", megabytes(bundle.inside(path) for path in others)))
    return rows


def megabytes(paths: Iterable[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f}"


def parity_text(evidence: Evidence) -> str:
    if not evidence.parity:
        return (
            "No parity report of these weights is in the bundle: nothing is claimed. Make one with `seq2engine parity`."
        )
    rows = [
        (
            f"{values['backend']} {values['precision']}",
            "passed" if values["verdict"] else "FAILED",
            str(values["reason"]),
        )
        for _, values in evidence.parity
    ]
    return "Compared with the model in PyTorch; errors are against float64.\n\n" + markdown_table(
        ("candidate", "verdict", "result"), rows
    )


def bench_text(evidence: Evidence) -> str:
    if evidence.bench is None:
        return "No benchmark of these weights is in the bundle. Make one with `seq2engine bench`."
    result = evidence.bench[1]
    rows = [
        (str(case.case), arm, cells[2], cells[6])
        for case in result.cases
        for arm, part, cells in measures(result, case)
        if part == "end_to_end"
    ]
    table = markdown_table(("case", "arm", "median ms", "tokens/s"), rows)
    return f"End to end, on {conditions(result)}.\n\n{table}"


USAGE = {  # front end -> command, method, example
    "tokens": ("run", "translate", '"..."'),
    "mel": ("transcribe", "transcribe", "talk.wav"),
    "image": ("read", "read", "line.png"),
}


def usage_text(bundle: Bundle, name: str) -> str:
    text = "text" if bundle.takes_text else "token ids"
    kind = bundle.config.source_kind if bundle.config.takes_features else text
    command, method, what = USAGE[bundle.config.front_end]
    asked = json.dumps(what) if bundle.config.takes_features else what
    return (
        f"It takes {kind}.\n\n"
        f"```sh\npip install 'seq2engine[hub]'\nseq2engine {command} hf:{name} {what}\n```\n\n"
        f'```python\nimport seq2engine\n\nwith seq2engine.load("hf:{name}") as model:\n'
        f"    print(model.{method}({asked}))\n```"
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )
