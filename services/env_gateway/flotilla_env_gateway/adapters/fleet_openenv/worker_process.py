"""The worker process of one FleetTaskEnv. A deadline kills it, because it swallows cancellation."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_common.text.parsing import TextLimits, parse_json_aside
from flotilla_env_gateway.adapters.child_process import ChildProcess
from flotilla_env_gateway.large_values import dump_line_aside
from flotilla_env_gateway.ports import BackendError


class FleetTaskEnvProcess:
    """The process that runs FleetTaskEnv, with one request at a time. Any outcome but an answer
    ends the process."""

    def __init__(self, process: ChildProcess, limits: TextLimits) -> None:
        self._process = process
        self._limits = limits
        self._killed = False

    @classmethod
    async def start_process(
        cls, command: Sequence[str], environment: Mapping[str, str], limits: TextLimits
    ) -> "FleetTaskEnvProcess":
        """Start the process. Raises BackendError."""
        try:
            return cls(await ChildProcess.start(command, environment, limit=limits.bytes), limits)
        except OSError as error:
            message = f"{command[0]} cannot be started: {error}"
            raise BackendError("worker", message, delivered=False, invalid=True) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send_request(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return its answer. Raises BackendError, after which no request is
        possible."""
        await self._write_request(message)
        return await self.read_answer(timeout_s=timeout_s)

    async def read_answer(self, *, timeout_s: float) -> dict[str, Any]:
        """Read the next line of the answer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await parse_json_aside(await self._process.stdout.readuntil(), self._limits)
        except TimeoutError:
            await self.kill()
            message = f"FleetTaskEnv did not answer in {timeout_s:.1f} s and was ended"
            raise BackendError("timeout", message, delivered=None) from None
        except asyncio.IncompleteReadError:
            message = f"the process of FleetTaskEnv is gone: {await self._process.describe_end()}"
            await self.kill()
            raise _lost_error("worker", message) from None
        except (asyncio.LimitOverrunError, ValueError) as error:
            await self.kill()
            message = f"FleetTaskEnv's answer cannot be read: {error}"
            raise _lost_error("protocol", message[:500]) from error
        except asyncio.CancelledError:
            # Otherwise its answer would be taken for that of the next request.
            self._kill_process()
            raise

    async def kill(self) -> None:
        """Kill the process and its children. Idempotent."""
        self._kill_process()
        await self._process.close()

    async def _write_request(self, message: Mapping[str, Any]) -> None:
        line = await dump_line_aside(message)
        if self._killed or self._process.returncode is not None:
            raise BackendError("lost", "FleetTaskEnv was ended", delivered=False, lost=True)
        self._process.stdin.write(line)

    def _kill_process(self) -> None:
        self._killed = True
        self._process.kill()


def _lost_error(kind: str, message: str) -> BackendError:
    return BackendError(kind, message, delivered=None, lost=True)
