"""The launcher's copy of the log of a replica on another machine: every byte once.

A watcher pushes what its replica wrote, from positions of its own, and repeats itself when
an answer was lost. The log itself records how far that has come: a segment of it belongs to
one incarnation of the watcher, so that its length says what is known of it, and a killed
launcher's successor knows as much as the log holds. Only the starts of the segments are
written to a file beside it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_CHUNK_BYTES = 256 * 1024


class LogGapError(Exception):
    """The part before this piece is missing; `position` is where to go on."""

    def __init__(self, position: int) -> None:
        super().__init__(f"go on from position {position}")
        self.position = position


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Segment of the log: from `offset` on it is what `incarnation` wrote from its
    `position` on.

    `pad` line ends come first, if the segment before stopped in the middle of a line."""

    incarnation: str
    position: int
    offset: int
    pad: int = 0

    def position_at(self, end: int) -> int:
        """Return the position of its incarnation when the log has length `end`."""
        return self.position + max(0, end - self.offset - self.pad)


class LogSpool:
    """Log of one replica. Nobody else writes to it while it is pushed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._index = log.with_suffix(".stretches.json")
        self._stretches = _read_segments(self._index)

    def append_chunk(self, incarnation: str, position: int, chunk: bytes) -> int:
        """Append the new part of a piece; return the position where its incarnation goes on.
        Raises LogGapError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as file:
            size = file.seek(0, os.SEEK_END)
            known = self._known_position(incarnation, size)
            if position > known:
                raise LogGapError(known)
            news = chunk[known - position :]
            if news:
                pad = self._begin_segment(incarnation, known, size)
                file.write(b"\n" * pad + news)
        return known + len(news)

    def _known_position(self, incarnation: str, size: int) -> int:
        """Return the position that an incarnation has reached. Its newest segment ends where
        the next one begins."""
        end = size
        for stretch in reversed(self._stretches):
            if stretch.incarnation == incarnation:
                return stretch.position_at(end)
            end = stretch.offset
        return 0

    def _begin_segment(self, incarnation: str, position: int, size: int) -> int:
        """Ensure that the log's last segment belongs to this incarnation; return the number
        of line ends that it lacks."""
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.incarnation != incarnation or size < last.offset:
            pad = 0 if _ends_a_line(self._log, size) else 1
            last = LogSegment(incarnation, position, size, pad)
            self._stretches.append(last)
            _write_segments(self._index, self._stretches)
        return max(0, last.offset + last.pad - size)


def _ends_a_line(log: Path, size: int) -> bool:
    if size == 0:
        return True
    with log.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _read_segments(path: Path) -> list[LogSegment]:
    if not path.exists():
        return []
    return [LogSegment(**found) for found in json.loads(path.read_text(encoding="utf-8"))]


def _write_segments(path: Path, stretches: list[LogSegment]) -> None:
    """Write the index atomically: a launcher may be killed at any moment."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(stretch) for stretch in stretches]), encoding="utf-8")
    draft.replace(path)
