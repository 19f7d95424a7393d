"""The probes, in the order in which they are told."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.launcher.doctor.findings import Finding
from services.launcher.doctor.run_context import Subject

Run = Callable[[Subject], Awaitable[list[Finding]]]
_DOCTOR, _ADAPTERS = "services.launcher.doctor", "services.launcher.doctor.adapters"


@dataclass(frozen=True, slots=True)
class Probe:
    """`local`: it costs seconds, or nothing once it has gone well, and so also runs before a start
    on this machine. Before money is spent, all run."""

    name: str
    what: str
    run: Run
    limit_s: float
    local: bool = True


def _lazily(where: str, name: str) -> Run:
    """A probe that is imported when it is needed: vendors are slow, and may not be there."""

    async def run(subject: Subject) -> list[Finding]:
        return await getattr(importlib.import_module(where), name)(subject)

    return run


PROBES = (
    Probe(
        "versions",
        "packages of the services' environment",
        _lazily(f"{_DOCTOR}.versions", "versions"),
        30.0,
    ),
    Probe("secrets", "variables to hand over", _lazily(f"{_DOCTOR}.secrets", "secrets"), 5.0),
    Probe("fleet", "Fleet's API key", _lazily(f"{_ADAPTERS}.key_probe", "fleet"), 15.0),
    Probe("wandb", "Weights & Biases", _lazily(f"{_ADAPTERS}.key_probe", "wandb"), 15.0),
    Probe("slack", "Slack's token", _lazily(f"{_ADAPTERS}.key_probe", "slack"), 15.0),
    Probe("webhook", "the webhook's host", _lazily(f"{_DOCTOR}.ports", "webhook"), 10.0),
    Probe("store", "where checkpoints go", _lazily(f"{_DOCTOR}.store", "store"), 60.0),
    Probe("clouds", "SkyPilot and clouds", _lazily(f"{_DOCTOR}.clouds", "clouds"), 120.0),
    Probe("ports", "ports and addresses", _lazily(f"{_DOCTOR}.ports", "ports"), 10.0),
    Probe("memory", "memory of hosts and GPUs", _lazily(f"{_DOCTOR}.memory", "memory"), 60.0),
    Probe("disk", "disk and shared memory", _lazily(f"{_DOCTOR}.disk", "disk"), 60.0),
    Probe(
        "tokenizer",
        "tokenizer and chat template",
        _lazily(f"{_DOCTOR}.tokenizer", "tokenizer"),
        60.0,
        local=False,
    ),
    Probe("dataset", "tasks and their versions", _lazily(f"{_DOCTOR}.dataset", "dataset"), 30.0),
    Probe("echo", "gRPC between nodes", _lazily(f"{_DOCTOR}.node_echo", "echo"), 30.0, local=False),
    Probe("ring", "gloo or NCCL between nodes", _lazily(f"{_DOCTOR}.ring", "ring"), 90.0, False),
    Probe(
        "episodes",
        "one graded episode of each environment",
        _lazily(f"{_ADAPTERS}.gateway_probe", "episodes"),
        # Whatever the spec allows for opening and grading; that ends it by itself.
        2 * 3600.0,
    ),
)
