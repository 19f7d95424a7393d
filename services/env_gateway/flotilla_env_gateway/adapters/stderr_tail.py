"""The standard error of a command: passed on within bounds, its end kept."""

import asyncio
import re
import sys
import time
from contextlib import suppress

from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.printable_text import print_visible
from flotilla_common.text.redaction import redact

_LOG = get_logger(__name__)
_PIECE_BYTES = 2**16
# Bytes kept of it, characters shown of them, and seconds to wait for them.
_KEPT_BYTES, _SHOWN_CHARS, _END_S = 2**14, 600, 1.0
# What a command may write in each period. Beyond that it is read more slowly, and dropped.
PASSED_BYTES, PERIOD_S = 2**18, 60.0
_PAUSE_S = 0.01
# Node ends its report of an error with its own version.
_NODE_END, _ERROR = re.compile(r"Node\.js v[\d.]+"), re.compile(r"\w*Error\b")


class OutputAllowance:
    """What may be passed on of an output in each period, and how much was dropped."""

    def __init__(self, passed_bytes: int = PASSED_BYTES, period_s: float = PERIOD_S) -> None:
        self._passed_bytes = passed_bytes
        self._period_s = period_s
        self._left = 0
        self._until = float("-inf")
        self._dropped = 0

    def admits(self, size: int, now: float) -> bool:
        """Return True if so many bytes may be passed on; otherwise they count as dropped, and so do
        all others of this period."""
        if now >= self._until:
            self._left, self._until = self._passed_bytes, now + self._period_s
        if size > self._left:
            self._left = 0
            self._dropped += size
            return False
        self._left -= size
        return True

    def take_dropped(self) -> int:
        """Return the bytes dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped


class StderrTail:
    """The end of a command's standard error, kept while it is passed on to our own: only there is
    the reason why the command ended. Of a flood, only the beginning of each minute is passed on."""

    def __init__(self, process: asyncio.subprocess.Process, command: str) -> None:
        assert process.stderr is not None
        self._process = process
        self._stderr = process.stderr
        self._command = command
        self._kept = b""
        self._cut = False
        self._allowance = OutputAllowance()
        self._reading = asyncio.create_task(self._read_stderr())

    async def describe_end(self) -> str:
        """Describe how the command ended, with the last line that it wrote, or the error above."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
                await asyncio.shield(self._reading)
        code = self._process.returncode
        ended = "it closed its output" if code is None else f"it ended with code {code}"
        line = self._find_last_line()
        return f"{ended} and wrote: {line}" if line else ended

    async def close(self) -> None:
        """Stop reading, at the end of the output if that is near."""
        await asyncio.wait({self._reading}, timeout=_END_S)
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._report_dropped()

    def _find_last_line(self) -> str:
        lines = redact(self._kept.decode("utf-8", "replace")).splitlines() or [""]
        if self._cut:
            # The first line may begin within a secret.
            lines = lines[1:] or [lines[0][-_SHOWN_CHARS:]]
        written = [line.strip()[:_SHOWN_CHARS] for line in reversed(lines) if line.strip()]
        errors = filter(_ERROR.match, written) if written and _NODE_END.match(written[0]) else ()
        return next(iter([*errors, *written]), "")

    async def _read_stderr(self) -> None:
        begun = b""
        while piece := await self._stderr.read(_PIECE_BYTES):
            self._cut = self._cut or len(self._kept) + len(piece) > _KEPT_BYTES
            self._kept = (self._kept + piece)[-_KEPT_BYTES:]
            # By lines, because a piece could end in the middle of a secret.
            lines, newline, begun = (begun + piece).rpartition(b"\n")
            if len(begun) > _PIECE_BYTES:
                lines, newline, begun = lines + newline + begun, b"", b""
            # The next piece may be there already, and would be read without a turn of the loop.
            await asyncio.sleep(0 if self._pass_on(lines + newline) else _PAUSE_S)
        self._pass_on(begun)

    def _pass_on(self, output: bytes) -> bool:
        """Pass on whole lines; return False if they were dropped."""
        if not output:
            return True
        if not self._allowance.admits(len(output), time.monotonic()):
            return False
        self._report_dropped()
        print_visible(redact(output.decode("utf-8", "replace")), end="", file=sys.stderr)
        return True

    def _report_dropped(self) -> None:
        if dropped := self._allowance.take_dropped():
            _LOG.warning("stderr_dropped", command=self._command, bytes=dropped)
