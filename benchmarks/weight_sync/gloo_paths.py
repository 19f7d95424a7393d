"""The sender of weights and a receiver without vLLM, over bare gloo with the same buckets."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.weight_sync.publication import (
    PublishedModel,
    cpu_of,
    median_ratio,
    per_gb,
    policy_of,
)
from flotilla_common.rpc.free_ports import free_port
from flotilla_learner.types import Publication as Written
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.sender_config import WeightSenderConfig

SENDER = "flotilla_learner.weights.adapters.weight_sender"
SIDES = ("ours", "bare")
# Transfers of one publication: the CPU time of other processes has a resolution of 10 ms.
ROUND = 3


async def compare_gloo(published: PublishedModel, folder: Path, pairs: int) -> dict[str, Any]:
    """Return CPU and wall time of ours over those of bare gloo, after a warm-up."""
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    wall: dict[str, list[float]] = {side: [] for side in SIDES}

    def note(side: str, received: list[dict[str, float]], sent_cpu_s: float) -> None:
        cpu[side].append((sum(each["cpu_s"] for each in received) + sent_cpu_s) / ROUND)
        wall[side].append(sum(each["wall_s"] for each in received) / ROUND)

    sender = PublicationChild(SENDER, folder / "sender.log")
    try:
        address = await sender.start_process(WeightSenderConfig("run"))
        [process] = psutil.Process().children()
        port = str(free_port())
        async with (
            peer("ours", address) as receiver,
            peer("bare_sender", port) as bare_sender,
            peer("bare_receiver", port) as bare_receiver,
        ):
            for _ in range(pairs + 1):
                written = published.write_next()
                line = describe(written, folder / "publication.json")
                await sender.serve_publication(written, policy_of(written))
                before = cpu_of([process])
                got = [await transfer(receiver, line) for _ in range(ROUND)]
                note("ours", got, cpu_of([process]) - before)
                both = [await ask_both(bare_sender, bare_receiver, line) for _ in range(ROUND)]
                note("bare", [pair[1] for pair in both], sum(pair[0]["cpu_s"] for pair in both))
    finally:
        await sender.close()
    found = {"cpu": cpu, "wall": wall}
    ratios: dict[str, Any] = {
        f"{kind}_over_bare": median_ratio(each["ours"][1:], each["bare"][1:])
        for kind, each in found.items()
    }
    return ratios | {
        f"{kind}_s_per_gb": {side: per_gb(each[side][1:], published.total_bytes) for side in SIDES}
        for kind, each in found.items()
    }


@asynccontextmanager
async def peer(kind: str, where: str) -> AsyncGenerator[Process]:
    command = ("-m", "benchmarks.weight_sync.gloo_peer", kind, where)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def transfer(process: Process, line: bytes) -> dict[str, float]:
    """Let a process perform its part of one transfer; return its seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    return json.loads(await process.stdout.readline())


async def ask_both(
    sender: Process, receiver: Process, line: bytes
) -> tuple[dict[str, float], dict[str, float]]:
    return await asyncio.gather(transfer(sender, line), transfer(receiver, line))


def describe(written: Written, file: Path) -> bytes:
    """Describe a publication to a peer in `file`; return the line that names the file."""
    rows = [(e.name, e.dtype, e.shape, e.offset_bytes, e.checksum) for e in written.manifest]
    values = {"version": written.version, "fingerprint": written.fingerprint.hex()}
    values |= {"total_bytes": written.total_bytes, "path": str(written.path), "rows": rows}
    file.write_text(json.dumps(values))
    return f"{file}\n".encode()
