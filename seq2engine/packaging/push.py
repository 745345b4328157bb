"""Uploads a bundle to the Hugging Face hub, with a model card, as one commit: all of it or nothing."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.hub import REVISION, HubName, hub_errors, hub_name, hub_package, hub_progress, is_hub_name
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import BundleError, RequestError, UsageError
from seq2engine.export.artifact.bundle import MANIFEST, Bundle, open_bundle, repair_of
from seq2engine.export.artifact.files import CONFIG, engine_folders, file_problems, listed_files
from seq2engine.export.artifact.passport import PASSPORT
from seq2engine.packaging.model_card import evidence_of, model_card

CARD = "README.md"
OURS = ("onnx/", "engines/", "tokenizer/", "reports/")  # where files of an earlier upload may lie


@dataclass(frozen=True)
class PushOptions:
    """`revision` is the branch to write to, created if it does not exist; None: main."""

    private: bool = False
    revision: str | None = None
    dry_run: bool = False  # only the card, into the bundle's own folder


@dataclass(frozen=True)
class PushResult:
    name: str
    files: tuple[str, ...]
    bytes: int
    card: str
    commit: str | None  # None of a dry run
    url: str | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


def push_bundle(
    bundle: Bundle | str | os.PathLike[str],
    name: str,
    options: PushOptions | None = None,
    progress: Progress = silent,
) -> PushResult:
    """Uploads a bundle to `name`, hf:OWNER/NAME, with the token of the environment (HF_TOKEN, or `hf auth login`).

    Every file is checked against its hash before. The reports that the card cites go along.
    """
    options = options or PushOptions()
    asked = target_name(name, options.revision)
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    progress("push: checking files", 0.0)
    if problems := file_problems(opened, hashed=True):
        raise BundleError(f"{opened.root}: {'; '.join(map(str, problems[:3]))}; {repair_of(opened.root)}")
    progress("push: checking files", 1.0)
    evidence = evidence_of(opened)
    card = model_card(opened, asked.repo, evidence)
    files = {path.relative_to(opened.root).as_posix(): path for path in (*files_of(opened), *evidence.files)}
    size = sum(path.stat().st_size for path in files.values())
    if options.dry_run:
        with new_file(opened.root / CARD) as beside:
            beside.write_text(card, encoding="utf-8")
        return PushResult(f"{asked}", tuple(files), size, card, None, None)
    commit, url = uploaded(asked, card, files, options, progress)
    return PushResult(f"{asked}", tuple(files), size, card, commit, url)


def target_name(name: str, revision: str | None = None) -> HubName:
    if revision is not None and not REVISION.fullmatch(revision):
        raise UsageError(f"--revision {revision!r}, expected the name of a branch, such as main or v2")
    asked = hub_name(name) if is_hub_name(name) else None
    if asked is None or asked.revision is not None or "/" not in asked.repo:
        raise RequestError(f"{name!r} is not hf:OWNER/NAME, such as hf:me/opus-mt-en-de; a branch goes to --revision")
    return asked


def files_of(bundle: Bundle) -> list[Path]:
    """What makes the bundle: the manifest and all that it and the passports list."""
    passports = [folder / PASSPORT for folder in engine_folders(bundle.root)]
    listed = [bundle.inside(file.path) for file in listed_files(bundle)]
    root = bundle.root.resolve()
    return [bundle.root / path.relative_to(root) for path in listed] + [
        bundle.root / MANIFEST,
        bundle.root / CONFIG,
        *passports,
    ]


def uploaded(
    name: HubName, card: str, files: dict[str, Path], options: PushOptions, progress: Progress
) -> tuple[str, str]:
    """Creates the repository and the branch if needed, then one commit; returns its hash and URL."""
    hub = hub_package("seq2engine push")
    with hub_errors(name), hub_progress(progress) as shown:
        shown("push: upload", 0.0, f"{len(files)} files")
        api = hub.HfApi()
        api.create_repo(name.repo, private=options.private or None, exist_ok=True)
        if options.revision is not None:
            api.create_branch(name.repo, branch=options.revision, exist_ok=True)
        there = {file.rfilename for file in api.model_info(name.repo, revision=options.revision).siblings or ()}
        operations = [hub.CommitOperationAdd(CARD, card.encode())]
        operations += [hub.CommitOperationAdd(path, str(place)) for path, place in files.items()]
        gone = sorted(path for path in there - files.keys() if path.startswith(OURS))
        operations += [hub.CommitOperationDelete(path) for path in gone]
        try:
            done = api.create_commit(
                name.repo, operations, commit_message="Bundle of seq2engine", revision=options.revision
            )
        except RuntimeError as error:  # raised by one of its threads around the actual error
            raise error.__cause__ or error from None
        shown("push: upload", 1.0)
    return str(done.oid), str(done.commit_url)
