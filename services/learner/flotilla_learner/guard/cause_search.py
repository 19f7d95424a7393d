"""Search for the cause of a disagreement, on the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.guard.diagnosis import diagnose_mismatch
from flotilla_learner.guard.mismatch_limits import MismatchBound
from flotilla_learner.guard.mismatch_report import MismatchFinding
from flotilla_learner.ports import RankError, Ranks
from flotilla_learner.types import Comparison, TrainBatch, VersionMismatch

_log = get_logger(__name__)
_UNKNOWN = VersionMismatch(0, *[float("inf")] * 4)


@dataclass(frozen=True, slots=True)
class CauseSearch:
    """Search for the cause of a disagreement, with its inputs."""

    ranks: Ranks
    policy: PolicyConfig
    temperature: float
    bound: MismatchBound

    async def find_cause(
        self,
        moment: Literal["start", "run"],
        source: str,
        batch: TrainBatch,
        workers: Sequence[str],
    ) -> MismatchFinding:
        """Find the cause; `workers` are the authors of the batch's sequences, in order."""
        version = batch.step - 1
        try:
            comparison = await self.ranks.compare_batch(batch, diagnose=True)
        except RankError as error:
            # The disagreement stands; only its cause remains unknown.
            _log.warning("the search for the cause failed", reason=str(error))
            comparison = Comparison()
        found = comparison.versions.get(version)
        return MismatchFinding(
            moment=moment,
            source=source,
            version=version,
            excesses=self.bound.find_excesses(version, found) if found else (),
            comparison=comparison,
            diagnosis=diagnose_mismatch(
                found or _UNKNOWN, comparison, self.policy, self.temperature
            ),
            workers=errors_by_worker(workers, comparison),
            dtype=self.policy.dtype,
            bound=self.bound,
        )


def errors_by_worker(
    workers: Sequence[str], comparison: Comparison
) -> tuple[tuple[str, float], ...]:
    """Return the mean error of each worker's sequences, the worst first."""
    errors: dict[str, list[float]] = {}
    for worker, error in zip(workers, comparison.sequences, strict=False):
        if error is not None:
            errors.setdefault(worker, []).append(error)
    means = [(worker, float(np.mean(values))) for worker, values in errors.items()]
    return tuple(sorted(means, key=lambda pair: -pair[1]))
