"""Models of the Hugging Face hub by name: hf:NAME or hf:NAME@REVISION.

`huggingface_hub` downloads into its own cache and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE itself. It compares
sizes only, so the hash of every file is checked here. What it raises becomes one line.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from seq2engine.common.json_files import read_json
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import HubError, RequestError, missing_package

SCHEME = "hf:"
FIRST = "config.json"  # in every repository we read, and the file by which a cached copy is found
INDEX = ".index.json"  # how the name of a list of shards ends
NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
REVISION = re.compile(r"\w[\w./-]*")
COMMIT = 40  # hexadecimal digits

Note = Callable[[str], None]
Choose = Callable[[Sequence[str]], list[str]]  # the files of a repository -> those that are read


@dataclass(frozen=True)
class HubName:
    """A repository, and a branch, tag or commit of it; None is its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit, in the hub's cache; they may be links."""

    name: HubName
    commit: str
    folder: Path
    files: tuple[str, ...]


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    return os.fspath(name).startswith(SCHEME)


def hub_hint(path: Path) -> str:
    """How to name a checkpoint of the Hugging Face hub, where a path that is not there could be the name of one."""
    name = str(path)
    if not re.fullmatch(r"t5-\w+|\w[\w.-]*/\w[\w.-]*", name) or ("/" in name and path.parent.exists()):
        return ""
    return f"; if it is a model of the Hugging Face hub, the checkpoint is {SCHEME}{name}"


def hub_name(text: str | os.PathLike[str]) -> HubName:
    repo, at, revision = os.fspath(text).removeprefix(SCHEME).partition("@")
    if not NAME.fullmatch(repo) or "--" in repo or ".." in repo or (at and not REVISION.fullmatch(revision)):
        raise RequestError(
            f"{os.fspath(text)!r} is not hf:NAME or hf:NAME@REVISION, such as hf:Helsinki-NLP/opus-mt-en-de@main"
        )
    return HubName(repo, revision or None)


def snapshot_of(name: HubName, choose: Choose, progress: Progress = silent, note: Note = lambda text: None) -> Snapshot:
    """Downloads the files that `choose` picks, and the shards that a chosen index lists, unless they are cached.

    Where the hub cannot be reached, or HF_HUB_OFFLINE is set, a complete cached copy is used. Small files
    are downloaded before the weights, so a cached copy that has the weights is complete.
    """
    hub = hub_package(f"{name}")
    with hub_errors(name), hub_progress(progress) as shown:
        try:
            chosen = choose(files_on_hub(name))
        except (hub.errors.HTTPError, hub.errors.OfflineModeIsEnabled) as error:
            if no_answer(error):
                return cached_snapshot(name, choose, error, note)
            raise
        stage = f"download: {name}"
        first = hub.hf_hub_download(name.repo, FIRST, revision=name.revision)  # keeps which commit the revision is
        folder = Path(first).parent
        files: list[str] = []
        while chosen:
            file = chosen.pop(0)
            shown(stage, len(files) / (len(files) + 1 + len(chosen)), file)
            place = Path(hub.hf_hub_download(name.repo, file, revision=folder.name))
            check_hash(name, place)
            files.append(file)
            if file.endswith(INDEX):
                chosen += [shard for shard in shards_of(name, place) if shard not in (*files, *chosen)]
        shown(stage, 1.0)
    return Snapshot(name, folder.name, folder, tuple(files))


def files_on_hub(name: HubName) -> list[str]:
    hub = hub_package(f"{name}")
    try:
        info = hub.HfApi().model_info(name.repo, revision=name.revision)
    except (KeyError, TypeError, ValueError) as error:  # for example the page of a proxy
        if isinstance(error, hub.errors.HfHubHTTPError):
            raise
        raise HubError(f"{endpoint()} does not answer as a hub does ({words_of(error)}); check HF_ENDPOINT") from error
    return [file.rfilename for file in info.siblings or ()]


