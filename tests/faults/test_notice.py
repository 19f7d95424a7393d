"""A machine is taken away after a notice: what it holds is in safety before the machine is gone."""

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla.learner.v1 import group_service_pb2, group_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from flotilla_launcher.agent.agent import DEFAULT_LEFT_S
from flotilla_launcher.agent_protocol import EXIT_PREEMPTED
from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from flotilla_learner.checkpoints.remote_layout import Stamp, stamps
from tests.faults.harness import LIMIT_S, runs, spec
from tests.faults.watched import MACHINES, NOTICE, OUTPUT
from tests.support.launcher import TOKEN, ServedLauncher, serving
from tests.support.process_commands import command_of
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(400)
# What only a drain does in these tests: save a checkpoint, and end a lease.
NEVER = 1000
MODULES = {name: f"tests.faults.watched.{name}" for name in ("learner", "rollout")}


@dataclass(frozen=True, slots=True)
class Rented:
    """A run with its learner and its rollout on machines of their own."""

    served: ServedLauncher
    run_id: str
    machines: Path
    store_url: str

    def journal(self, machine: str, sql: str) -> list[Any]:
        """Rows of the journal on a machine; none before there is one."""
        path = self.machines / machine / self.run_id / JOURNAL_FILE
        if not path.exists():
            return []
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            try:
                return db.execute(sql).fetchall()
            except sqlite3.OperationalError:
                # The learner is just making its tables.
                return []

    def steps(self, machine: str) -> list[tuple[int, int]]:
        """Run epoch and number of each step whose plan is committed there."""
        return self.journal(machine, "SELECT run_epoch, step FROM plans ORDER BY step")

    def uploaded(self) -> list[Stamp]:
        """Checkpoints that are whole in the store."""
        store = open_store(f"{self.store_url}/{self.run_id}", {})
        return sorted(stamps(store.list_files("manifests")))

    async def leases(self) -> None:
        """Wait until rollouts hold groups."""
        deadline = time.monotonic() + LIMIT_S
        while not await self.leased_groups():
            assert time.monotonic() < deadline, self.state()
            await asyncio.sleep(0.02)

    async def leased_groups(self) -> int:
        """Groups that rollouts hold, as the learner knows."""
        supervisor = self.served.launcher.get_supervisor(self.run_id)
        assert supervisor is not None
        [learner] = supervisor.roster.serving_members("learner")
        async with rpc.channel(learner.address, token=TOKEN) as channel:
            stub: Any = group_service_pb2_grpc.GroupServiceStub(channel)
            return (await stub.GetStatus(group_service_pb2.GetStatusRequest())).leased_groups

    async def take_away(self, machine: str) -> None:
        """Give notice, and return when its watcher has ended, which has to be in time."""
        folder = self.machines / machine
        watchers = [p for p in processes(folder) if "flotilla_launcher.agent" in command_of(p)]
        assert watchers, self.state()
        began = time.monotonic()
        (folder / NOTICE).touch()
        await self.until(lambda: not any(map(runs, watchers)))
        assert time.monotonic() - began < DEFAULT_LEFT_S, self.state()
        output = (folder / OUTPUT).read_text()
        assert f"{machine.partition('-')[0]} ended with code {EXIT_PREEMPTED}" in output, (
            self.state()
        )

    async def until(self, reached: Callable[[], bool]) -> None:
        await until(reached, LIMIT_S, self.state)

    def state(self) -> str:
        """Everything that explains how it came to this."""
        logs = [*self.served.launcher.folder.glob("*/logs/*.log")]
        logs += self.machines.glob(f"*/{OUTPUT}")
        return "\n".join(f"{path}: {path.read_text()[-3000:]}" for path in logs)


@pytest.fixture
async def rented(
    tmp_path: Path, policy: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Rented]:
    """A run that has begun; nothing of it stays."""
    folder, machines = tmp_path / "runs", tmp_path / "machines"
    folder.mkdir()
    for name, value in ((MACHINES, machines), ("FLOTILLA_TEST_TASKS", tasks)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    url = f"file://{tmp_path}/store"
    checkpoint = {"every": NEVER, "remote": url}
    learner = {"steps": NEVER, "lease_ttl_s": NEVER, "checkpoint": checkpoint, "eval": {}}
    wish = spec(policy, tasks, **learner)
    wish["launcher"] |= {"modules": MODULES, "drain_s": 60.0}
    async with serving(folder) as served:
        run = Rented(served, await served.start(wish), machines, url)
        try:
            yield run
        finally:
            await served.launcher.close(2.0)
            await clear(run)


async def clear(run: Rented) -> None:
    """End what the launcher's end has left, as machines that are given back do."""
    for process in processes(run.machines):
        process.kill()
    await run.until(lambda: not processes(run.machines))
    for path in SHARED_MEMORY.glob(f"*{run.run_id}*"):
        shutil.rmtree(path)


def processes(folder: Path) -> list[psutil.Process]:
    """Processes that run on a machine, or on any of several."""
    return [process for process in psutil.process_iter() if _is_at(process, f"{folder}/")]


def _is_at(process: psutil.Process, folder: str) -> bool:
    try:
        words = [*process.cmdline(), process.environ().get("FLOTILLA_UNIT", "")]
        return runs(process) and any(word.startswith(folder) for word in words)
    except (psutil.Error, OSError):
        # Ended meanwhile, or of another user.
        return False


@pytest.mark.slow
async def test_a_learner_is_in_the_store_before_its_machine_goes_and_resumes_on_the_next(
    rented: Rented,
) -> None:
    await rented.until(lambda: len(rented.steps("learner-1")) >= 2)
    assert not rented.uploaded()
    await rented.take_away("learner-1")
    *_, (run_epoch, last) = rented.steps("learner-1")
    assert rented.uploaded() == [Stamp(run_epoch, last)]
    await rented.until(lambda: bool(rented.steps("learner-2")[last:]))
    later = rented.steps("learner-2")
    assert later[: last + 1] == [*rented.steps("learner-1"), (run_epoch + 1, last + 1)]


@pytest.mark.slow
async def test_a_rollout_gives_its_leases_back_before_its_machine_goes(rented: Rented) -> None:
    await rented.until(lambda: bool(rented.steps("learner-1")))
    await rented.leases()
    await rented.take_away("rollout-1")
    assert not await rented.leased_groups()
    seen = len(rented.steps("learner-1"))
    await rented.until(lambda: len(rented.steps("learner-1")) > seen + 1)
