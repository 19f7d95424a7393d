"""A runs folder whose machines are SkyPilot's, and SkyPilot's server; both come and go."""

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc.free_ports import free_port
from flotilla_launcher.backends.sky import names
from flotilla_launcher.state import Cleanup, Outcome, ReplicaKey
from flotilla_launcher.store.row_codec import StoredRun
from tests.faults.launcher_kills.folder import ACCEPTING, Runs
from tests.support.launcher import spec
from tests.support.repository import ROOT
from tests.support.skypilot import state as states
from tests.support.skypilot.server import SDK
from tests.support.skypilot.state import State

SERVICES = ("learner", "env_gateway", "rollout")
_VMS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cpu_4x,,,4.0,16.0,{price},{region},,
"""
# Of two clouds.
INFRAS = ("lambda/us-east-1", "nebius/eu-north1")
# Of their machines, in the catalog of prices: a dollar a second, and two.
PRICES = (3600.0, 7200.0)
_CANDIDATES = {"ordered": [{"infra": infra, "cpus": "4+"} for infra in INFRAS]}


@dataclass
class SkyFolder(Runs):
    """`sky` is SkyPilot's folder, `port` its server's."""

    sky: Path = field(kw_only=True)
    port: int = field(kw_only=True)
    server: asyncio.subprocess.Process | None = None
    # Whether the tests' services end on command, as watched ones do.
    obedient: bool = True
    stopping: asyncio.Task[None] | None = None

    async def begin(self, **launcher: Any) -> None:
        """Start a run of machines that run nothing."""
        await self.start(self.wish({"modules": ACCEPTING, **launcher}))

    def wish(self, launcher: dict[str, Any], **sections: Any) -> dict[str, Any]:
        sky = {
            **dict.fromkeys(SERVICES, _CANDIDATES),
            "advertise": "127.0.0.1",
            "python": sys.executable,
            "setup": "true",
            "provision": {"backoff_s": 0.05, "timeout_s": 15.0},
            "unit_lease_s": 10.0,
            **launcher.pop("sky", {}),
        }
        return spec(
            launcher={"backend": "sky", "clean_s": 10.0, "sky": sky, **launcher}, **sections
        )

    async def logs(self, service: str) -> list[str]:
        """The lines that TailLogs has of a service."""
        request = pb.TailLogsRequest(run_id=self.run_id, service=service, lines=1000)
        async with self.stub() as stub:
            return [answer.line async for answer in stub.TailLogs(request)]

    def script(self, **wishes: Any) -> None:
        file = self.sky / "script.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps({**known, **wishes}))
        draft.replace(file)

    @property
    def state(self) -> State:
        """The oracle."""
        return states.read(self.sky / "state.json")

    def machines(self) -> list[str]:
        """Return what the cloud has."""
        return sorted(self.state.machines)

    def name(self, service: str, replica: int = 0) -> str:
        key: ReplicaKey = (service, replica)
        return names.member_name(names.owner_of(self.runs), self.run_id, key)

    def machine_requests(self, service: str) -> int:
        """Return how often a machine for replica 0 was requested."""
        return len(self.state.infras.get(self.name(service), []))

    async def up(self) -> None:
        """Start SkyPilot's server, where it was before."""
        self.server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.skypilot.server", str(self.sky), str(self.port)),
            cwd=ROOT,
        )
        await self.until(self._answers)

    async def down(self) -> None:
        """kill -9: its requests are gone with it."""
        assert self.server is not None
        self.server.kill()
        await self.server.wait()

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def has_machine(self, service: str) -> bool:
        """One that is set up."""
        cluster = self.state.clusters.get(self.name(service))
        return cluster is not None and cluster.job == "RUNNING"

    def sets_up(self, service: str) -> bool:
        """Return whether its machine is there, and is being set up."""
        cluster = self.state.clusters.get(self.name(service))
        return cluster is not None and cluster.status == "UP" and cluster.job is None

    def on_command(self, service: str, command: Any) -> None:
        """End the service on such a command: its machine's work is over."""
        if self.obedient and command != registry_pb.COMMAND_NONE:
            self.finish(service)

    def finish(self, service: str, code: int = 0) -> None:
        self.post("finish", cluster=self.name(service), code=code)

    def post(self, path: str, **body: Any) -> None:
        url = f"http://127.0.0.1:{self.port}/{path}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            urllib.request.Request(url, json.dumps(body).encode()), timeout=5
        ) as reply:
            reply.read()

    def serving(self, service: str) -> bool:
        replica = self.stored().run.replicas.get((service, 0))
        return replica is not None and replica.address != "" and replica.phase == "serving"

    def news(self, text: str) -> int:
        """Return how many messages to people contain this text."""
        messages = self.ledger("SELECT body FROM events WHERE kind = 'message'")
        return sum(text in body for (body,) in messages)

    def begin_to_stop(self, grace_s: float) -> None:
        """Send a StopRun without waiting for its answer."""
        self.stopping = asyncio.create_task(self.stop(grace_s))

    async def gone(self, outcome: Outcome) -> StoredRun:
        """Wait for this outcome, with no machine left, and a ledger that agrees."""
        stored = await self.ended()
        run = stored.run
        assert self.machines() == [], run
        assert (run.outcome, run.cleanup) == (outcome, Cleanup.VERIFIED), run
        await self.until(lambda: not (self.runs / ".identity" / self.run_id).exists())
        assert not self.ledger("SELECT * FROM operations WHERE state IN ('intent', 'sent')")
        return stored

    async def settled(self, seconds: float) -> None:
        """No machine comes later either."""
        await asyncio.sleep(seconds)
        assert self.machines() == []

    async def close(self) -> None:
        self.script(down_s=0.0)
        if self.stopping is not None:
            self.stopping.cancel()
            await asyncio.gather(self.stopping, return_exceptions=True)
        try:
            await super().close()
        finally:
            if self.server is not None and self.server.returncode is None:
                await self.down()


def _tree(root: Path) -> None:
    """Code to pin: a repository with one commit."""
    root.mkdir()
    (root / "README").write_text("code")
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "first")):
        subprocess.run(("git", "-C", str(root), *who, *words), check=True)


def _catalogs(home: Path) -> None:
    for infra, price in zip(INFRAS, PRICES, strict=True):
        cloud, _, region = infra.partition("/")
        folder = home / ".sky" / "catalogs" / "v8" / cloud
        folder.mkdir(parents=True)
        (folder / "vms.csv").write_text(_VMS.format(price=price, region=region))


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncGenerator[SkyFolder]:
    runs, sky, root, home = (tmp_path / name for name in ("runs", "sky", "root", "home"))
    for folder in (runs, sky, home):
        folder.mkdir(parents=True)
    _catalogs(home)
    _tree(root)
    port = free_port()
    hold = sky / "hold"
    command = ("tests.faults.sky_kills.launcher_process", str(runs), str(root), str(hold))
    environment = {
        "HOME": str(home),
        "PYTHONPATH": f"{SDK}:{ROOT}:{ROOT}/gen",
        "SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{port}",
    }
    folder = SkyFolder(runs, command, hold, environment, sky=sky, port=port)
    try:
        await folder.up()
        await folder.launch()
        yield folder
    finally:
        await folder.close()
