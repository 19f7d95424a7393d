"""A whole run on the box: the real launcher, a client of it, and the run's traces on the box."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.process.run_child import run_child
from flotilla_common.rpc import rpc
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_launcher.security import launcher_address
from flotilla_launcher.security.certificates import LAUNCHER
from flotilla_learner.checkpoints.remote_layout import stamps
from tests.faults import harness
from tests.sky.box.layout import LOGIN, ROOT, SERVICES_PYTHON
from tests.sky.box.namespaces import processes_in
from tests.sky.session import SkySession
from tests.support.ssh_double import write_program

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED)
# SkyPilot takes two minutes for three clusters on idle cores, and four times as long on busy ones.
UP_S = 600.0
_NAME = "whole"
# All that a node has, as far as Slurm knows: it is not shared.
_NODE = {"cpus": "4", "memory": "4"}
_GPU = {"infra": "slurm/mini/gpu", "accelerators": "H100:1", **_NODE}
_CPU = {"infra": "slurm/mini/cpu", **_NODE}
_POLL_S = 0.5
_CLOSE_S = 300.0
# Attempts in committed steps, by the process that they were leased to.
_TRAINED_BY = """
SELECT DISTINCT leases.worker_id, leases.incarnation FROM plans, json_each(plans.attempts)
JOIN leases ON leases.group_id = json_extract(json_each.value, '$[0]')
WHERE NOT EXISTS (
  SELECT 1 FROM leases other
  WHERE other.group_id = leases.group_id AND other.incarnation != leases.incarnation)
"""


@contextmanager
def materials(session: SkySession) -> Generator[Path]:
    """A folder with `policy` and `tasks.json` that all nodes can read, and `uploads` to write."""
    folder = session.layout.shared / _NAME
    shutil.rmtree(folder, ignore_errors=True)
    command = (str(SERVICES_PYTHON), "-m", "tests.sky.materials", str(folder))
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=120)
    uploads = folder / "uploads"
    uploads.mkdir()
    uploads.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@dataclass
class Site:
    """A launcher that serves on the login host, a client of it, and the materials of its runs."""

    session: SkySession
    runs: Path
    made: Path
    # The processes of an idle node, by its name.
    daemons: dict[str, Counter[str]]
    _process: asyncio.subprocess.Process | None = None
    _client: AsyncExitStack = field(default_factory=AsyncExitStack)
    _stub: "RunServiceAsyncStub | None" = None

    @property
    def stub(self) -> "RunServiceAsyncStub":
        assert self._stub is not None
        return self._stub

    async def up(self) -> None:
        """Start the launcher; it takes over the runs of an earlier one."""
        variables = {
            **os.environ,
            "FLOTILLA_TEST_TASKS": str(self.made / "tasks.json"),
            "OMP_NUM_THREADS": "1",
        }
        listen = f"{self.session.layout.address(LOGIN)}:0"
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "flotilla_launcher"),
                *("--runs", str(self.runs), "--listen", listen),
                cwd=ROOT,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while (address := launcher_address.read_address(self.runs)) is None:
            assert self._process.returncode is None, self.log.read_text()
            await asyncio.sleep(_POLL_S)
        opened = rpc.channel(address.address, token=address.token, tls=address.tls, peer=LAUNCHER)
        stub: Any = RunServiceStub(await self._client.enter_async_context(opened))
        self._stub = stub

    @property
    def log(self) -> Path:
        return self.runs.with_name("launcher.log")

    async def kill(self) -> None:
        """Kill it as the kernel would, short of memory."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        await self._client.aclose()

    async def down(self) -> None:
        """Stop the launcher, which stops its runs before it ends."""
        await self._client.aclose()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)


