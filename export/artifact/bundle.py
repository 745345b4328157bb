"""The bundle: one folder with everything made from a model, and a manifest that lists it with its origin.

    run7/  manifest.json  config.json  model.safetensors        the reference, for parity
           generation.json  tokenizer/                          how it is decoded, and its text; where a model has them
           onnx/<precision>/{encoder,decoder_step}.onnx + .data
           engines/<name>/{encoder,decoder_step,...}.engine + passport.json
           reports/

Loading checks what it uses: a file whose hash is not the manifest's is refused with the command that repairs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.atomic_folders import new_file, sha256_of
from seq2engine.common.hub import is_hub_name
from seq2engine.common.inner_paths import path_inside, place_inside, problem_with_path
from seq2engine.common.json_files import read_object, shortened, typed_from_json
from seq2engine.errors import BundleError, ConfigError
from seq2engine.model.config import ModelConfig, config_from_dict
from seq2engine.model.tokenizers.base import FOLDER as TOKENIZER
from seq2engine.model.tokenizers.base import Tokenizer

from ..contract import CACHE_FORMS, GRAPHS, PRECISIONS, Census, GraphSpec, check_choices, graph_specs
from .checked_files import CheckedFiles
from .from_hub import bundle_folder_from_hub

FORMAT = 4
MANIFEST = "manifest.json"
REFERENCE = "model.safetensors"
GENERATION = "generation.json"


@dataclass(frozen=True)
class GraphEntry:
    """One exported graph as the manifest records it. Paths are relative to the bundle."""

    path: str
    sha256: str
    data_path: str
    data_sha256: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    census: Census
    fp32_nodes: dict[str, str]  # nodes that stay in fp32 where the rest is narrower -> why

    @property
    def fingerprint(self) -> str:
        """A hash of the graph and its weights; the graph file alone does not depend on the weights' values."""
        return hashlib.sha256(f"{self.sha256} {self.data_sha256}".encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    config: ModelConfig
    cache_form: str
    checkpoint_sha256: str
    companions: dict[str, str]  # path -> sha256 of generation.json and the tokenizer's files
    graphs: dict[str, dict[str, GraphEntry]]  # precision -> graph name -> entry
    calibration: dict[str, Any]  # which decodes chose the fp32 fallback nodes: corpus, sources, steps; empty if none
    made_by: dict[str, str]
    format: int = FORMAT
    # Where the model comes from, if that is known: name on the hub, revision, commit, license
    origin: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class ManifestFields:
    """The fields of the JSON; the config is checked by its own rules."""

    config: dict[str, Any]
    cache_form: str
    checkpoint_sha256: str
    companions: dict[str, str]
    graphs: dict[str, dict[str, GraphEntry]]
    calibration: dict[str, Any]
    made_by: dict[str, str]
    format: int
    origin: dict[str, str] = dataclasses.field(default_factory=dict)  # older bundles have none


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its manifest.

    `kept` is a folder of the user for what is made from the bundle's files when they are used, such as the graphs that
    ONNX Runtime runs; None: it is made every time.
    """

    root: Path
    manifest: Manifest
    kept: Path | None = field(default=None, compare=False)

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def cache_form(self) -> str:
        return self.manifest.cache_form

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(self.manifest.graphs)

    def specs(self, precision: str) -> dict[str, GraphSpec]:
        self.require(precision)
        return graph_specs(self.config, precision, self.cache_form)

    def require(self, precision: str) -> None:
        check_choices(precision, self.cache_form)
        if precision not in self.manifest.graphs:
            raise BundleError(
                f"{self.root} holds no {precision} graphs, only {', '.join(self.precisions)}; "
                f"{self.advice_to_add(precision)}"
            )

    def advice_to_add(self, precision: str) -> str:
        return f"add them with: seq2engine export --add {precision} {shlex.quote(str(self.root))}"

    def graph(self, precision: str, name: str) -> GraphEntry:
        self.require(precision)
        return self.manifest.graphs[precision][name]

    def graph_path(self, precision: str, name: str) -> Path:
        """The ONNX file of a graph, after its bytes and its weights' bytes were checked against the manifest."""
        entry = self.graph(precision, name)
        for relative, expected in ((entry.path, entry.sha256), (entry.data_path, entry.data_sha256)):
            self.check_file(relative, expected)
        return self.inside(entry.path)

    def check_graphs(self, *precisions: str) -> None:
        """Refuses graphs of these precisions that are not those that were written: for work that reads them late."""
        for precision in precisions:
            self.require(precision)
            for name in self.manifest.graphs[precision]:
                self.graph_path(precision, name)

    def reference_path(self) -> Path:
        self.check_file(REFERENCE, self.manifest.checkpoint_sha256)
        return self.inside(REFERENCE)

    @property
    def takes_text(self) -> bool:
        return any(path.startswith(f"{TOKENIZER}/") for path in self.manifest.companions)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, after its files were checked against the manifest."""
        from seq2engine.model.tokenizers.reading import read_tokenizer

        for path, sha256 in self.manifest.companions.items():
            if path.startswith(f"{TOKENIZER}/"):
                self.check_file(path, sha256)
        return read_tokenizer(self.root)

    def generation(self) -> dict[str, Any]:
        """The model's own decoding defaults: fields of SearchOptions; empty where it has none."""
        if GENERATION not in self.manifest.companions:
            return {}
        self.check_file(GENERATION, self.manifest.companions[GENERATION])
        try:
            return read_object(self.root / GENERATION)
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.root / GENERATION} cannot be used ({error}); {repair_of(self.root)}") from error

    def check_file(self, relative: str, expected: str) -> None:
        path = self.inside(relative)
        repair = repair_of(self.root)
        if not path.is_file():
            lost = "is not a regular file" if path.exists() else "is missing"
            raise BundleError(f"{path} {lost}, though the manifest lists it; {repair}")
        known = None if self.kept is None else CheckedFiles(self.kept / "checked")
        if not (sha256_of(path) == expected if known is None else known.has_hash(path, expected)):
            raise BundleError(f"{path} is not the file the manifest describes (its hash differs); {repair}")

    def inside(self, relative: str) -> Path:
        """A path of the manifest, which may not lead out of the bundle."""
        try:
            return path_inside(self.root, relative)
        except ValueError as error:
            raise BundleError(f"{self.root / MANIFEST} names {error}; {repair_of(self.root)}") from error

    def place(self, *names: str) -> Path:
        """A place in the bundle to write to, through no link."""
        return place_inside(self.root, *names)


