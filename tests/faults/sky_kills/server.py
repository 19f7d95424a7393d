"""The API server of the tests' SkyPilot: `FOLDER PORT`. Requests die with it, machines do not."""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.faults.sky_kills import state as states
from tests.faults.sky_kills.controller import Controller, infra_of
from tests.faults.sky_kills.machines import Cloud
from tests.faults.sky_kills.state import Cluster, Document, ManagedTask

_TURN_S = 0.03


class Refusal(Exception):
    """An exception for the client to raise, by the name of its type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Request:
    """One request, from its arrival until its answer is fetched."""

    number: str
    method: str
    arguments: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict[str, Any])


class Server:
    """Deals with requests, each in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._requests: dict[str, Request] = {}
        self._file = folder / "state.json"
        self._controller = Controller(states.read(self._file), Cloud(folder))
        self._met_broken = 0

    def run(self) -> None:
        """Controllers at work."""
        while True:
            self._locked(self._controller.turn)
            time.sleep(_TURN_S)

    def _locked(self, act: Callable[[], Any]) -> Any:
        with self._lock:
            self._controller.script = states.script(self._folder / "script.json")
            found = act()
            states.write(self._file, self._controller.state)
            return found

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """None: there is no such request (any more)."""
        match path:
            case "/submit":
                return {"request": self._submit(body["method"], body["arguments"])}
            case "/get":
                request = self._requests.get(body["request"])
                if request is None:
                    return None
                request.done.wait()
                return request.answer
            case "/status":
                return {"requests": [_shown(r) for r in self._open()]}
            case "/finish":
                return self._locked(lambda: self._finish(body["replica"], body["code"]))
            case "/leak":
                leak = self._controller.leak
                return self._locked(lambda: leak(body["machine"]) or {})
            case "/preempt":
                preempt = self._controller.preempt
                return self._locked(lambda: preempt(body["machine"], notice=body["notice"]) or {})
            case _:
                return {}

    def _open(self) -> list[Request]:
        return [request for request in self._requests.values() if not request.done.is_set()]

    def _submit(self, method: str, arguments: dict[str, Any]) -> str:
        with self._lock:
            request = Request(f"request-{time.monotonic_ns()}", method, arguments)
            self._requests[request.number] = request
        threading.Thread(target=self._deal, args=(request,), daemon=True).start()
        return request.number

    def _deal(self, request: Request) -> None:
        acts: dict[str, Callable[[Request], tuple[str, Any]]] = {
            "sky.jobs.launch": self._jobs_launch,
            "sky.jobs.queue": self._queue,
            "sky.jobs.cancel": self._cancel_jobs,
            "sky.launch": self._launch,
            "sky.status": self._status,
            "sky.job_status": self._job_status,
            "sky.down": self._down,
            "sky.api_cancel": self._cancel_requests,
        }
        try:
            kind, value = acts[request.method](request)
            request.answer = {"kind": kind, "value": value}
        except Refusal as refusal:
            request.answer = {"error": {"type": refusal.kind, "text": str(refusal)}}
        request.done.set()

    def _pass(self, request: Request, seconds: float) -> None:
        if request.cancelled.wait(seconds):
            raise Refusal("RequestCancelled", "Request cancelled")

    def _jobs_launch(self, request: Request) -> tuple[str, Any]:
        self._accept(request)
        return "launched", self._locked(lambda: self._add_job(request))

    @property
    def _script(self) -> states.Script:
        return self._controller.script

    def _accept(self, request: Request) -> None:
        self._pass(request, self._script.accept_s)
        if self._script.broken and self._met_broken < self._script.broken_times:
            self._met_broken += 1
            raise Refusal(self._script.broken, "'LazyImport' object is not callable")

    def _add_job(self, request: Request) -> list[int]:
        self._pass(request, 0.0)
        state, documents = self._controller.state, request.arguments["documents"]
        number, group = state.next_job(), request.arguments["group"]
        if group is not None:
            if all(task.over for task in state.tasks if task.root == group and task.primary):
                raise Refusal("ValueError", f"Job group {group} is not running")
            name = documents[0]["name"]
            state.tasks.append(ManagedTask(number, group, name, name, documents[0]))
            return [number]
        header, *members = documents
        for document in members:
            primary = document["name"] in header["primary_tasks"]
            name = document["name"]
            state.tasks.append(ManagedTask(number, number, header["name"], name, document, primary))
        return [number]

    def _queue(self, request: Request) -> tuple[str, Any]:
        return "jobs", self._locked(lambda: [_row(t) for t in self._controller.state.tasks])

    def _cancel_jobs(self, request: Request) -> tuple[str, Any]:
        numbers, tasks = request.arguments["job_ids"], self._controller.state.tasks
        named = [t for t in tasks if t.job_id in numbers or t.root in numbers]
        return "", self._locked(lambda: self._controller.cancel(named))

    def _launch(self, request: Request) -> tuple[str, Any]:
        self._accept(request)
        (document,) = request.arguments["documents"]
        name = request.arguments["cluster"]
        cluster = Cluster(name, document, managed=False)
        # A machine that an unfinished launch has left is used.
        if name not in self._controller.state.machines:
            if not self._locked(lambda: self._controller.request_machine(name, document)):
                raise Refusal("ResourcesUnavailableError", "nobody has such a machine")
            self._locked(lambda: self._controller.provision(cluster))
        cluster = self._controller.state.clusters[name]
        self._pass(request, self._script.boot_s)
        cluster.status = "UP"
        self._pass(request, self._script.setup_s)
        self._locked(lambda: self._start_job(cluster))
        return "launched", 1

    def _start_job(self, cluster: Cluster) -> None:
        if cluster.name not in self._controller.state.machines:
            raise Refusal("ClusterSetUpError", "the machine is gone")
        if self._script.setup_fails:
            raise Refusal("CommandFailureException", "setup exited with code 7")
        if self._script.no_login:
            raise Refusal("RuntimeError", "Failed to SSH to 10.0.0.1 after timeout 600s")
        self._controller.run(cluster)
        cluster.job = "RUNNING"

    def _status(self, request: Request) -> tuple[str, Any]:
        names, refresh = request.arguments["names"], request.arguments["refresh"]
        return "clusters", self._locked(lambda: self._clusters(names, refresh))

    def _clusters(self, names: list[str], refresh: bool) -> list[dict[str, Any]]:
        state = self._controller.state
        for name in names if refresh else []:
            if name not in state.machines:
                state.clusters.pop(name, None)
        found = [c for c in state.clusters.values() if not names or c.name in names]
        return [_cluster(cluster) for cluster in found]

    def _job_status(self, request: Request) -> tuple[str, Any]:
        cluster = self._controller.state.clusters.get(request.arguments["cluster"])
        if cluster is None:
            raise Refusal("ClusterDoesNotExist", "there is no such cluster")
        if cluster.name not in self._controller.state.machines or cluster.status != "UP":
            raise Refusal("CommandFailureException", "its machine does not answer")
        return "statuses", {"1": cluster.job} if cluster.job else {}

    def _down(self, request: Request) -> tuple[str, Any]:
        name = request.arguments["cluster"]
        if name not in self._controller.state.clusters:
            raise Refusal("ClusterDoesNotExist", "there is no such cluster")
        self._pass(request, self._script.down_s)
        return "", self._locked(lambda: self._controller.terminate(name))

    def _cancel_requests(self, request: Request) -> tuple[str, Any]:
        for number in request.arguments["requests"]:
            found = self._requests.get(number)
            if found is not None:
                found.cancelled.set()
        return "", request.arguments["requests"]

    def _finish(self, replica: str, code: int) -> dict[str, Any]:
        """A bare machine's work ends."""
        for cluster in self._controller.state.clusters.values():
            if cluster.document["name"] == replica:
                self._controller.state.machines[cluster.name].code = code
        return {}


def _shown(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.number,
        "name": request.method,
        "cluster_name": request.arguments.get("cluster"),
        "request_body": json.dumps(request.arguments),
    }


def _row(task: ManagedTask) -> dict[str, Any]:
    return {
        "job_id": task.job_id,
        "task_id": 0,
        "job_name": task.name,
        "task_name": task.task,
        "status": task.status,
        "submitted_at": task.submitted_at,
        "start_at": task.start_at,
        **_place(task.document),
        "accelerators": None,
        "failure_reason": task.reason,
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    known = {"name": cluster.name, "status": cluster.status, "is_managed": cluster.managed}
    return {**known, "handle": None, **_place(cluster.document)}


def _place(document: Document) -> dict[str, str]:
    """Return the place as SkyPilot writes it."""
    cloud, _, region = infra_of(document).partition("/")
    return {"cloud": cloud.capitalize(), "region": region}


def main() -> None:
    server = Server(Path(sys.argv[1]))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = server.answer(self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Drop the log line."""

    listening = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    listening.daemon_threads = True
    threading.Thread(target=server.run, daemon=True).start()
    listening.serve_forever()


if __name__ == "__main__":
    main()
