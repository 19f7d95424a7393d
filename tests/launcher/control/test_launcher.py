"""A launcher resumes the runs of a dead one."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.control.supervisor import Supervisor
from flotilla_launcher.state import (
    GATEWAY,
    LEARNER,
    ROLLOUT,
    Replica,
    ReplicaState,
    Run,
    RunState,
    Unit,
)
from flotilla_launcher.store.ledger import Ledger
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import OneRegistry, spec
from tests.support.waiting import until

WANTED = {GATEWAY: 1, LEARNER: 1, ROLLOUT: 1}
STARTED = Unit("demo-1/learner-0", 1, 1.0)


@asynccontextmanager
async def taken_over(
    folder: Path, backend: FakeBackend, learner: Replica, **options: Any
) -> AsyncGenerator[Supervisor]:
    """A launcher that finds a run with this learner in its ledger; the other replicas run."""
    store = Ledger(folder / "launcher.sqlite")
    running = [
        Replica(s, 0, ReplicaState.RUNNING, unit=Unit(s, 1, 1.0)) for s in (GATEWAY, ROLLOUT)
    ]
    run = Run("demo-1", "demo", WANTED, state=RunState.STARTING).with_replicas([*running, learner])
    store.begin_run(run, json.dumps(spec(launcher=options)), time.time(), {})
    store.save_run(run, run.replicas.values(), None)
    launcher = Launcher(
        folder, store, LauncherDependencies({"local": lambda: backend}, OneRegistry())
    )
    await launcher.recover_runs()
    supervisor = launcher.get_supervisor("demo-1")
    assert supervisor is not None
    yield supervisor
    await launcher.close(0.1)
    store.close()


async def test_what_began_to_serve_while_no_launcher_was_there_is_not_late(tmp_path: Path) -> None:
    backend = FakeBackend()
    late = Replica(LEARNER, 0, ReplicaState.STARTING, unit=STARTED, due=time.time() - 60)
    async with taken_over(tmp_path, backend, late, silent_after_s=1.0) as supervisor:
        await asyncio.sleep(0.4)
        assert backend.killed == [], "it has had no time to report that it serves"
        await until(lambda: STARTED in backend.killed)
        assert not supervisor.run.is_ending


class Looking(FakeBackend):
    """Does not know yet how a start ended."""

    def __init__(self) -> None:
        super().__init__()
        self.undone: list[str] = []

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        if launch.key == (LEARNER, 0):
            await asyncio.Event().wait()
        return await super().find_replica(launch)

    async def undo_start(self, launch: LaunchSpec) -> None:
        self.undone.append(launch.name)


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING])
async def test_a_stop_does_not_wait_for_a_start_that_a_dead_launcher_had_begun(
    tmp_path: Path, state: ReplicaState
) -> None:
    backend, now = Looking(), time.time()
    coming = replace(Replica(LEARNER, 0), state=state, due=now + 60)
    async with taken_over(tmp_path, backend, coming, drain_s=1.0) as supervisor:
        supervisor.request_stop(1.0)
        await asyncio.wait_for(supervisor.wait_until_ended(), 10.0)
        assert backend.undone == ["demo-1/learner-0"]
        assert backend.launches == [], "no machine is requested for a run that ends"
        assert supervisor.run.state is RunState.STOPPED


async def test_what_was_scaled_away_while_it_was_looked_for_is_not_started(tmp_path: Path) -> None:
    backend = FakeBackend()
    gone, requests = asyncio.Event(), asyncio.Event()

    async def find(launch: LaunchSpec) -> None:
        requests.set()
        await gone.wait()

    backend.find_replica = find
    coming = Replica(LEARNER, 0, due=time.time() + 60)
    async with taken_over(tmp_path, backend, coming, drain_s=30.0) as supervisor:
        await requests.wait()
        # It has registered, so that a drain notifies it and cancels nothing.
        supervisor.run = supervisor.run.with_replicas([replace(coming, address="127.0.0.1:1")])
        supervisor.request_stop(30.0)
        gone.set()
        await asyncio.wait_for(supervisor.wait_until_ended(), 10.0)
        assert backend.launches == []
