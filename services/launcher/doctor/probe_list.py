"""The probes, in the order in which they are reported."""

import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.launcher.doctor.findings import Finding
from services.launcher.doctor.run_context import RunContext

ProbeFunction = Callable[[RunContext], Awaitable[list[Finding]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A check before a run. `local`: it costs seconds, or nothing once it has passed, and so
    also runs before a start on this machine. Before money is spent, all probes run."""

    name: str
    what: str
    run: ProbeFunction
    limit_s: float
    local: bool = True


def _import_lazily(path: str) -> ProbeFunction:
    """Return the probe at `module:function`, which is imported when it is needed: vendors are slow
    to import and may not be installed."""

    async def run_probe(context: RunContext) -> list[Finding]:
        return await pkgutil.resolve_name(path)(context)

    return run_probe


PROBES = (
    Probe(
        "versions",
        "packages of the services' environment",
        _import_lazily("services.launcher.doctor.versions:probe_versions"),
        30.0,
    ),
    Probe(
        "secrets",
        "variables to hand over",
        _import_lazily("services.launcher.doctor.secrets:probe_secrets"),
        5.0,
    ),
    Probe(
        "fleet",
        "Fleet's API key",
        _import_lazily("services.launcher.doctor.adapters.key_probe:probe_fleet"),
        15.0,
    ),
    Probe(
        "wandb",
        "Weights & Biases",
        _import_lazily("services.launcher.doctor.adapters.key_probe:probe_wandb"),
        15.0,
    ),
    Probe(
        "slack",
        "Slack's token",
        _import_lazily("services.launcher.doctor.adapters.key_probe:probe_slack"),
        15.0,
    ),
    Probe(
        "webhook",
        "the webhook's host",
        _import_lazily("services.launcher.doctor.tcp_ports:probe_webhook"),
        10.0,
    ),
    Probe(
        "store",
        "where checkpoints go",
        _import_lazily("services.launcher.doctor.checkpoint_store:probe_store"),
        60.0,
    ),
    Probe(
        "clouds",
        "SkyPilot and clouds",
        _import_lazily("services.launcher.doctor.clouds:probe_clouds"),
        120.0,
    ),
    Probe(
        "ports",
        "ports and addresses",
        _import_lazily("services.launcher.doctor.tcp_ports:probe_ports"),
        10.0,
    ),
    Probe(
        "model",
        "access to the model, and room for it",
        _import_lazily("services.launcher.doctor.model_access:probe_model"),
        60.0,
    ),
    Probe(
        "memory",
        "memory of hosts and GPUs",
        _import_lazily("services.launcher.doctor.memory:probe_memory"),
        60.0,
    ),
    Probe(
        "disk",
        "disk and shared memory",
        _import_lazily("services.launcher.doctor.disk:probe_disk"),
        60.0,
    ),
    Probe(
        "tokenizer",
        "tokenizer and chat template",
        _import_lazily("services.launcher.doctor.tokenizer:probe_tokenizer"),
        60.0,
        local=False,
    ),
    Probe(
        "dialect",
        "a rehearsal of the chat template",
        _import_lazily("services.launcher.doctor.dialect:probe_dialect"),
        120.0,
        local=False,
    ),
    Probe(
        "dataset",
        "tasks and their versions",
        _import_lazily("services.launcher.doctor.adapters.dataset_probe:probe_dataset"),
        30.0,
    ),
    Probe(
        "echo",
        "gRPC between nodes",
        _import_lazily("services.launcher.doctor.node_echo:probe_echo"),
        30.0,
        local=False,
    ),
    Probe(
        "ring",
        "gloo or NCCL between nodes",
        _import_lazily("services.launcher.doctor.ring:probe_ring"),
        90.0,
        False,
    ),
    Probe(
        "episodes",
        "one graded episode of each environment",
        _import_lazily("services.launcher.doctor.adapters.gateway_probe:probe_episodes"),
        # Whatever the spec allows for opening and grading; that ends it by itself.
        2 * 3600.0,
    ),
)
