"""Lines between the learner and the process that writes dumps.

The process reads a `DumpSetup`, then a job per line, from its stdin. It answers each job with one
line, in order, and reports files that did not reach the store with further ones, at any time."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DumpSetup:
    """Configuration of the process."""

    run_dir: str
    # The policy's model and revision, for its tokenizer.
    model: str
    revision: str | None
    every: int
    keep: int
    # URL of the run's folder in a store, and options of its file system; None uploads nothing.
    remote: str | None = None
    remote_options: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "DumpSetup":
        return DumpSetup(**json.loads(line))


@dataclass(frozen=True, slots=True)
class StepJob:
    """A finished step, which began with policy `base_version`; `token_file` is removed once it was
    read."""

    step: int
    base_version: int
    token_file: str | None

    @property
    def name(self) -> str:
        return f"step {self.step}"

    def to_line(self) -> bytes:
        return json.dumps({"kind": "step", **asdict(self)}).encode() + b"\n"

    def discard(self) -> None:
        """Remove files that will not be read."""
        if self.token_file is not None:
            Path(self.token_file).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class EvalJob:
    """A finished evaluation of policy `version`, and the metrics that were logged of it."""

    eval_id: str
    moment: str
    version: int
    metrics: dict[str, float]

    @property
    def name(self) -> str:
        return f"evaluation {self.eval_id}"

    def to_line(self) -> bytes:
        return json.dumps({"kind": "eval", **asdict(self)}).encode() + b"\n"

    def discard(self) -> None:
        """Do nothing: it holds nothing."""


DumpJob = StepJob | EvalJob


def job_of_line(line: bytes) -> DumpJob:
    """Decode what `to_line` of a job encoded."""
    values: dict[str, Any] = json.loads(line)
    kind = values.pop("kind")
    return StepJob(**values) if kind == "step" else EvalJob(**values)


@dataclass(frozen=True, slots=True)
class DumpReport:
    """An answer of the process.

    `lost` are files that were not written, or not uploaded, with the reason. `done` is the name of
    the job that it answers; it is empty when the report is of uploads alone."""

    done: str
    size_bytes: int = 0
    lost: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Any]:
        return {"done": self.done, "bytes": self.size_bytes, "lost": dict(self.lost)}

    @staticmethod
    def from_line(line: bytes) -> "DumpReport":
        """Decode a line. Raises ValueError when it is none of ours."""
        try:
            values: dict[str, Any] = json.loads(line)
            return DumpReport(str(values["done"]), int(values["bytes"]), dict(values["lost"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a report: {line[:200]!r}") from error