def spec(site: Site) -> dict[str, Any]:
    """A run that continues until it is stopped, with a node for each replica."""
    wish = harness.spec(
        site.made / "policy", site.made / "tasks.json", steps=100_000, lease_ttl_s=30.0
    )
    wish["name"] = _NAME
    wish["env_gateway"]["lease_ttl_s"] = 60.0
    # All nodes have the same two cores.
    wish["rollout"]["max_attempts"] = 4
    del wish["learner"]["eval"]
    wish["learner"]["checkpoint"]["remote"] = f"file://{site.made}/uploads"
    wish["launcher"] |= {
        "backend": "sky",
        "max_hours": 0.75,
        "drain_s": 60.0,
        "heartbeat_interval_s": 0.5,
        "sky": {
            "advertise": site.session.layout.address(LOGIN),
            "setup": "true",
            "python": str(SERVICES_PYTHON),
            "commit": "HEAD",
            "secrets": ["FLOTILLA_TEST_TASKS", "OMP_NUM_THREADS"],
            "provision": {"timeout_s": UP_S, "backoff_s": 5.0},
            "learner": {"ordered": [_GPU]},
            "env_gateway": {"ordered": [_CPU]},
            "rollout": {"ordered": [_GPU]},
        },
    }
    return wish


@asynccontextmanager
async def launched(session: SkySession, folder: Path, made: Path) -> AsyncGenerator[Site]:
    """The real launcher, and a client of its RunService, for as long as the block runs."""
    site = Site(session, folder / "runs", made, processes(session))
    site.runs.mkdir()
    try:
        await site.up()
        yield site
    finally:
        await site.down()


async def started(site: Site, wish: dict[str, Any]) -> "WholeRun":
    request = pb.StartRunRequest(request_id=uuid.uuid4().hex, spec_json=json.dumps(wish))
    return WholeRun(site, (await site.stub.StartRun(request)).run_id)


