"""Bundles and engines in words: what `export`, `build` and `inspect` print."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.common.tables import filled, text_table
from seq2engine.export.artifact.bundle import Bundle, repair_of
from seq2engine.export.artifact.engines import listed_passports
from seq2engine.export.artifact.files import FileProblem, file_problems, listed_files
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor, Passport, command_of_passport
from seq2engine.export.artifact.transfers import Transfers, transfers_of_token
from seq2engine.export.contract import GRAPHS
from seq2engine.export.engines.launch_budget import TOKENS, launches_allowed
from seq2engine.model.config import ModelConfig

if TYPE_CHECKING:
    from seq2engine.export.engines.foreign_step import ForeignStep


HASHES = ("key", "graph hash", "file hash")
GRAPH_HEAD = ("graph", "precision", "opset", "nodes", "weights", "matmuls", "with weights", "fp32 nodes", "attentions")
ENGINE_HEAD = (
    "engine",
    "launches",
    "budget",
    "fused attentions",
    "size",
    "weights",
    "built in",
    "peak memory",
    *HASHES,
)

TOKEN_HEAD = (
    "step output",
    "engines per token",
    "launches",
    "host to GPU",
    "GPU to host",
    "host waits",
    "allocations",
    "candidates",
    "serves",
)


def bundle_values(bundle: Bundle, foreign: ForeignStep | None = None) -> dict[str, Any]:
    """Everything `inspect --json` prints; `foreign` is a decoder step of another exporter."""
    return {
        "bundle": str(bundle.root),
        **dataclasses.asdict(bundle.manifest),
        "damage": [str(problem) for problem in file_problems(bundle, hashed=False)],
        "engines": {
            name: {
                **engine_values(passport, bundle.config),
                "damage": damage_of(bundle.root / "engines" / name, passport),
            }
            for name, passport in listed_passports(bundle).items()
        },
        **({} if foreign is None else {"foreign_step": dataclasses.asdict(foreign)}),
    }


def engine_values(passport: Passport, config: ModelConfig) -> dict[str, Any]:
    """A passport and the launch budgets of its engines (null where there is none)."""
    values = dataclasses.asdict(passport)
    for graph, entry in values["engines"].items():
        entry["launch_budget"] = budget_of(passport, config, graph)
    for name, reduction in values["reductions"].items():
        batch, beams = largest(passport, name)
        transfers = dataclasses.asdict(transfers_of_token(passport, name, batch, beams))
        reduction["transfers"] = {"batch": batch, "beams": beams, **transfers}
    return values


def budget_of(passport: Passport, config: ModelConfig, graph: str) -> int | None:
    if "sm75" in passport.targets:  # the table does not apply to Turing, which has other kernels
        return None
    beams = passport.ranges.beam.max > 1
    return launches_allowed(config, graph, passport.precision, passport.cache_form, beams)


def bundle_text(bundle: Bundle, foreign: ForeignStep | None = None) -> str:
    lines = [
        filled(f"{bundle.root}: {bundle_summary(bundle)}"),
        "",
        text_table(GRAPH_HEAD, graph_rows(bundle)),
    ]
    broken = [problem for problem in file_problems(bundle, hashed=False) if not problem.path.startswith("engines/")]
    if broken:
        lines.append(f"damaged: {'; '.join(map(str, broken))}; {repair_of(bundle.root)}")
    for name, passport in listed_passports(bundle).items():
        lines += ["", f"engines/{name}", engine_text(passport, bundle.config)]
        if damage := damage_of(bundle.root / "engines" / name, passport):
            command = command_of_passport(bundle.root, passport, passport.targets)
            lines.append(
                f"damaged: {'; '.join(damage)}; build it again with: {command} --name {shlex.quote(name)} --force"
            )
    if foreign is not None:
        lines += ["", foreign_step_text(bundle, foreign)]
    return "\n".join(lines)


def bundle_summary(bundle: Bundle) -> str:
    config = bundle.config
    return f"{config.shape}, {config.norm}-norm, {config.positions} positions, {bundle.cache_form} cache"


def graph_rows(bundle: Bundle) -> list[tuple[object, ...]]:
    """A row for every graph; "missing" instead of the size if its files are not there."""
    return [
        (
            name,
            precision,
            entry.opset,
            entry.census["nodes"],
            megabytes(sum(entry.census["weight_bytes"].values()))
            if all((bundle.root / path).is_file() for path in (entry.path, entry.data_path))
            else "missing",
            counts(entry.census["products"]),
            counts(entry.census["product_weights"]),
            len(entry.fp32_nodes) or "",
            entry.census["attentions"],
        )
        for precision, graphs in bundle.manifest.graphs.items()
        for name, entry in graphs.items()
    ]


def check_values(bundle: Bundle, problems: Sequence[FileProblem]) -> dict[str, Any]:
    """What `inspect --check --json` prints."""
    return {
        "bundle": str(bundle.root),
        "verdict": not problems,
        "files": len(listed_files(bundle)),
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def check_text(bundle: Bundle, problems: Sequence[FileProblem]) -> str:
    if not problems:
        return f"{bundle.root}: all {len(listed_files(bundle))} files are what the manifest and the passports list"
    table = text_table(("file", "problem"), ((problem.path, problem.problem) for problem in problems))
    return "\n".join([table, *repair_commands(bundle, problems)])


def repair_commands(bundle: Bundle, problems: Sequence[FileProblem]) -> list[str]:
    engines = [problem for problem in problems if problem.path.startswith("engines/")]
    commands = [] if len(engines) == len(problems) else [repair_of(bundle.root)]
    if engines:
        commands.append(f"build the engines again with: seq2engine build {shlex.quote(str(bundle.root))} --force")
    return commands


def engine_text(passport: Passport, config: ModelConfig) -> str:
    lines = [
        *engine_lines(passport),
        text_table(ENGINE_HEAD, engine_rows(passport, config)),
        text_table(TOKEN_HEAD, token_rows(passport)),
    ]
    for name, entry in passport.engines.items():
        lines.append(filled(f"{name}: {tensors_text(entry.inputs)} -> {tensors_text(entry.outputs)}"))
    return "\n".join(lines)


def engine_lines(passport: Passport) -> list[str]:
    """What all engines of a passport have in common: GPUs, profiles, flags."""
    where = passport.device or ", ".join(passport.targets) or "the default GPUs"
    cache = f"{passport.slots} cache slots" if passport.cache_form == "static" else "growing cache"
    lines = [f"{passport.flavour} {passport.version} for {where}: {passport.precision}, {cache}"]
    for number, ranges in enumerate(passport.profiles):
        lines.append(
            f"profile {number}: batch {ranges.batch}, beam {ranges.beam}, source {ranges.source}, "
            f"output {ranges.target}"
        )
    if options := passport.flags.options():
        lines.append(f"built with {' '.join(options)}")
    return lines


def engine_rows(passport: Passport, config: ModelConfig) -> list[tuple[object, ...]]:
    return [
        (
            name,
            ", ".join(map(str, (entry.launches, *entry.narrower_launches))),
            "-" if (budget := budget_of(passport, config, name)) is None else budget,
            f"{entry.fused_attentions} of {entry.attentions}" if name in GRAPHS else "-",
            megabytes(entry.bytes),
            weights_text(name, entry),
            f"{entry.build_seconds:.1f} s",
            megabytes(entry.peak_memory) if entry.peak_memory else "unknown",
            *(value[:12] for value in (entry.key, entry.onnx_fingerprint, entry.sha256)),
        )
        for name, entry in passport.engines.items()
    ]


def largest(passport: Passport, reduction: str) -> tuple[int, int]:
    """Sources and beams of the engine's largest batch."""
    return passport.ranges.batch.max, 1 if reduction == "next_greedy" else passport.ranges.beam.max


