"""A mark for tests that need a working sandbox, not only bubblewrap."""

import asyncio

import pytest

from flotilla_env_gateway.verify.sandbox import Sandbox
from flotilla_env_gateway.verify.verifier_process import StartError, VerifierProcess


def _problem() -> str | None:
    sandbox = Sandbox.find_installed(memory_bytes=2**28, cpu_s=5)
    if sandbox is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        asyncio.run(_try(sandbox))
    except StartError as error:
        return f"bubblewrap fails here: {error}"
    return None


async def _try(sandbox: Sandbox) -> None:
    worker = await VerifierProcess.start_process(sandbox.make_command())
    await worker.kill()


_PROBLEM = _problem()
needs_sandbox = pytest.mark.skipif(
    _PROBLEM is not None, reason=f"NOTHING was tested of the verifiers' sandbox: {_PROBLEM}"
)