def cached_snapshot(name: HubName, choose: Choose, why: Exception, note: Note) -> Snapshot:
    """The copy in the hub's cache, where all of it is there."""
    hub = hub_package(f"{name}")
    reason = reason_of(why)
    try:
        first = hub.hf_hub_download(name.repo, FIRST, revision=name.revision, local_files_only=True)
    except hub.errors.LocalEntryNotFoundError as error:
        raise HubError(f"{name} is not in the cache, and {reason}") from error
    folder = Path(first).parent
    files = choose(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    for file in tuple(files):
        check_hash(name, folder / file)
        if file.endswith(INDEX):
            files += shards_of(name, folder / file)
    if lacking := [file for file in files if not (folder / file).is_file()]:
        raise HubError(f"{name} is incomplete in the cache ({lacking[0]} is missing), and {reason}")
    note(f"the cached copy of {name} is used (commit {folder.name}), because {reason.partition(';')[0]}")
    return Snapshot(name, folder.name, folder, tuple(files))


def shards_of(name: HubName, index: Path) -> list[str]:
    """The files that an index of weights lists; its reader checks the rest of it."""
    try:
        found = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{index.name} of {name} is not an index of shards ({error}); ask its owner") from error
    if wrong := [shard for shard in found if not isinstance(shard, str) or PurePosixPath(shard).name != shard]:
        raise HubError(f"{index.name} of {name} names {wrong[0]!r}, expected a file beside it; ask its owner")
    return found


def check_hash(name: HubName, file: Path) -> None:
    """Compares a cached file with its hash, by which the cache names it; one that differs is removed from there.

    Large files go by their SHA-256, others by git's SHA-1 or, on some mirrors, a plain one.
    """
    if not file.is_symlink():
        return  # a cache without links does not know the hash
    expected = Path(os.readlink(file)).name
    if re.fullmatch("[0-9a-f]{64}", expected):
        digests = [hashlib.sha256()]
    elif re.fullmatch("[0-9a-f]{40}", expected):
        digests = [hashlib.sha1(f"blob {file.stat().st_size}\0".encode()), hashlib.sha1()]
    else:
        return
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            for digest in digests:
                digest.update(block)
    if expected not in [digest.hexdigest() for digest in digests]:
        blob = file.resolve()
        file.unlink()
        blob.unlink()
        raise HubError(f"{file.name} of {name} does not have its hash, so it was removed from the cache; run it again")


def hub_package(wanted_by: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        if missing := missing_package(error, wanted_by):
            raise missing from error
        raise
    return huggingface_hub


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Errors of the hub's client in the block become HubErrors of one line."""
    errors = hub_package(f"{name}").errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated; accept its terms at {endpoint()}/{name.repo}, then set HF_TOKEN to a token of yours"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{name.repo} has no revision {name.revision}; name a branch, a tag or a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"no model {name.repo} at {endpoint()}, or it is private; check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        file = unquote(str(error.response.url).partition("/resolve/")[2].partition("/")[2])
        raise HubError(f"{name} lists {file}, which {endpoint()} does not have; ask its owner") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(f"{name} was not downloaded: {reason_of(error.__cause__)}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = "set HF_TOKEN to a token that may do this" if status in (401, 403) else "try it again later"
        raise HubError(f"{endpoint()} refused {name} with status {status} ({words_of(error)}); {advice}") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise HubError(f"{name} was not transferred: {reason_of(error)}") from error
    except errors.FileMetadataError as error:
        raise HubError(f"{endpoint()} does not answer as a hub does ({words_of(error)}); check HF_ENDPOINT") from error
    except OSError as error:
        if error.strerror is not None:  # of the system, such as a full disk
            raise
        raise HubError(f"{name} was not downloaded completely ({words_of(error)}); run it again") from error


def no_answer(error: BaseException | None) -> bool:
    """Whether no hub answered or HF_HUB_OFFLINE is set; an error response counts as an answer."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    return isinstance(error, HTTPError | OfflineModeIsEnabled) and not isinstance(error, HfHubHTTPError)


def reason_of(error: BaseException | None) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to download"
    return f"{endpoint()} cannot be reached ({words_of(error)}); check the network, or HF_ENDPOINT"


def words_of(error: BaseException | None) -> str:
    """The first words of an error, without the addresses and request numbers that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(" (Request ID")[0].rstrip(".") if lines else type(error).__name__


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


@contextmanager
def hub_progress(progress: Progress) -> Iterator[Progress]:
    """Progress of transfers in the block: on a terminal the hub's own bars; elsewhere ours, with the hub's bars and
    warnings silenced.
    """
    if progress is not silent and sys.stderr is not None and sys.stderr.isatty():
        yield silent
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    hidden, level = are_progress_bars_disabled(), logging.get_verbosity()
    logging.set_verbosity_error()
    if not hidden:
        disable_progress_bars()
    try:
        yield progress
    finally:
        logging.set_verbosity(level)
        if not hidden:
            enable_progress_bars()
