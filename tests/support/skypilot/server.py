"""The API server of the tests' SkyPilot, in this process or in one of its own: `FOLDER PORT`.
Requests die with it, machines do not."""

import json
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.skypilot import state as states
from tests.support.skypilot.machines import Cloud
from tests.support.skypilot.state import Cluster, Document, Machine

SDK = Path(__file__).with_name("sdk")
_TURN_S = 0.03
_AWAY = 503


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
    """SkyPilot and its cloud. Deals with requests, each in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = states.read(folder / "state.json")
        self.script = states.Script()
        self.away = False
        # The launches that have a machine, as they arrived.
        self.launched: list[Document] = []
        self._folder = folder
        self._lock = threading.RLock()
        self._requests: dict[str, Request] = {}
        self._cloud = Cloud(folder)
        self._met_broken = 0

    def run(self) -> None:
        """See how machines do, for ever."""
        while True:
            self._locked(self._look_around)
            time.sleep(_TURN_S)

    def _locked(self, act: Callable[[], Any]) -> Any:
        with self._lock:
            file = self._folder / "script.json"
            if file.exists():
                self.script = states.script(file)
            found = act()
            states.write(self._folder / "state.json", self.state)
            return found

    def _look_around(self) -> None:
        for name, machine in self.state.machines.items():
            machine.code = self._cloud.look(name, machine)
            cluster = self.state.clusters.get(name)
            if cluster is not None and machine.code is not None:
                cluster.job = "FAILED" if machine.code else "SUCCEEDED"

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
                self.finish(body["cluster"], body["code"])
            case "/leak":
                self.leak(body["cluster"])
            case "/preempt":
                self.preempt(body["cluster"], notice=body["notice"])
            case _:
                pass
        return {}

    def finish(self, cluster: str, code: int = 0) -> None:
        """End the work of a bare machine."""

        def end() -> None:
            if cluster in self.state.machines:
                self.state.machines[cluster].code = code
                self._look_around()

        self._locked(end)

    def leak(self, cluster: str) -> None:
        """Boot a machine for nobody, as a server leaves one that is killed while it starts it."""
        self._locked(lambda: self._provision(Cluster(cluster, {"name": cluster}, "UP")))

    def preempt(self, cluster: str, *, notice: bool = False) -> None:
        """Take a machine away, at once or after a notice to what runs on it."""
        machine = self.state.machines[cluster]
        if notice:
            return self._cloud.signal(cluster, machine)
        self._cloud.terminate(cluster, machine)
        return self._locked(lambda: self.state.machines.pop(cluster))

    def _provision(self, cluster: Cluster) -> None:
        """Have the cloud boot a machine: from now on it costs money."""
        state = self.state
        state.clusters[cluster.name] = cluster
        state.machines[cluster.name] = Machine(time.time())
        replica = cluster.document["name"]
        now = sum(c.document["name"] == replica for c in state.clusters.values())
        state.most[replica] = max(now, state.most.get(replica, 0))

    def _terminate(self, cluster: str) -> None:
        machine = self.state.machines.pop(cluster, None)
        if machine is not None:
            self._cloud.terminate(cluster, machine)
        self.state.clusters.pop(cluster, None)

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

    def _launch(self, request: Request) -> tuple[str, Any]:
        self._pass(request, self.script.accept_s)
        if self.script.broken and self._met_broken < self.script.broken_times:
            self._met_broken += 1
            raise Refusal(self.script.broken, "'LazyImport' object is not callable")
        (document,) = request.arguments["documents"]
        name = request.arguments["cluster"]
        # A machine that an unfinished launch has left is used.
        if name not in self.state.machines:
            if not self._locked(lambda: self._find_machine(name, document)):
                raise Refusal("ResourcesUnavailableError", "nobody has such a machine")
            self._locked(lambda: self._provision(Cluster(name, document)))
        cluster = self.state.clusters[name]
        self._pass(request, self.script.boot_s)
        cluster.status = "UP"
        self._pass(request, self.script.setup_s)
        self._locked(lambda: self._start_job(cluster))
        return "launched", 1

    def _find_machine(self, replica: str, document: Document) -> bool:
        """Return whether there is a machine for a replica now."""
        requests = self.state.infras.setdefault(replica, [])
        requests.append(infra_of(document))
        again = len(requests) > self.script.sold_out + 1
        return len(requests) > self.script.sold_out and (self.script.recovers or not again)

    def _start_job(self, cluster: Cluster) -> None:
        if cluster.name not in self.state.machines:
            raise Refusal("ClusterSetUpError", "the machine is gone")
        if self.script.setup_fails:
            raise Refusal("CommandFailureException", "setup exited with code 7")
        if self.script.no_login:
            raise Refusal("RuntimeError", "Failed to SSH to 10.0.0.1 after timeout 600s")
        if not self.script.bare:
            self.state.machines[cluster.name] = self._cloud.boot(cluster.name, cluster.document)
        cluster.job = "RUNNING"
        self.launched.append(cluster.document)

    def _status(self, request: Request) -> tuple[str, Any]:
        names, refresh = request.arguments["names"], request.arguments["refresh"]
        return "clusters", self._locked(lambda: self._clusters(names, refresh))

    def _clusters(self, names: list[str], refresh: bool) -> list[dict[str, Any]]:
        for name in names if refresh else []:
            if name not in self.state.machines:
                self.state.clusters.pop(name, None)
        found = [c for c in self.state.clusters.values() if not names or c.name in names]
        return [_row(cluster) for cluster in found]

    def _job_status(self, request: Request) -> tuple[str, Any]:
        name = request.arguments["cluster"]
        self.state.looks[name] = self.state.looks.get(name, 0) + 1
        cluster = self.state.clusters.get(name)
        if cluster is None:
            raise Refusal("ClusterDoesNotExist", "there is no such cluster")
        if name not in self.state.machines or cluster.status != "UP":
            raise Refusal("CommandFailureException", "its machine does not answer")
        if not cluster.has_address:
            raise Refusal("ClusterNotUpError", "it was stopped or not properly set up")
        return "statuses", {"1": cluster.job} if cluster.job else {}

    def _down(self, request: Request) -> tuple[str, Any]:
        name = request.arguments["cluster"]
        if name not in self.state.clusters:
            raise Refusal("ClusterDoesNotExist", "there is no such cluster")
        self._pass(request, self.script.down_s)
        return "", self._locked(lambda: self._terminate(name))

    def _cancel_requests(self, request: Request) -> tuple[str, Any]:
        for number in request.arguments["requests"]:
            found = self._requests.get(number)
            if found is not None:
                found.cancelled.set()
        return "", request.arguments["requests"]


def _shown(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.number,
        "name": request.method,
        "cluster_name": request.arguments.get("cluster"),
    }


def _row(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster with its place as SkyPilot writes it."""
    cloud, _, region = infra_of(cluster.document).partition("/")
    place = {"cloud": cloud.capitalize(), "region": region}
    return {"name": cluster.name, "status": cluster.status, **place}


def infra_of(document: Document) -> str:
    """Return where a task's machine is: at its first candidate."""
    resources = document.get("resources", {})
    first = (resources.get("ordered") or resources.get("any_of") or [resources])[0]
    return first.get("infra", "")


@contextmanager
def served(server: Server, port: int = 0) -> Generator[str]:
    """Serve until the block ends; the value is the address."""

    class SkyPilotHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = None if server.away else server.answer(self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(_AWAY if server.away else 200 if answer is not None else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Drop the log line."""

    listening = ThreadingHTTPServer(("127.0.0.1", port), SkyPilotHandler)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


def main() -> None:
    server = Server(Path(sys.argv[1]))
    with served(server, int(sys.argv[2])):
        server.run()


if __name__ == "__main__":
    main()
