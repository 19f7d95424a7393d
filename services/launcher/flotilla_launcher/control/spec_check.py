"""Validation of a spec by every service before a run starts.

A mistyped key is found by one process that only reads tables; services, whose own checks may import
torch and vLLM, are started for a spec whose tables are right."""

import asyncio
from asyncio.subprocess import STDOUT
from collections.abc import Collection, Mapping, Sequence

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.exit_codes import CONFIG
from flotilla_common.process.python_command import python_command
from flotilla_common.process.run_child import run_child
from flotilla_common.spec.old_names import explain_old_import
from flotilla_launcher.backends.sky.machine_candidates import machines_of
from flotilla_launcher.run_spec import BadSpecError, RunSpec, machines_key, may_span
from flotilla_launcher.state import SERVICES

_TIMEOUT_S = 120.0
# The class of each service's table of a spec.
_TABLES = {
    "env_gateway": "flotilla_env_gateway.config.gateway:EnvGatewayConfig",
    "learner": "flotilla_learner.config.learner:LearnerConfig",
    "rollout": "flotilla_rollout.config.rollout:RolloutConfig",
}


async def check_spec(spec: RunSpec) -> None:
    """Let the services that the run needs validate their parts. Raises BadSpecError with all
    objections."""
    answers = await asyncio.gather(*(_check_service(spec, service) for service in spec.services))
    problems = [answer for answer in answers if answer]
    if problems:
        raise BadSpecError("\n".join(problems))


async def check_tables(spec: RunSpec, where: str = "spec") -> None:
    """Read the tables of the services that the run needs, and of others that the spec has.

    Raises BadSpecError with every mistake in them; `where` names the spec. Tables that this
    installation cannot import are left to the services."""
    services = [name for name in SERVICES if name in spec.services or name in spec.tables]
    command = tables_command(spec.config.modules, where, services)
    if command is None:
        return
    code, text = await _run_check(command, spec.text)
    if code == CONFIG:
        raise BadSpecError(text)


def check_command(
    modules: Mapping[str, str], service: str, overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command that makes a service validate its own part of a spec, with overrides.

    The spec goes to its standard input: a killed launcher would leave a file behind."""
    entry = modules.get(service, f"flotilla_{service}")
    return python_command("-m", entry, "--config", "-", "--check-config", *overrides)


def tables_command(
    modules: Mapping[str, str], where: str, services: Collection[str] = SERVICES
) -> tuple[str, ...] | None:
    """Return the command that reads these services' tables of the spec on its standard input, in
    one process and without what they import; None if other modules replace all of them."""
    named = [name for name in services if name not in modules]
    tables = [f"{name}={place}" for name, place in _TABLES.items() if name in named]
    if not tables:
        return None
    return python_command("-m", "flotilla_launcher.control.read_tables", where, *tables)


async def _check_service(spec: RunSpec, service: str) -> str:
    """Return one service's objections to the spec; empty if it has none."""
    machines = _machines_arguments(spec, service)
    command = check_command(spec.config.modules, service, machines)
    try:
        code, text = await _run_check(command, spec.text)
    except BadSpecError as error:
        return f"{service}: {error}"
    if code == 0:
        return ""
    if machines:
        text = f"with launcher.sky.{service}.num_nodes, as {' '.join(machines)}: {text}"
    lines = [text or f"check exited with code {code}", explain_old_import(text)]
    return f"{service}: " + "\n".join(filter(None, lines))


async def _run_check(command: Sequence[str], text: str) -> tuple[int, str]:
    """Run a check of the spec; return its exit code and what it printed. Raises BadSpecError."""
    env = child_environment(ours=True)
    try:
        code, output, _ = await run_child(
            command, text.encode(), env=env, seconds=_TIMEOUT_S, stderr=STDOUT
        )
    except TimeoutError as error:
        raise BadSpecError(f"checking the spec took longer than {_TIMEOUT_S:g} s") from error
    return code, output.decode(errors="replace").strip()[-4_000:]


def _machines_arguments(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the override for a service whose replicas span several rented machines."""
    if spec.config.backend != "sky" or not may_span(service):
        return ()
    nodes = machines_of(spec.config.sky, service).num_nodes
    return (f"--{machines_key(service)}={nodes}",) if nodes > 1 else ()
