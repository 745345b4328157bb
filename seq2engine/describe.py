"""Bundles and engines in words: what `export`, `build` and `inspect` print."""

from __future__ import annotations

import dataclasses
from typing import Any

from seq2engine.export.bundle import Bundle
from seq2engine.export.passport import PASSPORT, Passport, read_passport
from seq2engine.tables import text_table


def engines_of(bundle: Bundle) -> dict[str, Passport]:
    """The passports of a bundle's engines, by folder name."""
    return {
        path.parent.name: read_passport(path) for path in sorted((bundle.root / "engines").glob(f"[!.]*/{PASSPORT}"))
    }


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
            ("graph", "precision", "opset", "nodes", "weights", "products", "attentions"),
            (
                (
                    name,
                    precision,
                    entry.opset,
                    entry.census["nodes"],
                    megabytes(sum(entry.census["weight_bytes"].values())),
                    ", ".join(f"{count} {dtype}" for dtype, count in entry.census["products"].items()),
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
    table = text_table(
        ("engine", "launches", "fused attentions", "size", "built in", "peak memory", "key"),
        (
            (
                name,
                ", ".join(map(str, (entry.launches, *entry.narrower_launches))),
                f"{entry.fused_attentions} of {entry.attentions}",
                megabytes(entry.bytes),
                f"{entry.build_seconds:.1f} s",
                megabytes(entry.peak_memory) if entry.peak_memory else "unknown",
                entry.key[:12],
            )
            for name, entry in passport.engines.items()
        ),
    )
    return "\n".join([*lines, table])


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