def transfer_cells(transfers: Transfers) -> tuple[str, str, str, int]:
    sizes = (f"{transfers.sent:,} bytes", f"{transfers.received:,} bytes")
    return (*sizes, f"{transfers.waits:g}", transfers.allocations)


def token_rows(passport: Passport) -> list[tuple[object, ...]]:
    """The cost of one token of the largest batch, a row for each way to reduce the logits on the device: engines that
    run, their launches, bytes over the bus, waits and allocations of the host, and the searches that it serves."""
    return [
        (
            name,
            " + ".join(engines),
            sum(passport.engines[engine].launches for engine in engines),
            *transfer_cells(transfers_of_token(passport, name, *largest(passport, name))),
            reduction.candidates,
            reduction.serves,
        )
        for name, reduction in passport.reductions.items()
        if set(engines := TOKENS[passport.cache_form].get(name, ("",))) <= set(passport.engines)
    ]


def weights_text(name: str, entry: EngineEntry) -> str:
    """Bytes of weights by type; device graphs have none, and engines of `tensorrt` cannot be read."""
    if name not in GRAPHS:
        return "none"
    return ", ".join(f"{megabytes(size)} {kind}" for kind, size in largest_first(entry.weight_bytes)) or "unknown"


def tensors_text(tensors: Sequence[EngineTensor]) -> str:
    """Inputs or outputs in one line; tensors that differ only in the layer number are merged."""
    layers: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        name, _, layer = tensor.name.partition(".")
        about = f"{tensor.dtype} [{','.join(map(str, tensor.axes))}]"
        layers.setdefault((name, about), []).append(layer)
    return ", ".join(
        f"{name}{'.' if found[0] else ''}{found[0]}{f' to {found[-1]}' if len(found) > 1 else ''} {about}"
        for (name, about), found in layers.items()
    )


def damage_of(folder: Path, passport: Passport) -> list[str]:
    """What is wrong with the files of an engine, by their sizes; opening one checks the hash."""
    found = []
    for entry in passport.engines.values():
        path = folder / entry.file
        if not path.is_file():
            found.append(f"{entry.file} is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            found.append(f"{entry.file} has {size} bytes, its passport has {entry.bytes}")
    return found


def largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Types of constants by size; those that round to 0.0 MB are left out."""
    return sorted(((kind, size) for kind, size in sizes.items() if size >= 50_000), key=lambda pair: -pair[1])


def foreign_step_text(bundle: Bundle, foreign: ForeignStep) -> str:
    return text_table(*step_rows(bundle, foreign))


def step_rows(bundle: Bundle, foreign: ForeignStep) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Our decoder steps and the foreign one: head and rows of a table."""
    steps = {f"engines/{name}": passport.engines["decoder_step"] for name, passport in listed_passports(bundle).items()}
    rows: list[tuple[object, ...]] = [
        (name, step.launches, f"{step.fused_attentions} of {step.attentions}") for name, step in steps.items()
    ]
    rows.append((foreign.path, foreign.launches, f"{foreign.fused_attentions} of {foreign.attentions}"))
    return ("decoder step", "launches", "fused attentions"), rows


def counts(by_type: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in by_type.items())


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