def repair_of(root: Path) -> str:
    """The command that repairs a damaged bundle; --force keeps engines, reports and other people's files."""
    return f"export the checkpoint again with: seq2engine export CHECKPOINT {shlex.quote(str(root))} --force"


def open_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Reads a bundle's manifest; graphs and engines are checked when they are used.

    A bundle on the Hugging Face hub, hf:NAME or hf:NAME@REVISION, is downloaded unless it is in the cache.
    """
    root = bundle_folder_from_hub(folder) if is_hub_name(folder) else Path(folder)
    if not root.is_dir():
        raise BundleError(f"no bundle at {root}; make one with: seq2engine export CHECKPOINT {root}")
    path = root / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{root} has no {MANIFEST}, so it is not a bundle; make one with: seq2engine export CHECKPOINT DIR"
        )
    try:
        return Bundle(root, manifest_from_dict(read_object(path)))
    except (OSError, ValueError, ConfigError) as error:
        raise BundleError(f"{path} cannot be used ({error}); {repair_of(root)}") from error


def manifest_from_dict(values: dict[str, Any]) -> Manifest:
    """From parsed JSON; a ValueError or a ConfigError lists what is wrong with it."""
    if values.get("format") != FORMAT:
        raise ValueError(f"format {shortened(values.get('format'))}, this version reads {FORMAT}")
    fields = typed_from_json(ManifestFields, values)
    manifest = Manifest(**{**shallow(fields), "config": config_from_dict(fields.config)})
    if problems := problems_with(manifest):
        raise ValueError("; ".join(problems))
    return manifest


def shallow(fields: ManifestFields) -> dict[str, Any]:
    return {field.name: getattr(fields, field.name) for field in dataclasses.fields(fields)}


def problems_with(manifest: Manifest) -> list[str]:
    """Problems of fields whose types are right."""
    found = [f"unknown precision {shortened(name)}" for name in manifest.graphs if name not in PRECISIONS]
    if manifest.cache_form not in CACHE_FORMS:
        found.append(f"unknown cache form {shortened(manifest.cache_form)}")
    if any(set(graphs) != set(GRAPHS) for graphs in manifest.graphs.values()):
        return [*found, f"every precision needs the graphs {', '.join(GRAPHS)}"]
    for precision, graphs in manifest.graphs.items():
        # Sessions allocate buffers for every layer of the config, so it must agree with the graphs.
        layers = sum(name.startswith("cross_k.") for name in graphs["encoder"].outputs)
        if layers != manifest.config.decoder_layers:
            found.append(
                f"decoder_layers is {manifest.config.decoder_layers}, but the {precision} graphs have {layers}"
            )
    named = [*manifest.companions, *(path for e in entries_of(manifest) for path in (e.path, e.data_path))]
    return found + [f"{shortened(path)} {problem}" for path in named if (problem := problem_with_path(path))]


def entries_of(manifest: Manifest) -> list[GraphEntry]:
    return [entry for graphs in manifest.graphs.values() for entry in graphs.values()]


def write_text(path: Path, text: str) -> None:
    """Writes a small file of a bundle (a report, a passport) whole or not at all."""
    try:
        with new_file(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BundleError(f"cannot write {path}: {error.strerror}; name another place, or make room there") from error
