"""A gateway of our own for a while, in a process of its own, and episodes at it."""

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from services.common.arguments import TOKEN_VARIABLE
from services.common.child_environment import child_environment
from services.common.interpreter import python, tied
from services.common.scratch import scratch

_START_S = 60.0
# Draining, and closing what is open.
_END_S = 60.0


class GatewayError(Exception):
    """The gateway does not serve; the message says why."""


@asynccontextmanager
async def gateway(
    spec: Path,
    overrides: Sequence[str],
    said: Callable[[str], None],
    *,
    command: Sequence[str] = python("-m", "services.env_gateway"),
    environ: Mapping[str, str] | None = None,
    inherits: Sequence[str] = (),
) -> AsyncGenerator[tuple[str, str]]:
    """Its address and token. `said` gets each line that it logs. Of `environ`, our own unless
    given, it `inherits` these besides what any process of ours does. Raises GatewayError."""
    token = secrets.token_urlsafe(32)
    environment = child_environment(*inherits, ours=True, environ=environ)
    with scratch() as (folder, keeper):
        process = await asyncio.create_subprocess_exec(
            # Killed, we have it drain and close its episode.
            *tied(signal.SIGTERM, *command, "--config", str(spec)),
            # Whoever could end the episode before a drain is this process.
            *("--run-dir", str(folder), "--env_gateway.drain_s=1", *overrides),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # It may outlive us by its drain.
            pass_fds=(keeper,),
            # Ctrl-C is for this process, which closes the episode before it ends the gateway.
            start_new_session=True,
            env={**environment, TOKEN_VARIABLE: token},
        )
        assert process.stderr is not None
        reading: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_START_S):
                address = await _address(process)
            reading = asyncio.create_task(_drain(process.stderr, said))
            yield address, token
        except TimeoutError:
            if reading is not None:
                raise
            raise GatewayError(f"the gateway did not serve within {_START_S:.0f} s") from None
        finally:
            await _ended(process)
            if reading is not None:
                await reading


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Drained, or killed where it hangs."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the gateway says that it serves. Raises GatewayError with what it said instead."""
    said: list[str] = []
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode("utf-8", "replace"):
        said.append(line.rstrip())
        with suppress(ValueError):
            message = json.loads(line)
            if message.get("event") == "serving" and "address" in message:
                return message["address"]
    code = await process.wait()
    words = "\n" + "\n".join(said[-20:]) if said else " it said nothing"
    raise GatewayError(f"the gateway ended without serving, with code {code}:{words}")


async def _drain(stderr: asyncio.StreamReader, said: Callable[[str], None]) -> None:
    while line := (await stderr.readline()).decode("utf-8", "replace"):
        said(line.rstrip())
