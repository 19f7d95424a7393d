"""The doctor's report of what the starts of a step cost."""

import json
from typing import Any

from flotilla_launcher.doctor.findings import Finding, Status
from flotilla_launcher.doctor.server_starts import report_starts

LEARNER = {"groups_per_step": 4, "group_size": 8}
LOG = [
    "no JSON",
    '{"event": "serving"}',
    json.dumps(
        {"event": "servers_started", "servers": "git", "seconds": 1.26, "cpu_s": 0.9, "mib": 60}
    ),
]


def report(*, size: int = 0, **server: Any) -> list[Finding]:
    servers = [{"name": "git", "transport": "stdio", "task_variables": True, **server}]
    gateway = {"warm_starts": {"size": size}, "servers": servers}
    return list(report_starts(gateway, LEARNER, LOG))


def test_the_cost_of_a_steps_starts_is_told_with_the_key_that_makes_them_earlier() -> None:
    (said,) = report()
    assert said.status is Status.OK
    assert said.detail.startswith("starting git takes 1.3 s, 0.9 CPU-s and 60 MiB; a step has 32")
    assert "29 CPU-s" in said.detail
    assert said.detail.endswith("(env_gateway.warm_starts.size = 32 starts them ahead)")


def test_servers_that_cannot_be_started_ahead_are_told() -> None:
    first, cost = report(size=16)
    assert first.status is Status.WARN and "git starts with its task" in first.detail
    assert "starts them ahead" not in cost.detail
    assert [each.status for each in report(size=16, task_variables=False)] == [Status.OK]
    assert [each.status for each in report(size=16, transport="http")] == [Status.OK]
