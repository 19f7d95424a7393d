"""Validation of a spec by every service before a run starts.

A mistyped key is found by one process that only reads tables; services, whose own checks may import
torch and vLLM, are started for a spec whose tables are right."""

import asyncio
from asyncio.subprocess import STDOUT
from collections.abc import Sequence

from services.common.process.child_environment import child_environment
from services.common.process.exit_codes import CONFIG
from services.common.process.run_child import run_child
from services.launcher.backends.sky.machine_candidates import machines_of
from services.launcher.run_plan import (
    BadSpecError,
    RunPlan,
    check_command,
    machines_key,
    may_span,
    tables_command,
)
from services.launcher.state import SERVICES

_TIMEOUT_S = 120.0


async def check_spec(plan: RunPlan) -> None:
    """Let the services validate their parts. Raises BadSpecError with all objections."""
    answers = await asyncio.gather(*(_check_service(plan, service) for service in SERVICES))
    problems = [answer for answer in answers if answer]
    if problems:
        raise BadSpecError("\n".join(problems))


async def check_tables(plan: RunPlan, where: str = "spec") -> None:
    """Read the services' tables. Raises BadSpecError with every mistake in them; `where` names the
    spec. Tables that this installation cannot import are left to the services."""
    command = tables_command(plan.config.modules, where)
    if command is None:
        return
    code, text = await _run_check(command, plan.text)
    if code == CONFIG:
        raise BadSpecError(text)


async def _check_service(plan: RunPlan, service: str) -> str:
    """Return one service's objections to the spec; empty if it has none."""
    machines = _machines_arguments(plan, service)
    command = check_command(plan.config.modules, service, machines)
    try:
        code, text = await _run_check(command, plan.text)
    except BadSpecError as error:
        return f"{service}: {error}"
    if code == 0:
        return ""
    if machines:
        text = f"with launcher.sky.{service}.num_nodes, as {' '.join(machines)}: {text}"
    return f"{service}: {text or f'check exited with code {code}'}"


async def _run_check(command: Sequence[str], spec: str) -> tuple[int, str]:
    """Run a check of the spec; return its exit code and what it printed. Raises BadSpecError."""
    env = child_environment(ours=True)
    try:
        code, output, _ = await run_child(
            command, spec.encode(), env=env, seconds=_TIMEOUT_S, stderr=STDOUT
        )
    except TimeoutError as error:
        raise BadSpecError(f"checking the spec took longer than {_TIMEOUT_S:g} s") from error
    return code, output.decode(errors="replace").strip()[-4_000:]


def _machines_arguments(plan: RunPlan, service: str) -> tuple[str, ...]:
    """Return the override for a service whose replicas span several rented machines."""
    if plan.config.backend != "sky" or not may_span(service):
        return ()
    nodes = machines_of(plan.config.sky, service).num_nodes
    return (f"--{machines_key(service)}={nodes}",) if nodes > 1 else ()
