"""A rollout's engine on two machines, for tests: process trees that share nothing but a network."""

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
from flotilla_rollout.adapters.engine_machines import EngineMachines, HeadSite
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine
from tests.rollout.adapters.tiny_engines import tiny_config, tiny_served
from tests.support.learner import TOKEN
from tests.support.process_commands import command_of

RUN = "run"
# The further machine's own address is 127.0.0.1 then, and another one.
HOST = "127.0.0.2"


def config_of(nodes: int = 2, **options: Any) -> EngineConfig:
    chosen = {"tensor_parallel": nodes, "join_s": 240.0, "ray_port": free_port()}
    return tiny_config(nodes=nodes, **(chosen | options))


@dataclass
class Further:
    """A further machine: the real program, with a folder of its own."""

    process: asyncio.subprocess.Process
    log: Path

    def everything(self) -> list[psutil.Process]:
        """Return all processes of the machine but the program itself."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the engine's workers there."""
        return [each for each in self.everything() if "MachineWorker" in " ".join(command_of(each))]

    async def ended(self, limit_s: float = 30.0) -> int:
        async with asyncio.timeout(limit_s):
            return await self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text()


async def start_machine(
    folder: Path,
    config: EngineConfig,
    model: Path,
    *overrides: str,
    number: int = 1,
    host: str = HOST,
    token: str = TOKEN,
    inside: Sequence[str] = (),
) -> Further:
    """Start a further machine of the rollout at `host`; `inside` begins its command line."""
    spec, log = _written(folder, config, model), folder / "log"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", "flotilla_rollout.nodes", "--config", str(spec)),
            *("--run-id", RUN, "--run-dir", str(folder / RUN), "--replica", str(number)),
            *("--peer", f"rollout={host}:1", *overrides),
            env={**os.environ, "FLOTILLA_TOKEN": token, "FLOTILLA_TEST_MACHINE": str(folder)},
            stderr=file,
            start_new_session=True,
        )
    return Further(process, log)


def made_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _written(folder: Path, config: EngineConfig, model: Path) -> Path:
    folder.mkdir(exist_ok=True)
    spec = folder / "spec.json"
    spec.write_text(json.dumps(spec_of(config, model)))
    return spec


def spec_of(config: EngineConfig, model: Path) -> dict[str, Any]:
    engine = config.model_dump(mode="json", exclude_unset=True)
    lengths = {"max_input_length": 512, "max_generate_length": 128}
    policy = {"model": str(model), "dtype": "float32", "max_model_len": 1024}
    return {"name": RUN, "policy": policy, "rollout": {**lengths, "engine": engine}}


@dataclass
class Head:
    """The rollout's part: its engine, on machines that have joined."""

    folder: Path
    config: EngineConfig
    served: ServedModel
    drain: asyncio.Event
    host: str
    machines: EngineMachines | None = None
    engine: Engine | None = None
    further: list[Further] = field(default_factory=list[Further])

    async def machine(self, *overrides: str, number: int = 1, **given: Any) -> Further:
        """Start a further machine."""
        folder = self.folder / f"machine-{number}"
        made = await start_machine(
            folder, self.config, self.served.folder, *overrides, number=number, **given
        )
        self.further.append(made)
        return made

    async def start(self) -> Engine:
        """Wait for the machines and start the engine."""
        memory = made_folder(self.folder / "memory")
        site = HeadSite(0, TOKEN, self.host, self.folder / "logs", memory, self.served.folder)
        self.machines = await EngineMachines.open_machines(self.config, site)
        self.machines.drain_when_one_leaves(self.drain)
        self.engine = await start_engines(self.config, self.served, self.machines)
        return self.engine

    async def close(self) -> None:
        """End the engine and dismiss the machines. May be called again."""
        await self.lose(dismiss=True)
        for each in self.further:
            await _end(each)

    async def lose(self, *, dismiss: bool = False) -> None:
        """End the engine; machines that are not dismissed wait for the next one."""
        engine, machines, self.engine, self.machines = self.engine, self.machines, None, None
        if engine is not None:
            await engine.close()
        if machines is not None and dismiss:
            await machines.dismiss_machines()
        if machines is not None:
            await machines.close()


@asynccontextmanager
async def head(
    folder: Path, model: Path, config: EngineConfig, host: str = HOST
) -> AsyncGenerator[Head]:
    """A rollout's engine; all that was started ends with the block."""
    made = Head(folder, config, tiny_served(model), asyncio.Event(), host)
    try:
        yield made
    finally:
        await made.close()


async def read(process: asyncio.subprocess.Process, word: str) -> list[str]:
    """Return the rest of the next line that begins with the word; skip log lines."""
    assert process.stdout is not None
    async with asyncio.timeout(480):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(f"{word} "):
                return line.split()[1:]
    raise AssertionError(f"it ended before it printed {word!r}")


def left_of(folder: Path) -> list[psutil.Process]:
    """Return the running processes of the machines whose files are in this folder."""
    return [p for p in psutil.process_iter() if str(folder) in _machine_of(p)]


def _machine_of(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return process.environ().get("FLOTILLA_TEST_MACHINE", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


async def _end(machine: Further) -> None:
    if machine.process.returncode is None:
        try:
            await machine.ended(15)
        except TimeoutError:
            machine.process.kill()
            await machine.process.wait()
