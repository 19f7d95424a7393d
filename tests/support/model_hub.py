"""A server with as much of the hub's protocol as staging a model needs."""

import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.support.http_answers import Answer, serve_answers

FIRST, SECOND = "1" * 40, "2" * 40
TOKEN = "hf_good"


@dataclass
class ModelHub:
    """One model or data set, `org/model`: files by commit, branches, and whether it is gated.
    `kind` is "models" or "datasets"."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str] = field(default_factory=lambda: {"main": FIRST})
    gated: bool = False
    private: bool = False
    kind: str = "models"
    # Sizes that are reported instead of the true ones.
    reported_sizes: dict[str, int] = field(default_factory=dict[str, int])
    endpoint: str = ""
    requests: list[str] = field(default_factory=list[str])

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        path = unquote(path.partition("?")[0])
        api = f"/api/{self.kind}/org/model"
        files = "/org/model" if self.kind == "models" else f"/{self.kind}/org/model"
        if path == api or path.startswith(f"{api}/revision/"):
            if self.private and token != TOKEN:
                return 401, {"x-error-code": "RepoNotFound"}, b"Repository not found"
            return self._info(path.removeprefix(api).removeprefix("/revision/") or "main")
        if not path.startswith((f"{files}/", f"{api}/")):
            return 404, {"x-error-code": "RepoNotFound"}, b"Repository not found"
        if self.gated and token != TOKEN:
            return (403 if token else 401), {"x-error-code": "GatedRepo"}, b"Access is restricted"
        if path.endswith("/auth-check"):
            return 200, {}, b"{}"
        if path.startswith(f"{api}/tree/"):
            return self._tree(path.split("/")[6])
        return self._file(*path.removeprefix(f"{files}/resolve/").split("/", 1))

    def _info(self, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self.branches.get(revision, revision)
        if commit not in self.commits:
            return 404, {"x-error-code": "RevisionNotFound"}, b"Invalid rev id"
        names = [{"rfilename": name} for name in self.commits[commit]]
        body = {"id": "org/model", "sha": commit, "siblings": names, "gated": self.gated}
        return 200, {}, json.dumps(body).encode()

    def _tree(self, revision: str) -> tuple[int, dict[str, str], bytes]:
        files = self.commits[self.branches.get(revision, revision)]
        rows: list[dict[str, Any]] = [
            {"type": "file", "path": name, "size": self._size(name, data), "oid": _tag(data)}
            for name, data in files.items()
        ]
        return 200, {}, json.dumps(rows).encode()

    def _file(self, revision: str, name: str) -> tuple[int, dict[str, str], bytes]:
        commit = self.branches.get(revision, revision)
        data = self.commits[commit][name]
        size = str(self._size(name, data))
        headers = {"etag": f'"{_tag(data)}"', "x-repo-commit": commit, "x-linked-size": size}
        return 200, headers, data

    def _size(self, name: str, data: bytes) -> int:
        return self.reported_sizes.get(name, len(data))


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def model_hub(hub: ModelHub) -> Generator[ModelHub]:
    """Serve a hub; its `endpoint` is for HF_ENDPOINT."""

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        hub.requests.append(f"{request.command} {request.path}")
        token = (request.headers.get("authorization") or "").removeprefix("Bearer ")
        return hub.answer(request.path, token)

    with serve_answers(answer) as hub.endpoint:
        yield hub