class WholeRun:
    """A run as its client sees it, and as the box shows it."""

    def __init__(self, site: Site, run_id: str) -> None:
        self.run_id = run_id
        self.runs = site.runs
        self.session = site.session
        self._site = site

    async def get(self) -> pb.Run:
        return (await self._site.stub.GetRun(pb.GetRunRequest(run_id=self.run_id))).run

    async def scale(self, replicas: int) -> None:
        request = pb.ScaleServiceRequest(run_id=self.run_id, service="rollout", replicas=replicas)
        await self._site.stub.ScaleService(request)

    @staticmethod
    def replica(run: pb.Run, service: str, index: int) -> pb.ServiceReplica:
        """Return the replica; an empty one where there is none."""
        wanted = (service, index)
        found = (each for each in run.replicas if (each.service, each.replica) == wanted)
        return next(found, pb.ServiceReplica())

    async def bundle_pages(self, out: Path) -> str:
        """Write pages of the run with `flotilla inspect --bundle`, as its user on the launcher's
        machine does; return the run's page."""
        ssh = self.runs / "bin/ssh"
        # OpenSSH takes the home of the user's account, which is not that of these tests.
        write_program(
            ssh,
            '#!/bin/sh\ncat "$HOME"/.sky/generated/ssh/* | sed "s|~/|$HOME/|g" > "$0.config"\n'
            'exec /usr/bin/ssh -F "$0.config" "$@"\n',
        )
        inspect = (sys.executable, "-m", "flotilla_launcher.cli.app", "inspect", self.run_id)
        done = await run_child(
            (*inspect, "--runs", str(self.runs), "--bundle", str(out)),
            env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
            folder=ROOT,
            seconds=UP_S,
        )
        assert done.code == 0, done.output + done.errors
        with zipfile.ZipFile(out) as file:
            return file.read("index.html").decode()

    async def ended(self) -> pb.Run:
        """Return the run once it has ended on its own."""
        deadline = time.monotonic() + 2 * UP_S
        while (run := await self.get()).state not in ENDED:
            assert time.monotonic() < deadline, self._explained(run)
            await asyncio.sleep(_POLL_S)
        assert run.state == pb.RUN_STATE_COMPLETED, self._explained(run)
        return run

    async def stop(self) -> pb.Run:
        """Stop it as Ctrl-C does; return the run after its end."""
        await self._site.stub.StopRun(pb.StopRunRequest(run_id=self.run_id), timeout=UP_S)
        return await self.get()

    async def serving(
        self, service: str, index: int = 0, *, but: str = "", limit_s: float = UP_S
    ) -> str:
        """Return the node of a replica once it serves there, and not on an earlier one."""

        def served(run: pb.Run) -> bool:
            replica = self.replica(run, service, index)
            return replica.state == "running" and self._node(replica.address) != but

        run = await self.until(served, limit_s)
        return self._node(self.replica(run, service, index).address)

    def _node(self, address: str) -> str:
        layout, host = self.session.layout, address.rpartition(":")[0]
        return next(node for node in layout.nodes if layout.address(node) == host)

    async def until(self, reached: Callable[[pb.Run], bool], limit_s: float = 120.0) -> pb.Run:
        """Poll until the run, which has not ended, meets the condition."""
        deadline = time.monotonic() + limit_s
        while not reached(run := await self.get()):
            assert run.state not in ENDED, self._explained(run)
            assert time.monotonic() < deadline, f"waited {limit_s} s; {self._explained(run)}"
            await asyncio.sleep(_POLL_S)
        return run

    def _explained(self, run: pb.Run) -> str:
        run.ClearField("spec_json")
        run.ClearField("metrics")
        files = [self._site.log, *self._logs().glob("*.log")]
        return "\n".join([str(run), *(f"{f.name}: {f.read_text()[-3000:]}" for f in files)])

    def _logs(self) -> Path:
        return self.runs / self.run_id / "logs"

    def log(self, replica: str) -> str:
        """Return the launcher's log of a replica."""
        return (self._logs() / f"{replica}.log").read_text()

    def steps(self) -> int:
        """Steps whose plans are committed."""
        return max((int(step) for (step,) in self._query("SELECT step FROM plans")), default=0)

    def uploaded(self) -> int:
        """The step of the newest checkpoint in the run's store."""
        folder = self._site.made / "uploads" / self.run_id / "manifests"
        names = (path.name for path in folder.iterdir()) if folder.exists() else ()
        return max((stamp.step for stamp in stamps(names)), default=0)

    def restored(self) -> list[int]:
        """The steps at which the learner resumed from its store."""
        lines = (line for line in self.log("learner-0").splitlines() if '"newest_epoch"' in line)
        return [json.loads(line)["step"] for line in lines]

    def lose_disk(self) -> None:
        """Lose the disk of a learner's node: homes of Slurm are on another machine, and outlive
        theirs."""
        [journal] = self.session.layout.home.rglob(f"runs/{self.run_id}/{JOURNAL_FILE}")
        shutil.rmtree(journal.parent)

    def trained_by(self) -> set[tuple[str, str]]:
        """Replica and process, for all whose trajectories are in committed steps."""
        return set(self._query(_TRAINED_BY))

    def _query(self, sql: str) -> list[Any]:
        """Rows of the journal on the learner's node; none before there is one."""
        [*_, path] = [None, *self.session.layout.home.rglob(f"runs/{self.run_id}/{JOURNAL_FILE}")]
        if path is None:
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            try:
                return db.execute(sql).fetchall()
            except sqlite3.OperationalError:
                # The learner is just making its tables.
                return []

    def allocations(self) -> list[str]:
        """Return the running allocations from Slurm itself: the oracle."""
        return self.session.box.jobs()

    def nodes(self) -> set[str]:
        """The states that Slurm's nodes are in."""
        return set(self.session.box.slurm("sinfo", "--noheader", "--Node", "--format=%t").split())

    def leftovers(self) -> dict[str, Counter[str]]:
        """Return, by node, the processes that only a run can have left."""
        now, before = processes(self.session), self._site.daemons
        more = {node: now[node] - before[node] - Counter({"": 1}) for node in now}
        return {node: found for node, found in more.items() if found}

    def working(self) -> dict[str, list[str]]:
        """Return, by node, the services that run there."""
        found = {node: _services(self.session, node) for node in self.session.layout.nodes}
        return {node: services for node, services in found.items() if services}


def processes(session: SkySession) -> dict[str, Counter[str]]:
    """Return, by node, all its processes: how many of which program."""
    layout = session.layout
    return {
        node: Counter(map(_program, processes_in([layout.namespace(node)])))
        for node in layout.nodes
    }


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _services(session: SkySession, node: str) -> list[str]:
    return services_of(processes_in([session.layout.namespace(node)]))


def services_of(pids: Iterable[int]) -> list[str]:
    """Return the programs of this project among these processes, by their modules."""
    commands = map(_command, pids)
    modules = {words[words.index("-m") + 1] for words in commands if "-m" in words[:-1]}
    return sorted(name for name in modules if name.startswith(("flotilla_", "tests.")))


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
