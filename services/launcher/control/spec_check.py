"""Validation of a spec by every service, before anything is started."""

import asyncio
from contextlib import suppress

from services.common.child_environment import child_environment
from services.launcher.run_plan import BadSpecError, RunPlan, check_command
from services.launcher.state import SERVICES

_TIMEOUT_S = 120.0


async def check_spec(plan: RunPlan) -> None:
    """Let the services validate their parts. Raises BadSpecError with all that they say."""
    answers = await asyncio.gather(*(_check_service(plan, service) for service in SERVICES))
    problems = [answer for answer in answers if answer]
    if problems:
        raise BadSpecError("\n".join(problems))


async def _check_service(plan: RunPlan, service: str) -> str:
    """Return one service's objections to the spec; empty if it has none."""
    process = await asyncio.create_subprocess_exec(
        *check_command(plan.config.modules, service),
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
    return f"{service}: {text[-4_000:] or f'check exited with code {process.returncode}'}"
