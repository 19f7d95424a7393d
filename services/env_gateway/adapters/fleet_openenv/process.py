"""The worker process of one FleetTaskEnv, which a deadline kills: it swallows cancellation."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from services.common.large_values import dump_json_aside
from services.common.parsing import Limits, parse_json_aside
from services.env_gateway.adapters.supervised_server import LastWords, spawn
from services.env_gateway.ports import BackendError


class WorkerProcess:
    """One request at a time. After anything but an answer the process is gone."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._limits = limits
        self._killed = False
        self._words = LastWords(process)

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], limits: Limits
    ) -> "WorkerProcess":
        """Raises BackendError."""
        try:
            return cls(await spawn(command, environment, limit=limits.bytes), limits)
        except OSError as error:
            message = f"{command[0]} cannot be started: {error}"
            raise BackendError("worker", message, delivered=False, invalid=True) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Raises BackendError; nothing can be asked after that."""
        await self._send(message)
        return await self.read(timeout_s=timeout_s)

    async def read(self, *, timeout_s: float) -> dict[str, Any]:
        """The next line of the answer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await parse_json_aside(await self._stdout.readuntil(), self._limits)
        except TimeoutError:
            await self.kill()
            message = f"FleetTaskEnv did not answer in {timeout_s:.1f} s and was ended"
            raise BackendError("timeout", message, delivered=None) from None
        except asyncio.IncompleteReadError:
            message = f"the process of FleetTaskEnv is gone: {await self._words.told()}"
            await self.kill()
            raise _lost("worker", message) from None
        except (asyncio.LimitOverrunError, ValueError) as error:
            await self.kill()
            message = f"FleetTaskEnv's answer cannot be read: {error}"
            raise _lost("protocol", message[:500]) from error
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next request.
            self._kill()
            raise

    async def kill(self) -> None:
        """And whatever it started. Repeatable."""
        self._kill()
        await self._process.wait()
        await self._words.close()

    async def _send(self, message: Mapping[str, Any]) -> None:
        line = await dump_json_aside(message) + b"\n"
        if self._killed or self._process.returncode is not None:
            raise BackendError("lost", "FleetTaskEnv was ended", delivered=False, lost=True)
        self._stdin.write(line)

    def _kill(self) -> None:
        self._killed = True
        self._stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _lost(kind: str, message: str) -> BackendError:
    return BackendError(kind, message, delivered=None, lost=True)
