"""The probes, in the order in which they are reported."""

import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.launcher.doctor.findings import Finding
from services.launcher.doctor.run_context import RunContext

ProbeFunction = Callable[[RunContext], Awaitable[list[Finding]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A check before a run. `local` probes take seconds, or nothing once passed, and also run
    before a start on this machine. All probes run before money is spent."""

    name: str
    what: str
    run: ProbeFunction
    limit_s: float
    local: bool = True


def _lazy_probe(name: str, what: str, module: str, limit_s: float, *, local: bool = True) -> Probe:
    """Make a probe from the function `probe_NAME` of a module, imported when it first runs: vendors
    are slow to import and may not be installed."""

    async def run_probe(context: RunContext) -> list[Finding]:
        run = pkgutil.resolve_name(f"services.launcher.doctor.{module}:probe_{name}")
        return await run(context)

    return Probe(name, what, run_probe, limit_s, local)


PROBES = (
    _lazy_probe("versions", "packages of the services' environment", "versions", 30.0),
    _lazy_probe("secrets", "variables to hand over", "secrets", 5.0),
    _lazy_probe("fleet", "Fleet's API key", "adapters.key_probe", 15.0),
    _lazy_probe("wandb", "Weights & Biases", "adapters.key_probe", 15.0),
    _lazy_probe("slack", "Slack's token", "adapters.key_probe", 15.0),
    _lazy_probe("webhook", "the webhook's host", "tcp_ports", 10.0),
    _lazy_probe("store", "where checkpoints go", "checkpoint_store", 60.0),
    _lazy_probe("clouds", "SkyPilot and clouds", "clouds", 120.0),
    _lazy_probe("ports", "ports and addresses", "tcp_ports", 10.0),
    _lazy_probe("model", "access to the model, and room for it", "model_access", 60.0),
    _lazy_probe("memory", "memory of hosts and GPUs", "memory", 60.0),
    _lazy_probe("disk", "disk and shared memory", "disk", 60.0),
    _lazy_probe("tokenizer", "tokenizer and chat template", "tokenizer", 60.0, local=False),
    _lazy_probe("dialect", "a rehearsal of the chat template", "dialect", 120.0, local=False),
    _lazy_probe("dataset", "tasks and their versions", "adapters.dataset_probe", 30.0),
    _lazy_probe("echo", "gRPC between nodes", "node_echo", 30.0, local=False),
    _lazy_probe("ring", "gloo or NCCL between nodes", "ring", 90.0, local=False),
    # The limits that the spec sets for opening and grading apply first.
    _lazy_probe(
        "episodes", "one graded episode of each environment", "adapters.gateway_probe", 2 * 3600.0
    ),
)
