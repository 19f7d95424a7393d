"""A temporary gateway in a process of its own."""

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.arguments import TOKEN_VARIABLE
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command, tied_command
from flotilla_launcher.process_end import end_process

_START_S = 60.0
# Time to drain and to close open episodes.
_END_S = 60.0
# Only this process could end the episode during a drain; it has few episodes, and its folder goes
# with it.
_OVERRIDES = (
    "--env_gateway.drain_s=1",
    "--env_gateway.warm_starts.size=0",
    "--env_gateway.record=false",
)


class GatewayError(Exception):
    """Raised when the gateway does not serve; the message gives the reason."""


@asynccontextmanager
async def serve_gateway(
    spec: Path,
    overrides: Sequence[str],
    take_line: Callable[[str], None],
    *,
    command: Sequence[str] = python_command("-m", "flotilla_env_gateway"),
    environ: Mapping[str, str] | None = None,
    inherits: Sequence[str] = (),
) -> AsyncGenerator[tuple[str, str]]:
    """Run a gateway; yield its address and token. `take_line` receives each line that it logs. From
    `environ` (by default this process's own) it inherits the variables of every process of ours and
    those in `inherits`. Raises GatewayError."""
    token = secrets.token_urlsafe(32)
    with scratch_folder() as (folder, keeper):
        options = ("--config", str(spec), "--run-dir", str(folder))
        process = await _start_process(
            (*command, *options, *_OVERRIDES, *overrides),
            *(token, inherits, environ, keeper),
        )
        assert process.stderr is not None
        reading: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_START_S):
                address = await _read_address(process)
            reading = asyncio.create_task(_forward_lines(process.stderr, take_line))
            yield address, token
        except TimeoutError:
            if reading is not None:
                raise
            raise GatewayError(f"the gateway did not serve within {_START_S:.0f} s") from None
        finally:
            await end_process(process, _END_S)
            if reading is not None:
                await reading


async def _start_process(
    command: Sequence[str],
    token: str,
    inherits: Sequence[str],
    environ: Mapping[str, str] | None,
    keeper: int,
) -> asyncio.subprocess.Process:
    """Start the gateway. `keeper` is the descriptor that keeps its scratch folder."""
    environment = child_environment(*inherits, ours=True, environ=environ)
    return await asyncio.create_subprocess_exec(
        # If this process is killed, the gateway drains and closes its episode.
        *tied_command(signal.SIGTERM, *command),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # It may outlive this process by its drain.
        pass_fds=(keeper,),
        # Ctrl-C is for this process, which closes the episode before it ends the gateway.
        start_new_session=True,
        env={**environment, TOKEN_VARIABLE: token},
    )


async def _read_address(process: asyncio.subprocess.Process) -> str:
    """Read the address at which the gateway serves from its log. Raises GatewayError with the
    log if there is none."""
    lines: list[str] = []
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode("utf-8", "replace"):
        lines.append(line.rstrip())
        with suppress(ValueError):
            message = json.loads(line)
            if message.get("event") == "serving" and "address" in message:
                return message["address"]
    code = await process.wait()
    words = "\n" + "\n".join(lines[-20:]) if lines else " it printed nothing"
    raise GatewayError(f"the gateway ended without serving, with code {code}:{words}")


async def _forward_lines(stderr: asyncio.StreamReader, take_line: Callable[[str], None]) -> None:
    while line := (await stderr.readline()).decode("utf-8", "replace"):
        take_line(line.rstrip())
