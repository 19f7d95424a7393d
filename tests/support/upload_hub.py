"""A server with as much of the hub's protocol as its client needs to publish a model: repositories,
branches, uploads of large files, and commits."""

import base64
import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import Any
from urllib.parse import unquote

from tests.support.http_answers import Answer, serve_answers

WRITER = "hf_may_write_0123456789"
_LARGE = ".safetensors"


@dataclass
class UploadHub:
    """Repositories by name, each with its branches, of which each has its files' contents. `puts`
    are the digests of large files that were sent; no more than `accepted` of them are taken."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict[str, Any])
    private: dict[str, bool] = field(default_factory=dict[str, bool])
    large: dict[str, bytes] = field(default_factory=dict[str, bytes])
    puts: list[str] = field(default_factory=list[str])
    commits: list[list[str]] = field(default_factory=list[list[str]])
    accepted: int = 1_000
    endpoint: str = ""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        if path.startswith("/large/"):
            return self._take_large(path.removeprefix("/large/"), body)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if token != WRITER:
            return 403, {"error": "this token may not write"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"objects": [self._offer(each) for each in json.loads(body)["objects"]]}
        _, _, _, owner, name, *rest = path.split("/")
        repo = f"{owner}/{name}"
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        if method == "GET":
            return 200, {"id": repo, "sha": "0" * 40, "private": self.private[repo], "siblings": []}
        branch = unquote(rest[1])
        if rest[0] == "branch":
            self.repos[repo].setdefault(branch, {})
            return 200, {}
        files = self.repos[repo][branch]
        if rest[0] == "preupload":
            return 200, {"files": [_choose_mode(each, files) for each in json.loads(body)["files"]]}
        return self._commit(repo, files, [json.loads(line) for line in body.splitlines()])

    def _create(self, wanted: Mapping[str, Any]) -> tuple[int, Any]:
        repo = f"{wanted['organization']}/{wanted['name']}"
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, {"main": {}})
        self.private.setdefault(repo, wanted.get("visibility") == "private")
        return status, {"url": f"{self.endpoint}/{repo}"}

    def _offer(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        digest = wanted["oid"]
        upload = {"upload": {"href": f"{self.endpoint}/large/{digest}"}}
        # What is here need not be sent again.
        return {"oid": digest, "size": wanted["size"]} | (
            {} if digest in self.large else {"actions": upload}
        )

    def _take_large(self, digest: str, body: bytes) -> tuple[int, Any]:
        if len(self.puts) >= self.accepted:
            return 400, {"error": "the disk is full"}
        assert hashlib.sha256(body).hexdigest() == digest
        self.puts.append(digest)
        self.large[digest] = body
        return 200, {}

    def _commit(self, repo: str, files: dict[str, bytes], lines: list[Any]) -> tuple[int, Any]:
        names: list[str] = []
        for line in lines[1:]:
            value = line["value"]
            is_large = line["key"] == "lfsFile"
            data = self.large[value["oid"]] if is_large else base64.b64decode(value["content"])
            files[value["path"]] = data
            names.append(value["path"])
        self.commits.append(names)
        oid = f"{len(self.commits):040d}"
        return 200, {"commitUrl": f"{self.endpoint}/{repo}/commit/{oid}", "commitOid": oid}


def _choose_mode(asked: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    name, known = asked["path"], files.get(asked["path"])
    is_large = name.endswith(_LARGE)
    oid = None
    if known is not None:
        blob = b"blob %d\0" % len(known) + known
        oid = hashlib.sha256(known).hexdigest() if is_large else hashlib.sha1(blob).hexdigest()
    mode = "lfs" if is_large else "regular"
    return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}


@contextmanager
def upload_hub() -> Generator[UploadHub]:
    """Serve a hub without repositories; its `endpoint` is for HF_ENDPOINT."""
    hub, lock = UploadHub(), Lock()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        token = (request.headers.get("authorization") or "").removeprefix("Bearer ")
        with lock:
            said = hub.answer(request.command, request.path.partition("?")[0], token, body)
        return said[0], {"content-type": "application/json"}, json.dumps(said[1]).encode()

    with serve_answers(answer) as hub.endpoint:
        yield hub
