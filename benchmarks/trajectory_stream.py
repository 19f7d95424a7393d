"""CPU of submitting trajectories over a raw socket's: `python -m benchmarks.trajectory_stream`.

A rollout's client sends trajectories of 16,384 tokens to a learner in a process of its own, over
gRPC: each is encoded, sent, checked, journaled and fsynced before its receipt. The other sides do
parts of that, also between two processes. CPU always counts both processes:

- `raw`: the bytes of the same token ids and logprobs through a socket, answered with one byte.
- `synced`: the same, in a file and fsynced before the answer.
- `decoded`: the same work without gRPC and the journal's database: digested and encoded, through a
  socket, decoded with every check, in a file and fsynced before the answer.
- `grpc`: the messages of a submission, made beforehand, through gRPC with the services' options, in
  as many calls, answered with one byte. They are not parsed, checked or kept.

The last line is one JSON object, with medians over the pairs:

- `cpu_over_raw`, `cpu_over_synced`, `cpu_over_decoded`: CPU of ours over that of each.
- `grpc_over_raw`: the part of gRPC alone in the first.
- `cpu_ms`: CPU milliseconds of a trajectory: `ours`, its parts `sender` and `learner`, and the
  others.

About a minute.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.grpc_receiver import METHOD, SERVICE
from benchmarks.raw_receiver import LENGTH, join_messages
from benchmarks.replica import AgreeingEngine, Replica, connect_replica, written_for
from benchmarks.submission import encode_trajectory, make_trajectory
from benchmarks.timed_learner import run_timed_learner
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.rpc_options import CHANNEL_OPTIONS
from flotilla_common.telemetry import log
from flotilla_rollout.types import Lease

GROUP, AT_ONCE = 16, 16
PAIRS, ROUND = 7, 128
KINDS = ("raw", "synced", "decoded")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    log.setup("benchmark", "", level="ERROR")
    print(json.dumps(asyncio.run(compare(given.pairs))))


async def compare(pairs: int) -> dict[str, Any]:
    """Return the figures of `pairs` pairs, after a warm-up pair."""
    found: dict[str, list[float]] = {"sender": [], "learner": [], "grpc": []}
    found |= {kind: [] for kind in KINDS}
    changes: dict[str, Any] = {
        # No batch is ever complete, so the learner never trains.
        **{"steps": 10, "groups_per_step": 1000, "group_size": GROUP},
        **{"lease_ttl_s": 600.0, "intake": {"worker_bytes": 2**26, "total_bytes": 2**26}},
    }
    with tempfile.TemporaryDirectory() as place:
        folder, engine = Path(place), AgreeingEngine()
        async with (
            run_timed_learner(folder, 0.0, **changes) as learner,
            connect_replica(learner.address, folder, 0, engine) as replica,
        ):
            await replica.follower.wait_for_first_weights()
            assert engine.policy is not None
            trajectory = make_trajectory()
            for _ in range(pairs + 1):
                leases = [await lease_group(replica, engine.policy) for _ in range(ROUND // GROUP)]
                sender, receiver = await hand_in(
                    replica, leases, trajectory, engine.policy, learner.pid
                )
                found["sender"].append(sender)
                found["learner"].append(receiver)
                found["grpc"].append(await send_bare(encode_trajectory(trajectory)))
                for kind in KINDS:
                    found[kind].append(send_raw(kind, trajectory, folder / "received"))
    return summarise(found)


def summarise(found: dict[str, list[float]]) -> dict[str, Any]:
    ours = [sum(both) for both in zip(found["sender"], found["learner"], strict=True)]

    def over(theirs: str, mine: list[float] = ours) -> float:
        pairs = zip(mine[1:], found[theirs][1:], strict=True)
        return round(statistics.median(one / other for one, other in pairs), 2)

    parts = {"ours": ours, **found}
    cpu_ms = {
        name: round(statistics.median(all_[1:]) / ROUND * 1e3, 3) for name, all_ in parts.items()
    }
    return {
        **{f"cpu_over_{kind}": over(kind) for kind in KINDS},
        "grpc_over_raw": over("raw", found["grpc"]),
        "cpu_ms": cpu_ms,
        "load": os.getloadavg()[0],
    }


async def lease_group(replica: Replica, policy: PolicyId) -> Lease:
    lease = await replica.groups.lease_group(policy, GROUP)
    assert lease is not None
    return lease


async def hand_in(
    replica: Replica,
    leases: Sequence[Lease],
    trajectory: Trajectory,
    policy: PolicyId,
    pid: int,
) -> tuple[float, float]:
    """Submit a trajectory for every attempt; return the CPU seconds of sender and learner."""
    places = asyncio.Semaphore(AT_ONCE)

    async def submit(lease: Lease, index: int) -> None:
        made = written_for(trajectory, lease, index, policy)
        async with places:
            await replica.groups.submit_trajectory(lease, made, 120.0)

    before, began = cpu_of(pid), time.process_time()
    await asyncio.gather(
        *(submit(lease, each.attempt_index) for lease in leases for each in lease.attempts)
    )
    return time.process_time() - began, cpu_of(pid) - before


def cpu_of(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


async def send_bare(messages: list[bytes]) -> float:
    """Send the messages of as many submissions; return the CPU seconds of both sides."""
    command = (sys.executable, "-m", "benchmarks.grpc_receiver")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            send = channel.stream_unary(f"/{SERVICE}/{METHOD}")
            assert await send(iter(messages), timeout=120.0) == b"k"
            before, began = cpu_of(process.pid), time.process_time()
            places = asyncio.Semaphore(AT_ONCE)

            async def submit() -> None:
                async with places:
                    await send(iter(messages), timeout=120.0)

            await asyncio.gather(*(submit() for _ in range(ROUND)))
            return time.process_time() - began + cpu_of(process.pid) - before
    finally:
        process.kill()
        await process.wait()


def send_raw(kind: str, trajectory: Trajectory, out: Path) -> float:
    """Send as many trajectories; return the CPU seconds of both sides."""
    command = [sys.executable, "-m", "benchmarks.raw_receiver", kind, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as sender:
            began = time.process_time()
            for _ in range(ROUND):
                payload = payload_of(kind, trajectory)
                sender.sendall(LENGTH.pack(len(payload)) + payload)
                assert sender.recv(1) == b"k"
            own = time.process_time() - began
        return own + float(process.stdout.readline())


def payload_of(kind: str, trajectory: Trajectory) -> bytes:
    if kind == "decoded":
        return join_messages(encode_trajectory(trajectory))
    sequence = trajectory.sequences[0]
    return sequence.token_ids.tobytes() + sequence.logprobs.tobytes()


if __name__ == "__main__":
    main()
