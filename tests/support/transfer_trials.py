"""Checks of the sender of weights and the engines that receive from it, for each transport: on a
CPU in `tests/learner/weights`, on GPUs in `tests/gpu`.

The sender is the real program; each engine is a process that has a `SenderConnection`."""

import asyncio
import hashlib
import json
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from unittest.mock import patch

import numpy as np
import psutil

from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.python_command import python_command
from flotilla_common.weights.fingerprint import TensorEntry, checksum64, compute_fingerprint
from flotilla_common.weights.weight_transfer import TransferSettings
from flotilla_learner.types import Publication
from flotilla_learner.weights import publication_child
from flotilla_learner.weights.live_sender import LiveSender
from flotilla_learner.weights.sender_config import WeightSenderConfig
from tests.support.process_commands import command_of
from tests.support.process_forge import ProcessForge, fork_of
from tests.support.repository import ROOT
from tests.support.waiting import until

SIZES = (100, 70_000, 16, 200_000, 3)
# Longer than a GPU's first use takes.
STALL_S = 5.0
# Pieces are much smaller than the larger tensors.
SETTINGS = TransferSettings(stall_s=STALL_S, piece_bytes=1 << 16)
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send weights: the backend, and the device of the engines.

    With a forge, which has loaded torch, the sender and the engines are its forks."""

    backend: str
    device: str = "cpu"
    forge: ProcessForge | None = None

    def __str__(self) -> str:
        return self.backend

    def python_command(self, *words: str) -> tuple[str, ...]:
        return self.forge.python_command(*words) if self.forge else python_command(*words)

    def send_signal(self, process: int, number: Signals) -> None:
        """Signal a process that was started by `python_command`."""
        os.kill(fork_of(process) if self.forge else process, number)


class SentModel:
    """A publication in a file, for the learner and for an engine."""

    def __init__(self, folder: Path, version: int) -> None:
        numbers = np.random.default_rng(version)
        self.entries: list[TensorEntry] = []
        digest, data, offset = hashlib.sha256(), [np.zeros(64, np.uint8)], 64
        for index, size in enumerate(SIZES):
            raw = numbers.standard_normal(size).astype(np.float32).view(np.uint8)
            entry = TensorEntry(f"w{index}", "float32", (size,), offset, checksum64(raw))
            self.entries.append(entry)
            digest.update(entry.name.encode() + raw.tobytes())
            data.append(raw)
            offset += raw.size
        self.digest = digest.hexdigest()
        path = folder / f"v{version}"
        np.concatenate(data).tofile(path)
        self.policy = PolicyId(1, version, compute_fingerprint(self.entries, offset))
        nothing = np.zeros(0, np.int32)
        manifest = tuple(self.entries)
        self.written = Publication(
            version,
            self.policy.fingerprint,
            manifest,
            offset,
            path,
            nothing,
            nothing.astype(np.float32),
        )
        self.manifest_path = folder / f"v{version}.json"
        rows = [(e.name, e.dtype, e.shape, e.offset_bytes, e.checksum) for e in manifest]
        fields = {"run_epoch": 1, "version": version, "total_bytes": offset, "rows": rows}
        fingerprint = self.policy.fingerprint.hex()
        self.manifest_path.write_text(json.dumps({**fields, "fingerprint": fingerprint}))


class Receiver:
    """An engine's one worker, a process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def join(self, sender: LiveSender, group: str) -> None:
        assert await self._request(f"join {sender.address} {group}") == "joined"

    async def receive(self, published: SentModel) -> str:
        """Return the digest of the received tensors, or the error."""
        return await self._request(f"receive {published.manifest_path}")

    async def receive_half(self, published: SentModel) -> None:
        """Return once it has received a part and stopped reading."""
        assert await self._request(f"pause {published.manifest_path}") == "middle"

    async def receive_rest(self) -> str:
        return await self._request("on")

    async def _request(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()


@asynccontextmanager
async def sending(folder: Path, way: Way, run: str = "r") -> AsyncGenerator[LiveSender]:
    shares = way.backend == "ipc"
    config = WeightSenderConfig(run, shares_devices=shares, settings=SETTINGS)
    sender = LiveSender(config, folder / "sender.log")
    with patch.object(publication_child, "python_command", way.python_command):
        sender.start_soon()
        try:
            await until(lambda: sender.address is not None, PATIENCE_S)
            yield sender
        finally:
            await sender.close()


@asynccontextmanager
async def receiving(
    way: Way, sender: LiveSender, *groups: str
) -> AsyncGenerator[tuple[Receiver, ...]]:
    """Run an engine in each group."""
    command = way.python_command("-m", "tests.support.receiving_worker", way.backend, way.device)
    receivers: list[Receiver] = []
    try:
        for _ in groups:
            started = asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
            receivers.append(Receiver(await started))
        joined = zip(receivers, groups, strict=True)
        await asyncio.gather(*(receiver.join(sender, group) for receiver, group in joined))
        yield tuple(receivers)
    finally:
        for each in receivers:
            with suppress(ProcessLookupError):
                each.process.kill()
            await each.process.wait()


async def try_transfers(folder: Path, way: Way) -> None:
    """Try all of it with one lasting engine, because processes take long to start."""
    published = [SentModel(folder, version) for version in range(5)]
    async with (
        sending(folder, way) as sender,
        receiving(way, sender, "well", "killed", "stopped") as (well, killed, stopped),
    ):
        await check_failing_engines(way, sender, published[:3], well, killed, stopped)
        # The log shows when each has been given up.
        log = folder / "sender.log"
        await until(lambda: log.read_text().count("an engine is lost") == 2, PATIENCE_S)
        # Memory lent to those is lent to the next.
        await well.join(sender, "again")
        await check_superseded(sender, published[1:4], well)
        await check_killed_sender(way, sender, published[3:], well)


async def check_failing_engines(
    way: Way,
    sender: LiveSender,
    published: Sequence[SentModel],
    well: Receiver,
    killed: Receiver,
    stopped: Receiver,
) -> None:
    """Engines that are killed and stopped in the middle hold up no other."""
    first = published[0]
    await sender.serve_publication(first.written, first.policy)
    await asyncio.gather(killed.receive_half(first), stopped.receive_half(first))
    way.send_signal(killed.process.pid, Signals.SIGKILL)
    way.send_signal(stopped.process.pid, Signals.SIGSTOP)
    began = time.monotonic()
    for each in published:
        await sender.serve_publication(each.written, each.policy)
        assert await well.receive(each) == each.digest
    assert time.monotonic() - began < STALL_S


async def check_superseded(
    sender: LiveSender, published: Sequence[SentModel], receiver: Receiver
) -> None:
    """An engine is sent what it requests, and nothing that is superseded."""
    oldest, older, newest = published
    await sender.serve_publication(newest.written, newest.policy)
    assert sender.can_send(newest.policy) and not sender.can_send(older.policy)
    message = await receiver.receive(oldest)
    assert (
        message == f"TransferRefusedError: version {oldest.policy.version} of epoch 1 is not served"
    )
    # It has missed none by that: the newest two are there, in any order.
    assert await receiver.receive(newest) == newest.digest
    assert await receiver.receive(older) == older.digest


async def check_killed_sender(
    way: Way, sender: LiveSender, published: Sequence[SentModel], receiver: Receiver
) -> None:
    """A sender that is killed in the middle costs that publication alone."""
    served, unserved = published
    before = sender.address
    await receiver.receive_half(served)
    await kill_sender(way)
    message = await receiver.receive_rest()
    assert "Error" in message, message
    await sender.serve_publication(served.written, served.policy)
    assert not sender.can_send(served.policy)
    await until(lambda: sender.address not in (None, before), PATIENCE_S)
    await sender.serve_publication(unserved.written, unserved.policy)
    await receiver.join(sender, "again")
    assert await receiver.receive(unserved) == unserved.digest


async def kill_sender(way: Way) -> None:
    [process] = [
        each
        for each in psutil.Process().children()
        if any("weight_sender" in word for word in command_of(each))
    ]
    way.send_signal(process.pid, Signals.SIGKILL)
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
