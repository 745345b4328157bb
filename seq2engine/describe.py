"""Bundles and engines in words: what `export`, `build` and `inspect` print."""

from __future__ import annotations

import dataclasses
from typing import Any

from seq2engine.export.bundle import Bundle
from seq2engine.export.passport import PASSPORT, Passport, read_passport
from seq2engine.tables import text_table


def engines_of(bundle: Bundle) -> dict[str, Passport]:
    """The passports of a bundle's engines, by folder name."""
    return {path.parent.name: read_passport(path) for path in sorted((bundle.root / "engines").glob(f"*/{PASSPORT}"))}


def bundle_values(bundle: Bundle) -> dict[str, Any]:
    """Everything `inspect --json` tells."""
    return {
        "bundle": str(bundle.root),
        **dataclasses.asdict(bundle.manifest),
        "engines": {name: dataclasses.asdict(passport) for name, passport in engines_of(bundle).items()},
    }


def bundle_text(bundle: Bundle) -> str:
    config = bundle.config
    lines = [
        f"{bundle.root}: {config.encoder_layers}+{config.decoder_layers} layers, d_model {config.d_model}, "
        f"{config.heads} heads, vocabulary {config.source_vocab}/{config.target_vocab}, {config.norm}-norm, "
        f"{config.positions} positions, {bundle.cache_form} cache",
        "",
        text_table(
            ("graph", "precision", "opset", "nodes", "weights", "products", "of weights", "in fp32", "attentions"),
            (
                (
                    name,
                    precision,
                    entry.opset,
                    entry.census["nodes"],
                    megabytes(sum(entry.census["weight_bytes"].values())),
                    counts(entry.census["products"]),
                    counts(entry.census["product_weights"]),
                    f"{len(entry.islands)} nodes" if entry.islands else "",
                    entry.census["attentions"],
                )
                for precision, graphs in bundle.manifest.graphs.items()
                for name, entry in graphs.items()
            ),
        ),
    ]
    for name, passport in engines_of(bundle).items():
        lines += ["", f"engines/{name}", engine_text(passport)]
    return "\n".join(lines)


def engine_text(passport: Passport) -> str:
    ranges = passport.ranges
    where = ", ".join(passport.targets) or "the default GPUs"
    head = (
        f"{passport.flavour} {passport.version} for {where}: {passport.precision}, batch {ranges.batch}, "
        f"beam {ranges.beam}, source {ranges.source}, output {ranges.target}"
        + (f", {passport.slots} cache slots" if passport.cache_form == "static" else ", growing cache")
    )
    table = text_table(
        ("engine", "launches", "fused attentions", "size", "built in"),
        (
            (
                name,
                entry.launches,
                f"{entry.fused_attentions} of {entry.attentions}",
                megabytes(entry.bytes),
                f"{entry.build_seconds:.1f} s",
            )
            for name, entry in passport.engines.items()
        ),
    )
    return f"{head}\n{table}"


def counts(by_type: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in by_type.items())


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
