"""The training rank as one child process on this machine. Implements `ports.Ranks`."""

import asyncio
import itertools
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from services.common.spec import PolicyConfig
from services.learner.config import LearnerConfig
from services.learner.ports import RankError
from services.learner.rank import wire
from services.learner.types import CheckpointFiles, ModelInfo, Publication, StepResult, TrainBatch

SHM = Path("/dev/shm")
_TAIL_BYTES = 4096
_CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class _Child:
    process: Process
    reader: asyncio.Task[None]
    waiting: dict[int, asyncio.Future[wire.Message]]


class LocalRanks:
    """One rank process, spoken to in frames over its stdin and stdout.

    What the rank and its libraries print goes to `log_path`, whose end RankErrors carry.
    """

    def __init__(
        self,
        run_id: str,
        policy: PolicyConfig,
        config: LearnerConfig,
        log_path: Path,
        shm_dir: Path = SHM,
    ) -> None:
        self._run_id = run_id
        self._policy = policy
        self._config = config
        self._log_path = log_path
        self._shm_dir = shm_dir
        self._ids = itertools.count()
        self._turn = asyncio.Lock()
        self._child: _Child | None = None

    async def start(self, checkpoint: Path | None) -> ModelInfo:
        """Starts the process; a rank that ran before is ended first. See `ports.Ranks`."""
        await self.close()
        wire.remove_stale(self._shm_dir, self._run_id)
        self._child = await self._spawn()
        return wire.decode_model_info(await self._call("start", self._setup(checkpoint)))

    async def train(self, batch: TrainBatch) -> StepResult:
        """See `ports.Ranks`."""
        path = wire.batch_path(self._shm_dir, self._run_id)
        try:
            arguments = await asyncio.to_thread(wire.write_batch, path, batch)
        except (OSError, SafetensorError) as error:
            raise RankError(f"train: the batch cannot be written to {path}: {error}") from error
        return wire.decode_step_result(await self._call("train", arguments))

    async def publish(self, version: int) -> Publication:
        """See `ports.Ranks`."""
        return wire.decode_publication(await self._call("publish", {"version": version}))

    async def save(self, directory: Path) -> CheckpointFiles:
        """See `ports.Ranks`."""
        return wire.decode_checkpoint(await self._call("save", {"directory": str(directory)}))

    async def close(self) -> None:
        """See `ports.Ranks`. May be called again, and in any state."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            await asyncio.wait_for(self._say_goodbye(child), _CLOSE_SECONDS)
        except TimeoutError:
            child.process.kill()
            await child.process.wait()
        await child.reader
        wire.remove_stale(self._shm_dir, self._run_id)

    def _setup(self, checkpoint: Path | None) -> wire.Message:
        config = self._config
        return {
            "run_id": self._run_id,
            "shm_dir": str(self._shm_dir),
            "total_steps": config.steps,
            "policy": self._policy.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "rank": config.rank.model_dump(mode="json"),
            "checkpoint": str(checkpoint) if checkpoint else None,
        }

    async def _spawn(self) -> _Child:
        threads = str(self._config.rank.threads)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.learner.rank",
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                # The terminal's Ctrl-C is for the service, which ends the rank in order.
                start_new_session=True,
            )
        waiting: dict[int, asyncio.Future[wire.Message]] = {}
        return _Child(process, asyncio.create_task(self._read(process, waiting)), waiting)

    async def _read(
        self, process: Process, waiting: dict[int, asyncio.Future[wire.Message]]
    ) -> None:
        """Hands answers to who waits for them, and bad news to all when the process ends."""
        assert process.stdout is not None
        try:
            while True:
                header = await process.stdout.readexactly(wire.HEADER.size)
                body = await process.stdout.readexactly(wire.frame_length(header))
                answer = wire.decode_body(body)
                _settle(waiting, answer["id"], lambda future, a=answer: future.set_result(a))
        except (asyncio.IncompleteReadError, wire.ChannelError) as error:
            if isinstance(error, wire.ChannelError):
                process.kill()
            problem = self._obituary(await process.wait())
            for call in list(waiting):
                _settle(waiting, call, lambda future: future.set_exception(RankError(problem)))

    async def _call(self, command: str, arguments: Mapping[str, Any]) -> wire.Message:
        async with self._turn:
            child = self._child
            if child is None:
                raise RankError(f"{command}: the rank has not been started")
            if child.process.returncode is not None:
                raise RankError(self._obituary(child.process.returncode))
            call = next(self._ids)
            future = asyncio.get_running_loop().create_future()
            child.waiting[call] = future
            _send(child.process, {"id": call, "command": command, "arguments": arguments})
            answer = await future
        if "error" in answer:
            raise RankError(f"{command}: {answer['error']}\n{self._log_tail()}")
        return answer["result"]

    async def _say_goodbye(self, child: _Child) -> None:
        if child.process.returncode is None:
            _send(child.process, {"command": "close"})
        await child.process.wait()

    def _obituary(self, code: int) -> str:
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the training rank {ending}\n{self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace").strip()
        except OSError as error:
            return f"(its log {self._log_path} cannot be read: {error})"
        return f"end of {self._log_path}:\n{text}" if text else f"({self._log_path} is empty)"


def _send(process: Process, message: Mapping[str, Any]) -> None:
    """Frames are small, and a broken pipe shows as the end of the answers."""
    assert process.stdin is not None
    process.stdin.write(wire.encode_frame(message))


def _settle(
    waiting: dict[int, asyncio.Future[wire.Message]],
    call: int,
    settle: Callable[[asyncio.Future[wire.Message]], None],
) -> None:
    """Nobody waits any more for a call that was cancelled."""
    future = waiting.pop(call)
    if not future.done():
        settle(future)
