"""A hub on 127.0.0.1 that the real client of the Hugging Face hub talks to: enough of its API to download and upload.

Repositories are folders of bytes by commit. A test can break a file: cut it off, send other bytes, lose it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 2_000  # bytes from which a file is stored as LFS, under its SHA-256
TOKEN = "hf_loopback"  # the one token that may read private repositories and write


@dataclass
class Repository:
    """`commits` maps a commit to its files, `refs` a branch or tag to a commit."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    cut: set[str] = field(default_factory=set)  # files of which the connection breaks off in the middle
    changed: set[str] = field(default_factory=set)  # files whose bytes are not those of their hash
    lost: set[str] = field(default_factory=set)  # files that are listed and cannot be had

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        digest = hashlib.sha1(repr([*sorted(files.items()), branch, len(self.commits)]).encode()).hexdigest()
        self.commits[digest] = dict(files)
        self.refs[branch] = digest
        return digest

    def resolved(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # uploaded to LFS, by SHA-256
    requests: list[str] = field(default_factory=list)
    full: bool = False  # takes no more uploads

    def add(self, name: str, folder: Path, **state: Any) -> Repository:
        repository = Repository(**state)
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        repository.commit(files)
        self.repositories[name] = repository
        return repository

    def downloads(self) -> list[str]:
        """The files whose bytes were asked for, in order."""
        return [
            line.split("/resolve/")[1].partition("/")[2]
            for line in self.requests
            if line.startswith("GET /") and "/resolve/" in line
        ]


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag_of(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            """Requests are kept for tests, not printed."""

        def do_HEAD(self) -> None:
            self.answer()

        do_GET = do_POST = do_PUT = do_HEAD

        def answer(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = unquote(urlsplit(self.path).path)
            body = self.body()
            for pattern, method in ROUTES:
                if (found := re.fullmatch(pattern, path)) is not None:
                    getattr(self, method)(body, *found.groups())
                    return
            self.refuse(404, "EntryNotFound")

        def body(self) -> bytes:
            """What the client sends, which is in chunks where it streams a file."""
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def send_json(self, values: Any, status: int = 200) -> None:
            self.send(status, json.dumps(values).encode(), {"Content-Type": "application/json"})

        def refuse(self, status: int, code: str = "", headers: dict[str, str] | None = None) -> None:
            self.send(status, b"", {**({"X-Error-Code": code} if code else {}), **(headers or {})})

        @property
        def known(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def repository(self, name: str) -> Repository | None:
            """A private one is not there for strangers."""
            found = hub.repositories.get(name)
            if found is None or (found.private and not self.known):
                self.refuse(401 if not self.known else 404, "RepoNotFound")
                return None
            return found

        def info(self, body: bytes, name: str, revision: str | None) -> None:
            if (repository := self.repository(name)) is None:
                return
            if (commit := repository.resolved(revision or "main")) is None:
                self.refuse(404, "RevisionNotFound")
                return
            files = [{"rfilename": file} for file in repository.commits[commit]]
            self.send_json({"id": name, "sha": commit, "siblings": files, "private": repository.private})

        def resolve(self, body: bytes, name: str, revision: str, file: str) -> None:
            if (repository := self.repository(name)) is None:
                return
            if repository.gated and not self.known:
                self.refuse(403, "GatedRepo")
                return
            if (commit := repository.resolved(revision)) is None:
                self.refuse(404, "RevisionNotFound")
                return
            where = {"X-Repo-Commit": commit}
            if file not in repository.commits[commit] or file in repository.lost:
                self.refuse(404, "EntryNotFound", where)
                return
            content = repository.commits[commit][file]
            headers = {**where, "ETag": f'"{etag_of(content)}"', "Accept-Ranges": "bytes"}
            if file in repository.changed:
                content = bytes([content[0] ^ 1]) + content[1:]
            self.send_file(file, content, headers, file in repository.cut)

        def send_file(self, file: str, content: bytes, headers: dict[str, str], cut: bool) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(asked[1]) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            if not cut or self.command == "HEAD":
                self.send(206 if asked else 200, content[start:], headers)
                return
            self.send_response(206 if asked else 200)
            for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
                self.send_header(key, value)
            self.end_headers()
            if not asked:
                self.wfile.write(content[: len(content) // 2])
            self.close_connection = True

        def create(self, body: bytes) -> None:
            values = json.loads(body)
            name = "/".join(filter(None, (values.get("organization"), values["name"])))
            if not self.known:
                self.refuse(401)
            elif name in hub.repositories:
                self.send_json({"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409)
            else:
                hub.repositories[name] = Repository(private=values.get("visibility") == "private")
                hub.repositories[name].commit({".gitattributes": b"*.data filter=lfs\n"})
                self.send_json({"url": f"{hub.url}/{name}", "id": name})

        def branch(self, body: bytes, name: str, branch: str) -> None:
            if (repository := self.repository(name)) is None:
                return
            if branch in repository.refs:
                self.refuse(409)
                return
            repository.refs[branch] = repository.refs["main"]
            self.send_json({})

        def yaml(self, body: bytes) -> None:
            self.send_json({"errors": [], "warnings": []})

        def preupload(self, body: bytes, name: str, revision: str) -> None:
            if not self.known:
                self.refuse(401)
                return
            files = json.loads(body)["files"]
            modes = [(file["path"], "lfs" if file["size"] >= LARGE else "regular") for file in files]
            self.send_json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]})

        def batch(self, body: bytes, name: str) -> None:
            objects = json.loads(body)["objects"]
            self.send_json(
                {
                    "transfer": "basic",
                    "objects": [
                        {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}} for one in objects
                    ],
                }
            )

        def store(self, body: bytes, oid: str) -> None:
            if hub.full:
                self.refuse(507)
                return
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            self.send(200)

        def commit(self, body: bytes, name: str, revision: str) -> None:
            if (repository := self.repository(name)) is None:
                return
            if not self.known:
                self.refuse(403)
                return
            files = dict(repository.commits[repository.refs[revision]])
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            oid = repository.commit(files, revision)
            self.send_json({"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})

    return Handler


NAME = r"([\w.-]+(?:/[\w.-]+)?)"
ROUTES = (
    (rf"/api/models/{NAME}/preupload/(.+)", "preupload"),
    (rf"/api/models/{NAME}/commit/(.+)", "commit"),
    (rf"/api/models/{NAME}/branch/(.+)", "branch"),
    (rf"/api/models/{NAME}(?:/revision/(.+))?", "info"),
    (r"/api/repos/create", "create"),
    (r"/api/validate-yaml", "yaml"),
    (rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"/lfs/(\w+)", "store"),
    (rf"/{NAME}/resolve/([^/]+)/(.+)", "resolve"),
)


@contextmanager
def hub_of_this_process(folder: Path, token: str | None = None) -> Iterator[Hub]:
    """The server as the hub of this process, with a cache of its own.

    The client reads its environment when it is imported, which may be long ago, so its constants are set.
    """
    import pytest
    from huggingface_hub import constants

    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage speaks another protocol
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
        if token is None:
            patch.delenv("HF_TOKEN", raising=False)
        else:
            patch.setenv("HF_TOKEN", token)
        yield hub
