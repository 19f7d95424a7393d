"""One training rank as a child process, reached by frames over its stdin and stdout."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.process.line_channel import LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.pending_calls import Answer, PendingCalls, failed_answer

RANK = "flotilla_learner.rank"
_CLOSE_SECONDS = 10.0
# Used by transformers to fetch further files of a model from the hub.
_HUB_TOKEN = "HF_TOKEN"


def rank_environment(config: RankConfig) -> dict[str, str]:
    """Return the environment that every rank is started with."""
    threads = str(config.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


class RankProcess:
    """A rank in a child process. Implements `ranks.pending_calls.RankHandle`.

    Output of the rank and its libraries goes to `log_path`, whose end RankErrors carry."""

    def __init__(self, child: LineChannel) -> None:
        self._child = child
        self._calls = PendingCalls()
        self._reader = asyncio.create_task(self._read_answers())

    @staticmethod
    async def spawn_rank(
        name: str, log_path: Path, environment: Mapping[str, str], module: str = RANK
    ) -> "RankProcess":
        """Start a rank, or another `module` with the same protocol; messages call it `name`."""
        child = await LineChannel.start_child(
            name, python_command("-m", module), log_path, _HUB_TOKEN, more=environment
        )
        return RankProcess(child)

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return self._child.exit_code is not None

    def send_command(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        """Send a command at once; the answer, or RankError, comes later."""
        if lost := self._child.lost:
            return failed_answer(lost)
        call, answer = self._calls.begin_call(command)
        self._write_frame({"id": call, "command": command, "arguments": arguments})
        return answer

    def kill(self) -> None:
        """Kill it at once; `close` must still be called."""
        self._child.kill()

    async def close(self) -> None:
        """End it cleanly, or by force if it does not respond. May be called again, also
        concurrently."""
        if not self.has_ended:
            self._write_frame({"command": "close"})
        await self._child.close(_CLOSE_SECONDS)
        await asyncio.shield(self._reader)

    async def _read_answers(self) -> None:
        """Complete calls as answers arrive, and fail all when the process ends."""
        stdout = self._child.stdout
        try:
            while True:
                header = await stdout.readexactly(protocol.HEADER.size)
                body = await stdout.readexactly(protocol.frame_length(header))
                self._handle_answer(protocol.decode_body(body))
        except (asyncio.IncompleteReadError, protocol.ChannelError) as error:
            if isinstance(error, protocol.ChannelError):
                self.kill()
            self._calls.fail_all(await self._child.wait_until_lost())

    def _handle_answer(self, message: protocol.Message) -> None:
        call = message["id"]
        if "error" in message:
            command = self._calls.command_of(call)
            self._calls.fail_call(
                call, f"{command}: {message['error']}\n{self._child.describe_log_end()}"
            )
        else:
            self._calls.complete_call(call, message["result"])

    def _write_frame(self, message: Mapping[str, Any]) -> None:
        """Write a frame: frames are small, and a broken pipe shows as the end of the answers."""
        self._child.stdin.write(protocol.encode_frame(message))
