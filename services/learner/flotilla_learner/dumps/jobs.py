"""Lines between the learner and the process that writes dumps.

The process reads a `DumpSetup`, then a job per line, from its stdin. It answers each job with one
line, in order, and reports failed uploads with additional lines, at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class DumpSetup:
    """Configuration of the process."""

    run_dir: str
    # Model and revision of the policy, for its tokenizer.
    model: str
    revision: str | None
    every: int
    keep: int
    # Most bytes of pictures of one step or evaluation.
    picture_bytes: int
    # URL of the run's folder in a store, and options of its file system; None disables uploads.
    remote: str | None = None
    remote_options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepJob:
    """A finished step, which began with policy `base_version`; `token_file` is removed after
    reading."""

    step: int
    base_version: int
    token_file: str | None

    @property
    def name(self) -> str:
        return f"step {self.step}"

    def discard(self) -> None:
        """Remove its token file."""
        if self.token_file is not None:
            Path(self.token_file).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ImitationJob:
    """A finished step that imitated the sequences at `places` of the file of demonstrations `data`
    with the digest `sha256`, each cut after `longest` tokens; `token_file` is removed after
    reading."""

    step: int
    token_file: str | None
    data: str
    sha256: str
    places: tuple[int, ...]
    longest: int

    @property
    def name(self) -> str:
        return f"imitation step {self.step}"

    @property
    def base_version(self) -> int:
        return self.step - 1

    def discard(self) -> None:
        """Remove its token file."""
        if self.token_file is not None:
            Path(self.token_file).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class EvalJob:
    """A finished evaluation of policy `version`, with its logged metrics."""

    eval_id: str
    moment: str
    version: int
    metrics: dict[str, float]

    @property
    def name(self) -> str:
        return f"evaluation {self.eval_id}"

    def discard(self) -> None:
        """Do nothing: no resources are held."""


DumpJob = StepJob | ImitationJob | EvalJob


_JOB = TypeAdapter[DumpJob](DumpJob)


def job_of_line(line: bytes) -> DumpJob:
    """Decode a job. Raises ValueError."""
    return _JOB.validate_json(line)


@dataclass(frozen=True, slots=True)
class DumpReport:
    """An answer of the process.

    `lost` are files that were not written, or not uploaded, with the reason. `done` is the name of
    the job that it answers; empty in a report of uploads alone."""

    done: str
    size_bytes: int = 0
    lost: Mapping[str, str] = field(default_factory=dict[str, str])
