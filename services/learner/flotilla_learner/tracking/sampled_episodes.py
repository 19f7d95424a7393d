"""Sampled episodes of a step's dump, for a tracker's table. Reads a bounded part of the file."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from flotilla_common.run_folder.dump_files import rollouts_path

ROWS = 8
# Most characters of each text; a longer one keeps its end, where an episode is decided.
TEXT_CHARACTERS = 4000
# A longer line is left out, because parsing it would block other threads.
_LINE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SampledEpisode:
    """One row of the table. `reward` is None without a grade, `advantage` if the trainer
    computed none."""

    step: int
    group: str
    attempt: str
    prompt: str
    answer: str
    reward: float | None
    stop_reason: str
    advantage: float | None


class EpisodeSchedule:
    """Chooses the steps of a run whose episodes are shown: every `every`-th, 0 for none.

    Another process writes a step's dump after the step was logged. So a step is due from then on
    until its file exists, or until the next one is due."""

    def __init__(self, run_dir: Path, every: int) -> None:
        self._run_dir = run_dir
        self._every = every
        self._shown = 0
        self._newest = 0

    def begin_after(self, step: int) -> None:
        """Skip the steps that earlier starts showed, up to this one."""
        self._shown = self._newest = step

    def take_due(self, step: int = 0) -> list[SampledEpisode]:
        """Return the episodes of the step that is due once `step` was logged, each step once;
        none while its dump is missing. Raises OSError and ValueError for a dump that cannot be
        read."""
        self._newest = max(self._newest, step)
        due = self._newest - self._newest % self._every if self._every else 0
        path = rollouts_path(self._run_dir, due)
        if due <= self._shown or not path.exists():
            return []
        # Set before reading, so that a damaged file fails once.
        self._shown = due
        return sample_episodes(path)


def sample_episodes(path: Path) -> list[SampledEpisode]:
    """Read up to `ROWS` episodes, from places spread evenly over a step's dump.

    Raises OSError, and ValueError for a line that is not an episode."""
    with path.open("rb") as file:
        return [_parse_episode(line) for line in _spread_lines(file)]


def _spread_lines(file: BinaryIO) -> Iterator[bytes]:
    size = file.seek(0, os.SEEK_END)
    start = -1
    for part in range(ROWS):
        place = size * part // ROWS
        # The line that begins at or after the place, and after the previous one.
        file.seek(max(place - 1, 0))
        if place:
            file.readline()
        if file.tell() <= start:
            continue
        start = file.tell()
        line = file.readline(_LINE_BYTES)
        if line.endswith(b"\n"):
            yield line


def _parse_episode(line: bytes) -> SampledEpisode:
    row: dict[str, Any] = json.loads(line)
    try:
        return SampledEpisode(
            step=row["step"],
            group=row["group_id"],
            attempt=f"{row['attempt_index']}/{row['attempt_try']}",
            prompt=_cut_text(row["input_prompt"]),
            answer=_cut_text(row["output_response"]),
            reward=row["reward"],
            stop_reason=row["stop_reason"],
            advantage=_mean_advantage(row["sequences"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an episode: {error!r} in {line[:100]!r}") from error


def _mean_advantage(sequences: list[dict[str, Any]]) -> float | None:
    known = [value for s in sequences for value in s["advantages"] or () if value is not None]
    return fmean(known) if known else None


def _cut_text(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else f"[...] {text[-TEXT_CHARACTERS:]}"
