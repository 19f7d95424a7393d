"""A learner's ranks on two machines, for tests: process trees that share nothing but a network."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flotilla.learner.v1 import rank_service_pb2_grpc
from services.common import rpc
from services.common.spec import PolicyConfig
from services.common.tls import Tls
from services.learner.api.rank_service import RankService
from services.learner.config.learner import LearnerConfig
from services.learner.ranks.local_ranks import LocalRanks
from services.learner.ranks.machine_admission import machine_from_config
from services.learner.ranks.machines import MachineRoster
from services.learner.ranks.rendezvous import MultiMachineRendezvous
from tests.support.rank_configs import LEARNER, policy_config

RUN, TOKEN = "run", "a-token-of-tests"
HOST = "127.0.0.1"


def config_of(nodes: int, processes: int = 1, **learner: Any) -> LearnerConfig:
    rank = {"nodes": nodes, "processes": processes, "join_s": 30.0, **learner.pop("rank", {})}
    return LearnerConfig.model_validate({**LEARNER.model_dump(), **learner, "rank": rank})


@dataclass
class Further:
    """A further machine: the real program, with a folder of its own."""

    process: asyncio.subprocess.Process
    log: Path

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        return psutil.Process(self.process.pid).children()

    async def ended(self, limit_s: float = 30.0) -> int:
        return await asyncio.wait_for(self.process.wait(), limit_s)

    @property
    def said(self) -> str:
        return self.log.read_text()


async def until(reached: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


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
    address: str,
    config: LearnerConfig,
    policy: PolicyConfig,
    *overrides: str,
    number: int = 1,
    inside: Sequence[str] = (),
) -> Further:
    """Start a further machine of the learner at `address`; `inside` begins its command line."""
    spec, log = _written(folder, config, policy), folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", "services.learner.ranks", "--config", str(spec)),
            *("--run-id", RUN, "--run-dir", str(folder / RUN), "--replica", str(number)),
            *("--peer", f"learner={address}", *overrides),
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
    """The learner's part: its ranks, and who has joined."""

    folder: Path
    address: str
    roster: MachineRoster
    ranks: LocalRanks
    config: LearnerConfig
    policy: PolicyConfig
    drain: asyncio.Event
    machines: list[Further] = field(default_factory=list[Further])

    async def machine(self, *overrides: str, number: int = 1) -> Further:
        folder = self.folder / f"machine-{number}"
        made = await start_machine(
            folder, self.address, self.config, self.policy, *overrides, number=number
        )
        self.machines.append(made)
        return made


@asynccontextmanager
async def head(
    folder: Path, model: Path, config: LearnerConfig, host: str = HOST, tls: Tls | None = None
) -> AsyncGenerator[Head]:
    """A learner's ranks and RankService; all that was started ends with the block."""
    chosen = policy_config(model)
    roster, drain = (
        MachineRoster(machine_from_config(RUN, 0, chosen, config, "head")),
        asyncio.Event(),
    )
    server = rpc.server(token=TOKEN)
    rank_service_pb2_grpc.add_RankServiceServicer_to_server(
        RankService(roster, drain=drain), server
    )
    shm = folder / "shm"
    shm.mkdir()
    rendezvous = MultiMachineRendezvous(roster, host, config.rank.processes, config.rank.join_s)
    ranks = LocalRanks(RUN, chosen, config, folder / "head.log", shm, rendezvous)
    async with rpc.serving(server, f"{host}:0", tls=tls, grace_s=0.2) as serving:
        made = Head(folder, serving.address, roster, ranks, config, chosen, drain)
        try:
            yield made
        finally:
            roster.close(over=True)
            await ranks.close()
            for machine in made.machines:
                await _end(machine)


async def _end(machine: Further) -> None:
    try:
        await machine.ended(10)
    except TimeoutError:
        machine.process.kill()
        await machine.process.wait()
