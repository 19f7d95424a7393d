"""What it costs to start the MCP servers of each episode over stdio."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flotilla_launcher.doctor.findings import Finding, ok, warn

_AHEAD = "env_gateway.warm_starts"


def report_starts(
    gateway: Mapping[str, Any], learner: Mapping[str, Any], log: Sequence[str]
) -> Iterator[Finding]:
    """Report the cost of a step's starts, as measured by a gateway that wrote `log`, and servers
    that cannot be started ahead though the spec asks for it."""
    size = gateway["warm_starts"]["size"]
    over_stdio = [each for each in gateway["servers"] if each["transport"] == "stdio"]
    bound = [each["name"] for each in over_stdio if each["task_variables"]]
    if size and bound:
        what = f"{_AHEAD}.size is {size}, but {', '.join(bound)} starts with its task, not ahead"
        fix = "set task_variables = false if the command reads no FLOTILLA_ variable of its task"
        yield warn(what, fix)
    attempts = learner["groups_per_step"] * learner["group_size"]
    for line in log:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "servers_started":
            yield ok(_describe_start(event, attempts, size))


def _describe_start(event: Mapping[str, Any], attempts: int, size: int) -> str:
    cpu_s, cores = event["cpu_s"], len(os.sched_getaffinity(0))
    text = (
        f"starting {event['servers']} takes {event['seconds']:.1f} s, {cpu_s:.1f} CPU-s and"
        f" {event['mib']} MiB; a step has {attempts} attempts, {attempts * cpu_s:.0f} CPU-s of"
        f" starts, at least {attempts * cpu_s / cores:.0f} s of {cores} cores"
    )
    return text if size else f"{text} ({_AHEAD}.size = {attempts} starts them ahead)"
