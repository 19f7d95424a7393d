"""A recorded run, read from its folder."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.replay import record_format as form
from flotilla_env_gateway.adapters.replay.record_format import Fields
from flotilla_env_gateway.ports import ProvisionRequest

_LOG = get_logger(__name__)
_KEY = "env_gateway.backends.replay.run"
_UNENDED = "the gateway that recorded it ended before the episode did"


class MissError(Exception):
    """The recorded run does not hold what is asked for; the message says what."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answered, or told of itself. `seq` and `parallel` are those of a call."""

    op: str
    key: str
    result: Any
    seq: int | None = None
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode: how it opened, and its steps in order. `cut` says why there are no more, if it
    had not ended."""

    episode_id: str
    opening: Fields
    steps: Sequence[Step]
    cut: str = ""


class RecordedRun:
    """The recording of one run. Episodes are read when they are needed."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError if there is none."""
        self._folder = folder = run_dir / form.FOLDER
        try:
            known = (folder / form.FORMAT_FILE).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{_KEY}: {folder / form.FORMAT_FILE}: {error.strerror}; name the directory of a"
                " run that was recorded (env_gateway.record = true), such as runs/RUN_ID"
            ) from error
        if known != form.FORMAT:
            raise ConfigError(
                f"{_KEY}: {folder} was not written by this version; record the run again"
            )
        # By the task; keys of tasks that differ in something else are for the message only.
        self._headers: dict[str, list[Fields]] = {}
        self._task_keys: set[str] = set()
        for header in self._read_headers():
            self._headers.setdefault(form.as_key(header["task"]), []).append(header)
            self._task_keys.add(header["task"]["key"])

    def read_episodes(self, request: ProvisionRequest) -> list[RecordedEpisode]:
        """Return the episodes of a task, those of the same attempt first. Raises MissError."""
        task = form.identify_task(request.task)
        headers = self._headers.get(form.as_key(task), [])

        def distance(header: Fields) -> tuple[Any, ...]:
            return (
                header["group_id"] != request.group_id,
                header["attempt_index"] != request.attempt_index,
                header["try_index"] != request.try_index,
                header["at"],
                header["episode_id"],
            )

        read = [self._read_episode(header) for header in sorted(headers, key=distance)]
        if found := [episode for episode in read if episode is not None]:
            return found
        other = task["key"] in self._task_keys
        why = "whose environment, version, data or variables are these" if other else ""
        raise MissError(f"the recorded run opened no episode of task {task['key']!r} {why}".strip())

    def get_part(self, name: str) -> bytes:
        """Return a part by its hash. Raises MissError if it is not there as it was."""
        try:
            data = (self._folder / form.PARTS / name).read_bytes()
        except OSError as error:
            raise MissError(f"the recording lacks part {name}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != name:
            raise MissError(f"part {name} of the recording is damaged")
        return data

    def _read_headers(self) -> Iterator[Fields]:
        for path in sorted((self._folder / form.EPISODES).glob("*.jsonl")):
            with path.open("rb") as file:
                header = _parse_line(file.readline())
            if header is None:
                _LOG.warning("recorded_episode_unreadable", path=str(path))
            else:
                yield header

    def _read_episode(self, header: Fields) -> RecordedEpisode | None:
        """Return an episode; None if it had not opened."""
        name = header["episode_id"]
        opening: Fields | None = None
        steps: list[Step] = []
        cut = _UNENDED
        for text in (self._folder / form.EPISODES / f"{name}.jsonl").read_bytes().split(b"\n")[1:]:
            if (line := _parse_line(text)) is None:
                break
            if line["op"] in (form.END, form.CUT):
                cut = line.get("why", "")
                break
            if line["op"] in (form.OPENED, form.UNOPENED):
                opening = line
            else:
                steps.append(_make_step(line))
        return RecordedEpisode(name, opening, steps, cut) if opening else None


def _parse_line(text: bytes) -> Fields | None:
    """Return a line, or None for what remains of one that was not written to its end."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _make_step(line: Fields) -> Step:
    key = form.as_key(line.get("key"))
    return Step(line["op"], key, line["result"], line.get("seq"), line.get("parallel", False))
