"""Report of a disagreement between engine and trainer: an error and a file."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.guard.diagnosis import Diagnosis
from flotilla_learner.guard.mismatch_limits import Excess, MismatchBound
from flotilla_learner.types import Comparison

REPORT_FILE = "mismatch_report.json"


class MismatchError(ConfigError):
    """Engine and trainer disagree: training would continue on tokens that no policy sampled.

    A restart would find the same, so it is an error of the configuration.
    """


@dataclass(frozen=True, slots=True)
class MismatchFinding:
    """A disagreement and everything known about it."""

    moment: Literal["start", "run"]
    # Source of the figures: `canary`, `probes` or `samples`.
    source: str
    version: int
    excesses: tuple[Excess, ...]
    comparison: Comparison
    diagnosis: Diagnosis
    # Mean error of each worker's sequences, the worst first.
    workers: tuple[tuple[str, float], ...]
    dtype: str
    bound: MismatchBound

    def format_message(self, path: Path) -> str:
        """Format one sentence each for the problem, its size, its cause and the fix."""
        begin = "the run does not start" if self.moment == "start" else "the run is stopped"
        over = "; ".join(str(excess) for excess in self.excesses) or "the canary is over its bound"
        worst = f" Worst: {self.workers[0][0]}." if self.workers else ""
        return (
            f"engine and trainer disagree, {begin}: of the {self.source}, {over} for"
            f" {self.dtype}.{worst} Cause: {self.diagnosis.sentence}. Fix: {self.diagnosis.fix}."
            f" Details: {path}"
        )


def write_report(
    run_dir: Path, finding: MismatchFinding, history: Sequence[dict[str, Any]] = ()
) -> MismatchError:
    """Write `mismatch_report.json` in the run's folder; return the error to end with."""
    path = run_dir / REPORT_FILE
    error = MismatchError(finding.format_message(path))
    text = json.dumps(
        _to_finite_json({"message": str(error), **asdict(finding), "history": list(history)}),
        indent=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return error


def _to_finite_json(value: Any) -> Any:
    """Replace values that JSON lacks: NaN, infinity, and non-string keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _to_finite_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_finite_json(each) for each in value]
    return value
