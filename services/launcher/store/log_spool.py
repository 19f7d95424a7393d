"""The log of a replica on another machine, as the launcher keeps it: every byte once.

A watcher pushes what its replica wrote, from positions of its own, and repeats itself when an
answer was lost. The log itself is the memory of how far that has come: a stretch of it belongs to
one incarnation of the watcher, so that its length says what is known of it, and a killed launcher's
successor knows as much as the log holds. Only where stretches begin is written beside it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_CHUNK_BYTES = 256 * 1024


class GapError(Exception):
    """What comes before this piece is missing; `position` is where to go on."""

    def __init__(self, position: int) -> None:
        super().__init__(f"go on from position {position}")
        self.position = position


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `offset` on the log is what `incarnation` wrote from its `position` on.

    `pad` line ends come first, where the stretch before was left in the middle of a line.
    """

    incarnation: str
    position: int
    offset: int
    pad: int = 0

    def position_at(self, end: int) -> int:
        """How far its incarnation has come where the log is that long."""
        return self.position + max(0, end - self.offset - self.pad)


class Spool:
    """One replica's log. Nobody else writes to it while it is pushed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._index = log.with_suffix(".stretches.json")
        self._stretches = _read(self._index)

    def append(self, incarnation: str, position: int, chunk: bytes) -> int:
        """Add what is new of a piece; returns where its incarnation goes on. Raises GapError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as file:
            size = file.seek(0, os.SEEK_END)
            known = self._known(incarnation, size)
            if position > known:
                raise GapError(known)
            news = chunk[known - position :]
            if news:
                pad = self._begin(incarnation, known, size)
                file.write(b"\n" * pad + news)
        return known + len(news)

    def _known(self, incarnation: str, size: int) -> int:
        """How far it has come. Its newest stretch ends where the next one begins."""
        end = size
        for stretch in reversed(self._stretches):
            if stretch.incarnation == incarnation:
                return stretch.position_at(end)
            end = stretch.offset
        return 0

    def _begin(self, incarnation: str, position: int, size: int) -> int:
        """Have the log's last stretch be of this incarnation; returns the line ends it lacks."""
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.incarnation != incarnation or size < last.offset:
            pad = 0 if _ends_a_line(self._log, size) else 1
            last = Stretch(incarnation, position, size, pad)
            self._stretches.append(last)
            _write(self._index, self._stretches)
        return max(0, last.offset + last.pad - size)


def _ends_a_line(log: Path, size: int) -> bool:
    if size == 0:
        return True
    with log.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _read(path: Path) -> list[Stretch]:
    if not path.exists():
        return []
    return [Stretch(**found) for found in json.loads(path.read_text(encoding="utf-8"))]


def _write(path: Path, stretches: list[Stretch]) -> None:
    """Whole or not at all: a launcher may be killed at any moment."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(stretch) for stretch in stretches]), encoding="utf-8")
    draft.replace(path)
