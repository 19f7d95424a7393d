"""The part of wandb's server that a run needs: it keeps the history lines of each run."""

import gzip
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}


class WandbServer:
    """The runs that were logged to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Lines of wandb-history.jsonl by run id; each at the offset that the client named.
        self.histories: dict[str, dict[int, str]] = {}
        # Run ids, in the order in which starts announced them.
        self.announced: list[str] = []

    def lines(self, run_id: str) -> list[dict[str, Any]]:
        history = self.histories.get(run_id, {})
        return [json.loads(history[offset]) for offset in sorted(history)]

    def answer(self, path: str, body: Any) -> Any:
        """To one POST."""
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], body.get("files", {}))
            return {"limits": {}}
        return {"data": self._graphql(body["query"], body.get("variables") or {})}

    def _stream(self, run_id: str, files: dict[str, Any]) -> None:
        history = files.get("wandb-history.jsonl")
        if history:
            lines = enumerate(history["content"], history["offset"])
            self.histories.setdefault(run_id, {}).update(lines)

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            return {"model": {**_PROJECT, "bucket": self._bucket(variables["name"])}}
        if "UpsertBucket" in query:
            self.announced.append(variables["name"])
            return {"upsertBucket": {"bucket": _run(variables["name"]), "inserted": True}}
        if "CreateRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/upload/{name}"}
                for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self, run_id: str) -> dict[str, Any] | None:
        """Return the stored state that a resumed run receives."""
        history = self.histories.get(run_id)
        if not history:
            return None
        last = history[max(history)]
        return {
            **_run(run_id),
            "summaryMetrics": last,
            "logLineCount": 0,
            "historyLineCount": len(history),
            "eventsLineCount": 0,
            "historyTail": json.dumps([last]),
            "eventsTail": "[]",
            "config": "{}",
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }


def _run(run_id: str) -> dict[str, Any]:
    return {"id": "x", "name": run_id, "displayName": run_id, "project": _PROJECT}


@contextmanager
def wandb_server() -> Generator[WandbServer]:
    """One on a port of its own."""

    class RunHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            known = self.path.endswith(("/graphql", "/file_stream"))
            self._reply(server.answer(self.path, json.loads(body)) if known else {})

        def do_PUT(self) -> None:
            self._body()
            self._reply({})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body

        def _reply(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), RunHandler)
    http.daemon_threads = True
    server = WandbServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
