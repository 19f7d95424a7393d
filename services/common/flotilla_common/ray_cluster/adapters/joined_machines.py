"""Machines that have joined the cluster to which this process is connected."""

import asyncio
import time
from collections.abc import Sequence

import ray

from flotilla_common.ray_cluster.machine_resources import (
    WORKER_RESOURCE,
    ExpectedMachines,
    machine_number,
)
from flotilla_common.telemetry.log import get_logger

_LOOK_S = 0.2
_log = get_logger(__name__)


class MachinesMissingError(Exception):
    """Too few machines have joined, or a wrong one; the message names the fix."""


async def wait_for_machines(expected: ExpectedMachines) -> Sequence[int]:
    """Wait for the further machines; return the numbers of those that joined, in order.

    Raises MachinesMissingError."""
    deadline = time.monotonic() + expected.join_s
    numbers = range(1, expected.machines)
    while True:
        joined = _joined_machines(expected)
        missing = [number for number in numbers if number not in joined]
        if not missing:
            return numbers
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_S)
    workers = expected.workers * (expected.machines - len(missing))
    listed = ", ".join(map(str, missing))
    if workers < expected.least:
        raise MachinesMissingError(
            f"machine {listed} of {expected.machines} has not joined in {expected.join_s:g} s: run"
            f" `python -m {expected.program} --replica NUMBER` with this spec there, see its log,"
            f" or {expected.remedy}"
        )
    _log.warning("machines have not joined: going on without", missing=missing, workers=workers)
    return [number for number in numbers if number in joined]


def _joined_machines(expected: ExpectedMachines) -> set[int]:
    """Return the numbers of the machines that joined. Raises MachinesMissingError if one of them
    does not fit."""
    joined: set[int] = set()
    for node in ray.nodes():
        number = machine_number(node["Resources"]) if node["Alive"] else None
        if number is None:
            continue
        offered = int(node["Resources"].get(WORKER_RESOURCE, 0))
        if offered != expected.workers:
            raise MachinesMissingError(
                f"machine {number} ({node['NodeManagerHostname']}) has {expected.workers_key} ="
                f" {offered}, the head {expected.workers}; start both with one spec"
            )
        joined.add(number)
    return joined
