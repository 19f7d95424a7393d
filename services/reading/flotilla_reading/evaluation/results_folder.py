"""The folder of an evaluation: `evaluation.json` says what is evaluated and how, and each line of
`results.jsonl` is an attempt, written as it ends."""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from flotilla_common.files.durable_files import remove_cut_line, replace_file
from flotilla_common.process.own_version import own_version
from flotilla_common.text.parsing import TextLimits, parse_json
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt, EvaluationError

FORMAT = "1"
MANIFEST, RESULTS, PLOT = "evaluation.json", "results.jsonl", "scores.svg"
_LIMITS = TextLimits(bytes=2**26, values=2**22)
_TASKS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What must be equal for attempts to count together. `model` names the model, or is the
    digest of its files if they are here; `spec` is the digest of the environments' settings,
    `tasks` has that of each task by key. Temperature None is the endpoint's own."""

    model: str
    spec: str
    tasks: Mapping[str, str]
    attempts: int
    temperature: float | None
    max_turns: int


class RecordedAttempt(msgspec.Struct, frozen=True):
    """A line of the results; `attempt` counts from 1, `messages` are OpenAI's."""

    task_key: str
    env_key: str
    attempt: int
    reward: float | None
    no_grade: str = ""
    turns: int = 0
    calls: int = 0
    tool_errors: int = 0
    stopped: str = ""
    seconds: float = 0.0
    messages: list[dict[str, Any]] = []


Place = tuple[str, int]


class ResultsFolder:
    """An evaluation that is being made; `ended` has the newest attempt at each place, which is a
    task's key and a number from 1."""

    def __init__(self, file: BinaryIO, ended: dict[Place, EvaluatedAttempt]) -> None:
        self._file = file
        self.ended = ended

    def open_places(self, settings: EvaluationSettings) -> list[Place]:
        """Return the places that have no attempt with a grade, all first attempts first."""
        places = [(key, n) for n in range(1, settings.attempts + 1) for key in settings.tasks]
        return [each for each in places if self._lacks_grade(each)]

    def add(self, attempt: RecordedAttempt) -> None:
        """Write an attempt; it is on disk when this returns."""
        self._file.write(msgspec.json.encode(attempt) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.ended[attempt.task_key, attempt.attempt] = _to_evaluated(attempt)

    def _lacks_grade(self, place: Place) -> bool:
        known = self.ended.get(place)
        return known is None or known.reward is None


@contextmanager
def open_results(folder: Path, settings: EvaluationSettings) -> Generator[ResultsFolder]:
    """Begin an evaluation in a folder, or go on with one of the same settings; no other process
    can, meanwhile. Raises EvaluationError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists() and _holds_something(folder):
            raise EvaluationError(f"{folder} holds something else: choose another --out")
        with (folder / RESULTS).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EvaluationError(f"another `flotilla eval` works in {folder}") from None
            _settle(folder, settings)
            remove_cut_line(folder / RESULTS)
            yield ResultsFolder(file, _read_results(folder, settings))
    except OSError as error:
        raise EvaluationError(f"{folder}: {error.strerror}") from error


def read_results(folder: Path) -> tuple[EvaluationSettings, list[EvaluatedAttempt]]:
    """Return an evaluation's settings and its attempts. Raises EvaluationError."""
    settings = _read_settings(folder / MANIFEST)
    return settings, list(_read_results(folder, settings).values())


def _holds_something(folder: Path) -> bool:
    """Return whether a folder holds more than an evaluation leaves that is killed, or finds the
    disk full, before it is described: no results, and a draft of the description."""
    kept = [path for path in folder.iterdir() if not path.name.startswith(f".{MANIFEST}.")]
    return any(path.name != RESULTS or path.stat().st_size for path in kept)


def _settle(folder: Path, settings: EvaluationSettings) -> None:
    """Write the settings, or compare them with those that its attempts were made with."""
    path = folder / MANIFEST
    # A mistake that no attempt was made with, such as a backend that does not start, is none.
    if path.exists() and (folder / RESULTS).stat().st_size:
        if differences := _find_differences(_read_settings(path), settings):
            raise EvaluationError(
                f"{folder} holds an evaluation with other settings: {'; '.join(differences)}. Their"
                " attempts would be counted together: choose another --out"
            )
        return
    manifest = {"format": FORMAT, "written_by": own_version().to_dict(), **asdict(settings)}
    replace_file(path, (json.dumps(manifest, indent=1) + "\n").encode())


def _find_differences(known: EvaluationSettings, wanted: EvaluationSettings) -> list[str]:
    fields = ("model", "attempts", "temperature", "max_turns")
    found = [
        f"{name} {getattr(known, name)}, now {getattr(wanted, name)}"
        for name in fields
        if getattr(known, name) != getattr(wanted, name)
    ]
    if known.spec != wanted.spec:
        found.append("the spec's [env_gateway] differs")
    keys = sorted(known.tasks.keys() | wanted.tasks.keys())
    if others := [key for key in keys if known.tasks.get(key) != wanted.tasks.get(key)]:
        named = ", ".join(others[:_TASKS_SHOWN])
        found.append(f"{len(others)} tasks were added, removed or changed, such as {named}")
    return found


def _read_settings(path: Path) -> EvaluationSettings:
    try:
        manifest: Any = parse_json(path.read_bytes(), _LIMITS)
        found = manifest["format"]
        if found == FORMAT:
            return msgspec.convert(manifest, EvaluationSettings)
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror}: no evaluation is there") from error
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{path} describes no evaluation: {error}") from error
    raise EvaluationError(
        f"{path} has format {found}, and this Flotilla reads {FORMAT}: use the one that wrote it"
    )


def _read_results(folder: Path, settings: EvaluationSettings) -> dict[Place, EvaluatedAttempt]:
    """Return the last attempt of each place, without a line that is cut."""
    path, found = folder / RESULTS, dict[Place, EvaluatedAttempt]()
    if not path.exists():
        return found
    with path.open("rb") as file:
        # A line holds a conversation: one in memory at a time.
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                attempt = msgspec.json.decode(line, type=RecordedAttempt)
            except (msgspec.DecodeError, RecursionError) as error:
                raise EvaluationError(f"{path}: line {number}: {error}") from error
            place = (attempt.task_key, attempt.attempt)
            if place[0] not in settings.tasks or not 1 <= place[1] <= settings.attempts:
                raise EvaluationError(
                    f"{path}: line {number}: attempt {place[1]} at {place[0]!r} is none of this"
                    " evaluation, whose other results would be counted with it: remove the line"
                )
            found[place] = _to_evaluated(attempt)
    return found


def _to_evaluated(attempt: RecordedAttempt) -> EvaluatedAttempt:
    return EvaluatedAttempt(
        attempt.task_key,
        attempt.env_key,
        attempt.reward,
        attempt.no_grade,
        attempt.turns,
        attempt.calls,
        attempt.tool_errors,
    )
