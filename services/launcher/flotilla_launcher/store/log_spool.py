"""The launcher's copy of the log of a replica on another machine: every byte once.

A watcher pushes its replica's output with its own positions, and repeats a push whose reply
was lost. The log itself records the progress: each segment belongs to one incarnation of the
watcher, and its length is the position reached. A killed launcher's successor therefore
continues from the log. Only the starts of the segments are stored, in an index file beside
it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from flotilla_common.files.durable_files import replace_file
from flotilla_launcher.store.logs import ends_with_newline

MAX_CHUNK_BYTES = 256 * 1024


class LogGapError(Exception):
    """The bytes before this chunk are missing; resume at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"bytes before this chunk are missing: resume at position {position}")
        self.position = position


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Segment of the log: from `offset` on, it holds the output of `incarnation` from its
    `position` on.

    It begins with `pad` newlines if the segment before it stopped within a line."""

    incarnation: str
    position: int
    offset: int
    pad: int = 0

    def position_at(self, end: int) -> int:
        """Return the position of its incarnation when the log has length `end`."""
        return self.position + max(0, end - self.offset - self.pad)


class LogSpool:
    """Log of one replica. It has no other writer while it is pushed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._index = log.with_suffix(".stretches.json")
        self._segments = _read_segments(self._index)

    def append_chunk(self, incarnation: str, position: int, chunk: bytes) -> int:
        """Append the new bytes of a chunk; return its incarnation's next position. Raises
        LogGapError."""
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
        """Return the position that an incarnation has reached, from its newest segment."""
        end = size
        for segment in reversed(self._segments):
            if segment.incarnation == incarnation:
                return segment.position_at(end)
            end = segment.offset
        return 0

    def _begin_segment(self, incarnation: str, position: int, size: int) -> int:
        """Ensure that the log's last segment belongs to this incarnation; return the number
        of newlines still to write."""
        last = self._segments[-1] if self._segments else None
        if last is None or last.incarnation != incarnation or size < last.offset:
            pad = 0 if size == 0 or ends_with_newline(self._log, size) else 1
            last = LogSegment(incarnation, position, size, pad)
            self._segments.append(last)
            text = json.dumps([asdict(segment) for segment in self._segments])
            replace_file(self._index, text.encode())
        return max(0, last.offset + last.pad - size)


def _read_segments(path: Path) -> list[LogSegment]:
    if not path.exists():
        return []
    return [LogSegment(**found) for found in json.loads(path.read_text(encoding="utf-8"))]
