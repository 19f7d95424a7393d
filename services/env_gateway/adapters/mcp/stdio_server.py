"""One MCP server over standard input and output, with its pending requests."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from services.common.large_values import dump_line_aside
from services.common.parsing import ParseError, TextLimits, TooLargeError, parse_json_aside
from services.env_gateway.adapters.http_client import DEFAULT_LIMITS
from services.env_gateway.adapters.mcp.requests import McpRequests
from services.env_gateway.adapters.mcp.wire import parse_result
from services.env_gateway.adapters.supervised_server import StderrTail, end_process_group
from services.env_gateway.ports import BackendError

_ENDED_S = 2.0


class StdioServer(McpRequests):
    """One server process and its pending requests. Answers are matched by id."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: TextLimits = DEFAULT_LIMITS
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self.ended = ""
        self._limits = limits
        self._words = StderrTail(process)
        self._reading = asyncio.create_task(self._read_messages())

    async def send_request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """Send a request and return its result. Raises BackendError; the server is notified if the
        answer is no longer awaited."""
        self._require_running()
        self._next_id += 1
        number = self._next_id
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_message(message)
                return parse_result(await answer, method)
        except TimeoutError:
            await self._cancel_request(number)
            message = f"no answer to {method} within {timeout_s:.1f} s"
            raise BackendError("timeout", message, delivered=None) from None
        finally:
            self._waiting.pop(number, None)

    async def send_notification(self, message: Mapping[str, Any]) -> None:
        self._require_running()
        await self._write_message(message)

    async def close(self) -> None:
        self._reading.cancel()
        # The process must end in any case.
        await asyncio.wait({self._reading})
        await end_process_group(self.process)
        await self._words.close()

    def _require_running(self) -> None:
        if self.ended:
            raise _lost_error(self.ended, delivered=False)

    async def _write_message(self, message: Mapping[str, Any]) -> None:
        try:
            self._stdin.write(await dump_line_aside(message))
            await self._stdin.drain()
        except ConnectionError as error:
            # The reader of its output will know in a moment how it ended.
            await asyncio.wait({self._reading}, timeout=_ENDED_S)
            raise _lost_error(self.ended or str(error), delivered=None) from error

    async def _cancel_request(self, number: int) -> None:
        params = {"requestId": number, "reason": "timeout"}
        # A server that does not even read is not awaited.
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(0.1):
                await self._write_message(
                    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
                )

    async def _read_messages(self) -> None:
        why = "its output is read no more"
        try:
            while line := await self._stdout.readline():
                await self._deliver_response(line)
            why = await self._words.describe_end()
        except TooLargeError as error:
            why = f"it wrote a line that is too large: {error} (max_answer_values)"
        except ValueError:
            why = f"it wrote a line of more than {self._limits.bytes} bytes (max_answer_bytes)"
        finally:
            self.ended = why
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_lost_error(why, delivered=None))

    async def _deliver_response(self, line: bytes) -> None:
        """Deliver a response to its request; other messages of the server are ignored. Raises
        TooLargeError, because the request of such an answer is unknown."""
        try:
            message = await parse_json_aside(line, self._limits)
        except TooLargeError:
            raise
        except ParseError:
            return
        if not isinstance(message, dict) or "method" in message:
            return
        number = message.get("id")
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)


def _lost_error(why: str, *, delivered: bool | None) -> BackendError:
    return BackendError("lost", f"the MCP server is gone: {why}", delivered=delivered, lost=True)
