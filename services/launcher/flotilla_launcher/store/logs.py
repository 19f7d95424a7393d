"""Reader of a run's log files: their last lines, and lines from a position on."""

from dataclasses import dataclass
from pathlib import Path

from flotilla_common.text.redaction import redact

# Longest log line; longer ones are split.
LINE_BYTES = 16 * 1024
_BLOCK = 64 * 1024
_TAIL_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log; `end` is the position after it."""

    source: str
    text: str
    end: int


def list_sources(run_dir: Path, service: str = "") -> dict[str, Path]:
    """Return the logs of a run, or of one service and its children: `learner-0`,
    `learner-rank-0`."""
    found = sorted((run_dir / "logs").glob("*.log"))
    logs = {path.stem: path for path in found}
    if not service:
        return logs
    return {name: path for name, path in logs.items() if name.startswith(f"{service}-")}


def read_last_lines(path: Path, count: int = 15) -> str:
    """Return the last lines of a log for an error message, at most 4,000 characters.
    Secrets are redacted: messages travel further than logs."""
    if not path.exists():
        return ""
    lines = read_lines(path, find_tail_position(path, count), 10 * _BLOCK)
    # Redact before the cut: it could leave half of a secret.
    return redact("\n".join(line.text for line in lines))[-_TAIL_CHARACTERS:]


def find_tail_position(path: Path, count: int) -> int:
    """Return the position where the last `count` lines begin."""
    if count <= 0:
        return path.stat().st_size
    with path.open("rb") as file:
        position = file.seek(0, 2)
        # A newline at the very end closes the last line; it does not begin another.
        wanted = count + 1 if ends_with_newline(path, position) else count
        while position > 0:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            breaks = block.count(b"\n")
            if breaks >= wanted:
                return position + _nth_last_newline(block, wanted) + 1
            wanted -= breaks
    return 0


def ends_with_newline(path: Path, size: int) -> bool:
    """Return whether the byte before position `size` is a newline."""
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        return file.read(1) == b"\n"


def _nth_last_newline(block: bytes, count: int) -> int:
    position = len(block)
    for _ in range(count):
        position = block.rindex(b"\n", 0, position)
    return position


def read_lines(
    path: Path, position: int, limit: int = _BLOCK, *, final: bool = True
) -> list[LogLine]:
    """Return the lines from `position` on, about `limit` bytes of them.

    An unfinished last line is returned only if `final`: no more output will come."""
    lines: list[LogLine] = []
    # Followers poll several times a second, mostly without news.
    if path.stat().st_size <= position:
        return lines
    with path.open("rb") as file:
        file.seek(position)
        while limit > 0:
            raw = file.readline(LINE_BYTES)
            whole = raw.endswith(b"\n") or len(raw) == LINE_BYTES
            if not raw or not (whole or final):
                break
            position += len(raw)
            limit -= len(raw)
            text = raw.rstrip(b"\r\n").decode(errors="replace")
            lines.append(LogLine(path.stem, text, position))
    return lines
