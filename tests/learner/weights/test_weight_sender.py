"""The sender process and engines that receive from it: whatever becomes of one, the others get what
was published, within the same publication."""

import asyncio
import hashlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import psutil
import pytest
import torch

from services.common.domain.policy import PolicyId
from services.common.fingerprint import TensorEntry, checksum64, compute_fingerprint
from services.common.tensors.sender_connection import SenderConnection, TransferRefusedError
from services.common.weight_transfer import (
    OpenGroup,
    TransferSettings,
    decode_request,
    encode_request,
)
from services.learner.types import Publication
from services.learner.weights.live_sender import LiveSender
from services.learner.weights.sender_config import WeightSenderConfig
from tests.support.fake_peers import until
from tests.support.process_commands import command_of
from tests.support.repository import ROOT

SETTINGS = TransferSettings(stall_s=3.0, piece_bytes=1 << 16)
SIZES = (100, 70_000, 16, 200_000, 3)
PATIENCE_S = 60.0


class SentModel:
    """A publication in a file, as the learner and as an engine know it."""

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
        self.told = folder / f"v{version}.json"
        rows = [(e.name, e.dtype, e.shape, e.offset_bytes, e.checksum) for e in manifest]
        fields = {"run_epoch": 1, "version": version, "total_bytes": offset, "rows": rows}
        fingerprint = self.policy.fingerprint.hex()
        self.told.write_text(json.dumps({**fields, "fingerprint": fingerprint}))


class Receiver:
    """An engine's one worker, in a thread of this process."""

    def __init__(self, sender: LiveSender, group: str) -> None:
        self._opening = (str(sender.address), OpenGroup(group, 1, "gloo"))
        self._connection: SenderConnection | None = None

    async def join(self) -> Self:
        cpu = torch.device("cpu")
        self._connection = await asyncio.to_thread(SenderConnection, *self._opening, 0, cpu)
        return self

    async def receive(self, published: SentModel) -> str:
        """Return the digest of what comes."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(self._receive, published)

    def _receive(self, published: SentModel) -> str:
        assert self._connection is not None
        total = published.written.total_bytes
        digest = hashlib.sha256()
        sent = self._connection.request_weights(published.policy, published.entries, total)
        for name, tensor in sent:
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


@asynccontextmanager
async def sending(folder: Path) -> AsyncGenerator[LiveSender]:
    sender = LiveSender(WeightSenderConfig("r", settings=SETTINGS), folder / "sender.log")
    sender.start_soon()
    try:
        await until(lambda: sender.address is not None, PATIENCE_S)
        yield sender
    finally:
        await sender.close()


@asynccontextmanager
async def failing(sender: LiveSender, how: str, published: SentModel) -> AsyncGenerator[Process]:
    """Run an engine's worker that has joined, and fails while it receives `published`."""
    command = ("-m", "tests.support.receiving_worker", str(sender.address), "failing", how)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), PATIENCE_S) == b"joined\n"
        process.stdin.write(f"{published.told}\n".encode())
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_an_engine_that_fails_in_the_middle_holds_up_no_other(
    tmp_path: Path, how: str
) -> None:
    published = [SentModel(tmp_path, version) for version in range(4)]
    async with sending(tmp_path) as sender:
        receivers = [await Receiver(sender, f"g{index}").join() for index in range(2)]
        await sender.serve_publication(published[0].written, published[0].policy)
        async with failing(sender, how, published[0]):
            began = time.monotonic()
            for each in published:
                await sender.serve_publication(each.written, each.policy)
                got = await asyncio.gather(*(it.receive(each) for it in receivers))
                assert got == [each.digest] * 2
            assert time.monotonic() - began < SETTINGS.stall_s
            await until(lambda: "an engine is lost" in (tmp_path / "sender.log").read_text(), 20.0)


async def test_an_engine_is_sent_what_it_asks_for_and_nothing_that_is_superseded(
    tmp_path: Path,
) -> None:
    async with sending(tmp_path) as sender:
        receiver = await Receiver(sender, "g").join()
        published = [SentModel(tmp_path, version) for version in range(3)]
        for each in published:
            assert not sender.can_send(each.policy)
            await sender.serve_publication(each.written, each.policy)
            assert sender.can_send(each.policy)
        with pytest.raises(TransferRefusedError, match="version 0 of epoch 1"):
            await receiver.receive(published[0])
        # It has missed none by that: the newest two are there, in any order.
        assert await receiver.receive(published[2]) == published[2].digest
        assert await receiver.receive(published[1]) == published[1].digest


async def test_a_sender_that_is_killed_is_replaced_and_fails_nobody(tmp_path: Path) -> None:
    async with sending(tmp_path) as sender:
        published = [SentModel(tmp_path, version) for version in range(2)]
        before = sender.address
        receiver = await Receiver(sender, "g").join()
        kill_sender()
        await sender.serve_publication(published[0].written, published[0].policy)
        assert not sender.can_send(published[0].policy)
        with pytest.raises(RuntimeError):
            await receiver.receive(published[0])
        await until(lambda: sender.address is not None, PATIENCE_S)
        assert sender.address != before
        await sender.serve_publication(published[1].written, published[1].policy)
        receiver = await Receiver(sender, "g").join()
        assert await receiver.receive(published[1]) == published[1].digest


def kill_sender() -> None:
    [process] = [
        each
        for each in psutil.Process().children()
        if any("weight_sender" in word for word in command_of(each))
    ]
    process.kill()


def test_a_request_reads_as_it_was_written_and_nothing_else_does() -> None:
    opening = OpenGroup("g", 2, "gloo")
    assert decode_request(encode_request(opening)) == opening
    for text in ("", "[]", "{}", '{"kind": "OpenGroup"}', '{"kind": "Exit", "group": "g"}'):
        with pytest.raises(ValueError):
            decode_request(text)
