"""A learner's ranks on two machines, for tests: process trees that share nothing but a network."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ranks.cluster import ClusterSite, RayCluster
from flotilla_learner.ranks.local_ranks import LocalRanks
from tests.support.learner import TOKEN
from tests.support.process_commands import command_of
from tests.support.rank_configs import LEARNER, policy_config

RUN = "run"
HOST = "127.0.0.1"


def config_of(nodes: int, processes: int = 1, **learner: Any) -> LearnerConfig:
    chosen = {"nodes": nodes, "processes": processes, "join_s": 60.0, "ray_port": free_port()}
    rank = {**chosen, **learner.pop("rank", {})}
    return LearnerConfig.model_validate({**LEARNER.model_dump(), **learner, "rank": rank})


@dataclass
class Further:
    """A further machine: the real program, with a folder of its own."""

    process: asyncio.subprocess.Process
    log: Path

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "flotilla_learner.rank" in command_of(child)
        ]

    async def ended(self, limit_s: float = 30.0) -> int:
        return await asyncio.wait_for(self.process.wait(), limit_s)

    @property
    def output(self) -> str:
        return self.log.read_text()


def left_of(folder: Path) -> list[psutil.Process]:
    """Return what runs of a machine whose files are in this folder."""
    return [p for p in psutil.process_iter() if str(folder) in _environment(p)]


def _environment(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return process.environ().get("FLOTILLA_TEST_MACHINE", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


async def start_machine(
    folder: Path,
    config: LearnerConfig,
    policy: PolicyConfig,
    *overrides: str,
    number: int = 1,
    host: str = HOST,
    inside: Sequence[str] = (),
) -> Further:
    """Start a further machine of the learner at `host`; `inside` begins its command line."""
    spec, log = _written(folder, config, policy), folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", "flotilla_learner.ranks", "--config", str(spec)),
            *("--run-id", RUN, "--run-dir", str(folder / RUN), "--replica", str(number)),
            *("--peer", f"learner={host}:1", *overrides),
            env={**os.environ, "FLOTILLA_TOKEN": TOKEN, "FLOTILLA_TEST_MACHINE": str(folder)},
            stderr=file,
            start_new_session=True,
        )
    return Further(process, log)


def _written(folder: Path, config: LearnerConfig, policy: PolicyConfig) -> Path:
    folder.mkdir(exist_ok=True)
    sections = {"policy": policy, "learner": config}
    dumped = {k: v.model_dump(mode="json", exclude_unset=True) for k, v in sections.items()}
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"name": RUN, **dumped}))
    return spec


@dataclass
class Head:
    """The learner's part: its ranks, and the cluster that joins others to it."""

    folder: Path
    cluster: RayCluster
    ranks: LocalRanks
    config: LearnerConfig
    policy: PolicyConfig
    drain: asyncio.Event
    machines: list[Further] = field(default_factory=list[Further])

    async def machine(self, *overrides: str, number: int = 1) -> Further:
        folder = self.folder / f"machine-{number}"
        made = await start_machine(folder, self.config, self.policy, *overrides, number=number)
        self.machines.append(made)
        return made


@asynccontextmanager
async def head(
    folder: Path, model: Path, config: LearnerConfig, host: str = HOST
) -> AsyncGenerator[Head]:
    """A learner's ranks and its cluster; all that was started ends with the block."""
    chosen, drain = policy_config(model), asyncio.Event()
    shm = folder / "shm"
    shm.mkdir()
    site = ClusterSite(RUN, TOKEN, host, folder / "logs")
    cluster = RayCluster(site, chosen, config.rank, drain)
    ranks = LocalRanks(RUN, chosen, config, folder / "head.log", shm, cluster)
    made = Head(folder, cluster, ranks, config, chosen, drain)
    try:
        yield made
    finally:
        await cluster.dismiss_machines()
        await ranks.close()
        await cluster.close()
        for machine in made.machines:
            await _end(machine)


async def _end(machine: Further) -> None:
    try:
        await machine.ended(10)
    except TimeoutError:
        machine.process.terminate()
        try:
            await machine.ended(20)
        except TimeoutError:
            machine.process.kill()
            await machine.process.wait()
