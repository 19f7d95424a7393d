"""Uploader of a replica's logs from its machine to the launcher, every byte in order.

The log is a local file first, so that nothing waits for the launcher. Logs that an earlier watcher
of this machine could not push go first, under its incarnation."""

import asyncio
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.telemetry import log
from flotilla_launcher.agent.ports import LauncherAwayError, LauncherLink
from flotilla_launcher.agent_protocol import is_side_log
from flotilla_launcher.state import ReplicaKey

# The launcher takes pieces of at most 256 KiB.
CHUNK_BYTES = 256 * 1024
_LOOK_S = 0.5
_AWAY_S = 1.0
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SideLogs:
    """Logs that a service keeps in `folder` beside its own on this machine, as a learner does
    for its ranks.

    They are only ever appended to, also across watchers: each is an incarnation of its own."""

    folder: Path
    key: ReplicaKey
    node: int = 0

    def list_logs(self) -> list[tuple[Path, str]]:
        """List the logs, each with its incarnation, which is unique across machines."""
        there = sorted(self.folder.glob(f"{self.key[0]}-*.log"))
        found = [path for path in there if is_side_log(self.key, self.node, path.stem)]
        return [(path, f"{socket.gethostname()}-{path.stat().st_ino:x}") for path in found]


class LogUploader:
    """Uploader of one replica's logs in `folder`, one file for each incarnation of its watcher."""

    def __init__(
        self, launcher: LauncherLink, folder: Path, label: str, incarnation: str, beside: SideLogs
    ) -> None:
        self._launcher = launcher
        self._beside = beside
        self._label = label
        self._folder = folder
        self.log = folder / f"{label}.{incarnation}.log"
        # Uploaded bytes of each log, by incarnation.
        self._positions: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    async def upload_logs(self) -> None:
        """Push until cancelled."""
        while True:
            try:
                moved = await self._push_leftovers() or await self._push_all(final=False)
            except LauncherAwayError as error:
                _log.debug("the log cannot be pushed", why=str(error))
                await asyncio.sleep(_AWAY_S)
                continue
            if not moved:
                await asyncio.sleep(_LOOK_S)

    async def flush(self, limit_s: float) -> bool:
        """Push the rest, an unfinished last line too, once `upload_logs` has ended. Return
        False if that took too long."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    while await self._push_leftovers() or await self._push_all(final=True):
                        continue
            except (LauncherAwayError, TimeoutError) as error:
                _log.debug("the log cannot be pushed", why=repr(error))
                await asyncio.sleep(min(_AWAY_S, max(0.0, deadline - time.monotonic())))
                continue
            self.log.unlink(missing_ok=True)
            return True
        return False

    async def _push_leftovers(self) -> bool:
        """Push a log that an earlier incarnation left; return True while there may be more."""
        left = set(self._folder.glob(f"{self._label}.*.log")) - {self.log}
        if not left:
            return False
        oldest = min(left, key=lambda path: path.stat().st_mtime)
        while await self._push_own_piece(oldest, final=True):
            continue
        oldest.unlink()
        return True

    async def _push_all(self, *, final: bool) -> bool:
        """Push a piece of each log; return False if none has more (yet)."""
        moved = await self._push_own_piece(self.log, final=final)
        for path, incarnation in await asyncio.to_thread(self._beside.list_logs):
            moved |= await self._push_piece(path, incarnation, path.stem, final=final)
        return moved

    async def _push_own_piece(self, path: Path, *, final: bool) -> bool:
        incarnation = path.name.removesuffix(".log").rpartition(".")[2]
        return await self._push_piece(path, incarnation, "", final=final)

    async def _push_piece(self, path: Path, incarnation: str, beside: str, *, final: bool) -> bool:
        """Push one piece; return False if there is none (yet)."""
        position = self._positions.get(incarnation, 0)
        chunk = await asyncio.to_thread(read_piece, path, position, final=final)
        if chunk:
            push = self._launcher.push_log(incarnation, position, chunk, beside)
            self._positions[incarnation] = await push
        return bool(chunk)


def read_piece(path: Path, position: int, *, final: bool) -> bytes:
    """Return whole lines from `position` on. An unfinished line is returned only when `final`,
    or when it is too long."""
    if not path.exists() or path.stat().st_size <= position:
        return b""
    with path.open("rb") as file:
        file.seek(position)
        piece = file.read(CHUNK_BYTES)
    whole = piece.rfind(b"\n") + 1
    if whole:
        return piece[:whole]
    return piece if final or len(piece) == CHUNK_BYTES else b""
