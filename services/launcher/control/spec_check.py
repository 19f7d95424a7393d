"""Validation of a spec by every service before a run starts."""

import asyncio
from contextlib import suppress

from services.common.child_environment import child_environment
from services.launcher.backends.sky.machine_candidates import machines_of
from services.launcher.run_plan import (
    BadSpecError,
    RunPlan,
    check_command,
    machines_key,
    may_span,
)
from services.launcher.state import SERVICES

_TIMEOUT_S = 120.0


async def check_spec(plan: RunPlan) -> None:
    """Let the services validate their parts. Raises BadSpecError with all objections."""
    answers = await asyncio.gather(*(_check_service(plan, service) for service in SERVICES))
    problems = [answer for answer in answers if answer]
    if problems:
        raise BadSpecError("\n".join(problems))


async def _check_service(plan: RunPlan, service: str) -> str:
    """Return one service's objections to the spec; empty if it has none."""
    machines = _machines_arguments(plan, service)
    process = await asyncio.create_subprocess_exec(
        *check_command(plan.config.modules, service, machines),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=child_environment(ours=True),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate(plan.text.encode())
    except TimeoutError:
        return f"{service}: checking its part of the spec took longer than {_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    text = output.decode(errors="replace").strip()
    if machines:
        text = f"with launcher.sky.{service}.num_nodes, as {' '.join(machines)}: {text}"
    return f"{service}: {text[-4_000:] or f'check exited with code {process.returncode}'}"


def _machines_arguments(plan: RunPlan, service: str) -> tuple[str, ...]:
    """Return the override for a service whose replicas span several rented machines."""
    if plan.config.backend != "sky" or not may_span(service):
        return ()
    nodes = machines_of(plan.config.sky, service).num_nodes
    return (f"--{machines_key(service)}={nodes}",) if nodes > 1 else ()
