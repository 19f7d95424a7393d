"""The probes, in the order in which they are reported."""

import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flotilla_launcher.doctor.findings import Finding
from flotilla_launcher.doctor.run_context import RunContext

ProbeFunction = Callable[[RunContext], Awaitable[list[Finding]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A check before a run. `local` probes take seconds, or nothing once passed, and also run
    before a start on this machine. All probes run before money is spent."""

    name: str
    run: ProbeFunction
    limit_s: float
    local: bool = True


def _lazy_probe(name: str, module: str, limit_s: float, *, local: bool = True) -> Probe:
    """Make a probe from the function `probe_NAME` of a module, imported when it first runs: vendors
    are slow to import and may not be installed."""

    async def run_probe(context: RunContext) -> list[Finding]:
        run = pkgutil.resolve_name(f"flotilla_launcher.doctor.{module}:probe_{name}")
        return await run(context)

    return Probe(name, run_probe, limit_s, local)


PROBES = (
    _lazy_probe("versions", "versions", 30.0),
    _lazy_probe("secrets", "secrets", 5.0),
    _lazy_probe("fleet", "adapters.key_probe", 15.0),
    _lazy_probe("tinker", "adapters.tinker_probe", 15.0),
    _lazy_probe("judge", "adapters.judge_probe", 20.0),
    _lazy_probe("wandb", "adapters.key_probe", 15.0),
    _lazy_probe("slack", "adapters.key_probe", 15.0),
    _lazy_probe("webhook", "tcp_ports", 10.0),
    _lazy_probe("store", "checkpoint_store", 60.0),
    _lazy_probe("clouds", "clouds", 120.0),
    _lazy_probe("ports", "tcp_ports", 10.0),
    _lazy_probe("model", "model_access", 60.0),
    _lazy_probe("memory", "memory", 60.0),
    _lazy_probe("disk", "disk", 60.0),
    _lazy_probe("tokenizer", "tokenizer", 60.0, local=False),
    _lazy_probe("dialect", "dialect", 300.0, local=False),
    _lazy_probe("dataset", "adapters.dataset_probe", 30.0),
    # The limits that the spec sets for opening and grading apply first.
    _lazy_probe("episodes", "adapters.gateway_probe", 2 * 3600.0),
)
