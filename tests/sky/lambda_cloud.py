"""An emulator of Lambda Cloud's HTTP API, as far as SkyPilot's provisioner uses it.

`python -m tests.sky.lambda_cloud` listens on the login host of the box. Requests of tests go
to /_emulator: `Cloud` there is the client, and its list of machines the oracle for leaks.
"""

import json
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.sky.box import Layout
from tests.sky.catalog import LAMBDA_MACHINES, LAMBDA_REGIONS
from tests.sky.machines import Machine
from tests.sky.offline import CLOUD_KEY, CLOUD_PORT, cloud_url

_API = "/api/v1"
_FIRST_ADDRESS = 101
Json = dict[str, Any]


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message, "suggestion": ""}}


@dataclass
class Account:
    """The cloud's state: keys, rules, machines, and injected faults."""

    layout: Layout
    keys: list[Json] = field(default_factory=list[Json])
    firewall: list[Json] = field(default_factory=list[Json])
    machines: dict[str, tuple[Json, Machine]] = field(
        default_factory=dict[str, tuple[Json, Machine]]
    )
    capacity: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAMBDA_REGIONS, 4))
    boot_delay_s: float = 0.5
    # While true, no call of the API gets an answer, or only that something is broken.
    away: bool = False
    broken: bool = False
    calls: list[str] = field(default_factory=list[str])
    # The addresses of these calls.
    failed: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listed(self) -> list[Json]:
        return [shown for shown, _ in list(self.machines.values())]

    def types(self) -> Json:
        free = [region for region, count in self.capacity.items() if count > 0]
        regions = [{"name": region, "description": region} for region in free]
        return {
            name: {"instance_type": _type(name), "regions_with_capacity_available": regions}
            for name in LAMBDA_MACHINES
        }

    def launch(self, wish: Json) -> Json:
        with self._lock:
            region = wish["region_name"]
            if self.capacity.get(region, 0) < wish["quantity"]:
                code = "instance-operations/launch/insufficient-capacity"
                raise Refusal(400, code, "Not enough capacity to fulfill launch request.")
            self.capacity[region] -= 1
            identity = uuid.uuid4().hex
            machine = self._machine(identity, wish["ssh_key_names"][0])
            shown = _shown(identity, machine, wish)
            self.machines[identity] = (shown, machine)
        threading.Thread(target=self._boot, args=(shown, machine), daemon=True).start()
        return {"instance_ids": [identity]}

    def terminate(self, identity: str) -> Json | None:
        """Return a machine as shown for the last time; None when there is no such machine."""
        with self._lock:
            shown, machine = self.machines.pop(identity, (None, None))
            if shown is None or machine is None:
                return None
            self.capacity[shown["region"]["name"]] += 1
        machine.kill()
        shown["status"] = "terminating"
        return shown

    def change(self, wish: Json) -> None:
        """Set faults as a test requests."""
        self.capacity.update(wish.get("capacity", {}))
        self.boot_delay_s = wish.get("boot_delay_s", self.boot_delay_s)
        self.away = wish.get("away", self.away)
        self.broken = wish.get("broken", self.broken)
        if "preempt" in wish and self.terminate(wish["preempt"]) is None:
            raise Refusal(404, "emulator/no-such-machine", wish["preempt"])

    def _machine(self, identity: str, key_name: str) -> Machine:
        taken = {machine.number for _, machine in self.machines.values()}
        number = next(number for number in range(_FIRST_ADDRESS, 255) if number not in taken)
        key = next(key["public_key"] for key in self.keys if key["name"] == key_name)
        endpoint = cloud_url(self.layout) + _API
        return Machine(self.layout, f"vm-{identity[:8]}", number, key, endpoint)

    def _boot(self, shown: Json, machine: Machine) -> None:
        booted = machine.boot()
        time.sleep(self.boot_delay_s)
        if booted:
            shown["status"] = "active"


def _type(name: str) -> Json:
    _, _, cores, memory, price = LAMBDA_MACHINES[name]
    specs = {"vcpus": cores, "memory_gib": memory, "storage_gib": 512}
    cents = round(100 * price)
    return {"name": name, "description": name, "price_cents_per_hour": cents, "specs": specs}


def _shown(identity: str, machine: Machine, wish: Json) -> Json:
    return {
        "id": identity,
        "name": wish["name"],
        "ip": machine.address,
        "private_ip": machine.address,
        "hostname": machine.address,
        "status": "booting",
        "ssh_key_names": wish["ssh_key_names"],
        "region": {"name": wish["region_name"]},
        "instance_type": {"name": wish["instance_type_name"]},
    }


class Handler(BaseHTTPRequestHandler):
    """One request; `account` is set on the class that serves."""

    protocol_version = "HTTP/1.1"
    account: Account

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def log_message(self, format: str, *args: Any) -> None:
        print(time.strftime("%H:%M:%S"), format % args, flush=True)

    def _answer(self, method: Any) -> None:
        path = self.path.split("?")[0]
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        if path.startswith(_API) and (self.account.away or self.account.broken):
            self.account.failed.append(self.client_address[0])
            if self.account.away:
                self.close_connection = True
                return
        try:
            self._check_health(path)
            self._check_key(path)
            self._send(200, method(path.removeprefix(_API), body))
        except Refusal as refusal:
            self._send(refusal.status, refusal.body)

    def _check_health(self, path: str) -> None:
        if path.startswith(_API) and self.account.broken:
            raise Refusal(500, "global/internal-error", "Something went wrong")

    def _check_key(self, path: str) -> None:
        if path.startswith(_API) and self.headers.get("authorization") != f"Bearer {CLOUD_KEY}":
            raise Refusal(401, "global/invalid-api-key", "API key was invalid")

    def _send(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _get(self, path: str, _: Json) -> Json:
        account = self.account
        answers: dict[str, Any] = {
            "/instances": account.listed,
            "/ssh-keys": lambda: account.keys,
            "/firewall-rules": lambda: account.firewall,
            "/instance-types": account.types,
        }
        if path in answers:
            return {"data": answers[path]()}
        if path == "/_emulator":
            shown = {"machines": account.listed(), "calls": account.calls}
            return {**shown, "failed": account.failed}
        if path == "/health":
            return {}
        raise Refusal(404, "global/object-does-not-exist", path)

    def _put(self, path: str, body: Json) -> Json:
        if path != "/firewall-rules":
            raise Refusal(404, "global/object-does-not-exist", path)
        self.account.firewall = body.get("data", [])
        return {"data": self.account.firewall}

    def _post(self, path: str, body: Json) -> Json:
        account = self.account
        account.calls.append(path)
        if path == "/_emulator":
            account.change(body)
            return {}
        if path == "/ssh-keys":
            account.keys.append({"id": uuid.uuid4().hex, **body})
            return {"data": account.keys[-1]}
        if path == "/instance-operations/launch":
            return {"data": account.launch(body)}
        if path == "/instance-operations/terminate":
            gone = [account.terminate(identity) for identity in body["instance_ids"]]
            return {"data": {"terminated_instances": [shown for shown in gone if shown]}}
        raise Refusal(404, "global/object-does-not-exist", path)


def main() -> int:
    account = Account(Layout())
    handler = type("AccountHandler", (Handler,), {"account": account})
    server = ThreadingHTTPServer(("0.0.0.0", CLOUD_PORT), handler)
    server.daemon_threads = True
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving on {CLOUD_PORT}", flush=True)
    server.serve_forever()
    for shown in account.listed():
        account.terminate(shown["id"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
