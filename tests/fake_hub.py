"""A small hub on loopback that speaks as much of the real one's HTTP as huggingface_hub asks for.

Large files are redirected to a second server, as the real hub redirects to its file servers.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

MODEL = "org/tiny"
COMMIT = "c0ffee" + "0" * 34
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")
COMMITS = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/commits/(?P<revision>.+)")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
DATE = "2026-01-01T00:00:00.000Z"
LARGE = (".safetensors", ".bin", ".gguf")


@dataclass
class Repo:
    """A model on the hub.

    Attributes:
        files: the content of every file of the main branch, by name.
        token: the access token that may read the model; None: everybody may.
        gated: everybody sees the model, but only the token reads its files.
        revisions: branches and commits that exist.
        statuses: the HTTP status that a file answers with; "" stands for the model itself.
        cut_after: bytes of a file's answer after which the connection breaks, once.
        stall_after: bytes of a file's answer after which nothing more comes until `FakeHub.released` is set; "" stands
            for the list of files.
        lists_digests: whether the list of files has sizes and digests.
        sends_ranges: whether a range that is asked for is sent, and not the whole file.
        range_bytes: of a range, at most, whatever is asked for.
        says_version: whether answers name the file's digest.
        next_files: files that change as soon as some of them was sent.
        older: the files of its earlier commits, by commit, the newest first.
        pulled: the files of commits that a pull request added, which the main branch does not have.
    """

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    revisions: tuple[str, ...] = ("main", COMMIT)
    statuses: dict[str, int] = field(default_factory=dict)
    cut_after: dict[str, int] = field(default_factory=dict)
    stall_after: dict[str, int] = field(default_factory=dict)
    lists_digests: bool = True
    sends_ranges: bool = True
    range_bytes: int | None = None
    says_version: bool = True
    next_files: dict[str, bytes] = field(default_factory=dict)
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    pulled: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str | None) -> dict[str, bytes]:
        """The files of a revision."""
        return (self.older | self.pulled).get(revision or "main", self.files)

    def commit_of(self, revision: str | None) -> str:
        """The commit that a revision stands for."""
        return revision if revision is not None and revision in self.older | self.pulled else COMMIT

    @property
    def history(self) -> list[str]:
        """The commits of the main branch, the newest first."""
        return [COMMIT, *self.older]

    @classmethod
    def of(cls, folder: Path) -> Repo:
        """The files of a folder."""
        return cls({path.name: path.read_bytes() for path in folder.iterdir()})


@dataclass(frozen=True)
class HubRequest:
    """A request about a model, as the hub received it.

    Attributes:
        method: of HTTP.
        path: without the query, unquoted.
        bytes_range: the Range header, None without one.
        token: the Authorization header, None without one.
        server: "hub", or "files" for the server that large files are redirected to.
    """

    method: str
    path: str
    bytes_range: str | None
    token: str | None
    server: str


@dataclass
class FakeHub:
    """The hub: the models it has and the requests it received.

    Attributes:
        repos: models by name.
        requests: all requests about models, in order.
        status: the HTTP status that every request is refused with; None: each is answered.
        tokens: access tokens of other users.
        url: address of the hub.
        files_url: address of the server of large files.
        released: lets answers go on that `Repo.stall_after` holds.
        stalled: set once an answer is held.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[HubRequest] = field(default_factory=list)
    status: int | None = None
    tokens: set[str] = field(default_factory=set)
    url: str = ""
    files_url: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> set[str]:
        """Names of the files whose contents were asked for."""
        gets = (request for request in self.requests if (request.method, request.server) == ("GET", "hub"))
        paths = (RESOLVE.fullmatch(request.path) for request in gets)
        return {match["file"] for match in paths if match is not None}

    def ranges(self, file: str) -> list[str | None]:
        """The range of each request for a file's contents."""
        return [
            request.bytes_range
            for request in self.requests
            if (request.method, request.server) == ("GET", "files") and request.path.endswith(f"/{file}")
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10

    @property
    def hub(self) -> FakeHub:
        return cast("_Server", self.server).hub

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        name = cast("_Server", self.server).name
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        match = COMMITS.fullmatch(path) or API.fullmatch(path) or RESOLVE.fullmatch(path)
        if match is not None:  # huggingface_hub also asks for a list of programs that it is part of
            self.hub.requests.append(HubRequest(self.command, path, self.headers.get("Range"), token, name))
        repo = None if match is None else self.hub.repos.get(match["repo"])
        asked = {} if match is None else match.groupdict()
        refusal = self._refusal(repo, asked, token) if name == "hub" else None
        if refusal is not None:
            status, code = refusal
            self._send(status, b"", {"X-Error-Code": code} if code else {})
        elif repo is not None and COMMITS.fullmatch(path):
            history = [{"id": one, "authors": [], "date": DATE, "title": "", "message": ""} for one in repo.history]
            self._send(200, json.dumps(history).encode(), {})
        elif repo is not None and "file" not in asked:
            listing = json.dumps(self._listing(asked["repo"], repo, asked["revision"])).encode()
            self._send(200, listing, {}, stall=repo.stall_after.pop("", None))
        elif repo is not None:
            self._send_file(repo, asked, name)
        else:
            self._send(404, b"", {})

    def _refusal(self, repo: Repo | None, asked: dict[str, str | None], token: str | None) -> tuple[int, str] | None:
        if self.hub.status is not None:
            return self.hub.status, ""
        own = None if repo is None else repo.token
        if token is not None and token.removeprefix("Bearer ") not in {*self.hub.tokens, own}:
            return 401, ""
        if repo is None:
            return (401, "") if token is None else (404, "RepoNotFound")
        if status := repo.statuses.get(asked.get("file") or ""):
            return status, "EntryNotFound" if status == 404 else ""
        if own is not None and token != f"Bearer {own}":
            if not repo.gated:
                return (401, "") if token is None else (404, "RepoNotFound")
            if "file" in asked:
                return (401 if token is None else 403), "GatedRepo"
        if asked["revision"] not in (None, *repo.revisions, *repo.older, *repo.pulled):
            return 404, "RevisionNotFound"
        files = repo.at(asked["revision"])
        return (404, "EntryNotFound") if "file" in asked and asked["file"] not in files else None

    def _listing(self, name: str | None, repo: Repo, revision: str | None) -> dict[str, object]:
        siblings = []
        for file, content in repo.at(revision).items():
            entry: dict[str, object] = {"rfilename": file}
            if repo.lists_digests:
                entry |= {"size": len(content), "blobId": _blob_id(content)}
                if file.endswith(LARGE):
                    sha256 = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        about = {"sha": repo.commit_of(revision), "private": False, "gated": repo.gated, "tags": []}
        return {"id": name, "siblings": siblings, **about}

    def _send_file(self, repo: Repo, path: dict[str, str], server: str) -> None:
        file, commit = path["file"], repo.commit_of(path["revision"])
        content = repo.at(commit)[file]
        if file.endswith(LARGE) and server == "hub":
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            linked = linked if repo.says_version else {}
            where = {"Location": f"{self.hub.files_url}{self.path}", "X-Repo-Commit": commit}
            self._send(302, b"", where | linked)
            return
        headers = {"ETag": f'"{_blob_id(content)}"', "X-Repo-Commit": commit}
        status = 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and repo.sends_ranges:
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            end = end if repo.range_bytes is None else min(end, start + repo.range_bytes - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            status, content = 206, content[start : end + 1]
        self._send(status, content, headers, repo.cut_after.pop(file, None), repo.stall_after.pop(file, None))
        if file in repo.next_files:
            repo.files[file] = repo.next_files.pop(file)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None, stall: int | None = None
    ) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if stall is not None:
            self.wfile.write(body[:stall])
            self.hub.stalled.set()
            self.hub.released.wait()
            body = body[stall:]
        self.wfile.write(body if cut is None else body[:cut])
        self.close_connection = self.close_connection or cut is not None


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, hub: FakeHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.name = hub, name
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave in the middle of an answer are expected."""


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub without models."""
    hub = FakeHub()
    servers = [_Server(hub, "hub"), _Server(hub, "files")]
    hub.url, hub.files_url = (server.url for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        close_session()  # its open connections hold threads of the servers
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def use_hub(url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub ask this hub, as the environment would have before it was imported."""
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache.with_name("harnesses")))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache.with_name("token")))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
