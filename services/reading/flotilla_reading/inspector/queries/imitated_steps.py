"""What a step imitated, from its dump: the journal holds only attempts that the run played."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Facts, Trajectory
from flotilla_common.episodes.episode_rows import sequence_of_row
from flotilla_common.episodes.imitated_attempts import IMITATES
from flotilla_common.run_folder.dump_files import rollouts_path
from flotilla_reading.inspector.queries.group_rows import GroupRow, TryRow
from flotilla_reading.inspector.queries.run_folders import NotFoundError
from flotilla_reading.kept_episodes import DamagedDumpError, Row, read_dumped_rows


@dataclass(frozen=True, slots=True)
class ImitatedSequence:
    """One sequence of a step, as a row of its page. `source` names the episode that it is of;
    `loss` is the mean negative log-likelihood of its trained tokens before the step, in nats, if it
    is known."""

    row: TryRow
    task_key: str
    source: str
    loss: float | None
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class ImitatedStep:
    """What a step imitated, in its order; nothing if no dump of it is kept."""

    step: int
    sequences: tuple[ImitatedSequence, ...]

    def find(self, key: AttemptKey) -> tuple[GroupRow, ImitatedSequence]:
        """Return a sequence, and the step as its group. Raises NotFoundError."""
        for each in self.sequences:
            if each.row.key == key:
                return self._as_group(each), each
        raise NotFoundError(
            f"There is no sequence {key.attempt_index} in the dump of step {self.step}: dumps of"
            " older steps are removed (learner.dumps.keep)."
        )

    def _as_group(self, shown: ImitatedSequence) -> GroupRow:
        rows = tuple(each.row for each in self.sequences)
        return GroupRow(
            *(shown.row.group_id, "train", "", "", "", self.step),
            tuple(row.reward or 0.0 for row in rows),
            task_key=shown.task_key,
            size=len(rows),
            tries=rows,
        )


def read_imitated(run_dir: Path, step: int) -> ImitatedStep:
    """Read what a step imitated. Raises NotFoundError if its dump is damaged."""
    try:
        rows = read_dumped_rows(rollouts_path(run_dir, step))
        return ImitatedStep(step, tuple(_read_row(key, row) for key, row in rows.items()))
    except (DamagedDumpError, OSError, ValueError, KeyError, TypeError) as error:
        raise NotFoundError(f"The dump of step {step} is damaged: {error}") from error


def _read_row(key: AttemptKey, data: Row) -> ImitatedSequence:
    [dumped] = data["sequences"]
    sequence, known = sequence_of_row(dumped), dumped["trainer_logprobs"]
    values = [value for value in known or () if value is not None]
    task_key, reward, trained = str(data["task_key"]), float(data["reward"]), len(sequence.logprobs)
    row = TryRow(
        *(key.group_id, key.attempt_index, key.attempt_try, reward),
        *("", "", 0.0, len([run for run in sequence.spans if run.author is Author.POLICY])),
        *(0, 0, 0, len(sequence.token_ids), trained, 0.0),
    )
    detail = str(data["detail"])
    trajectory = Trajectory(
        *(key, "", (sequence,), b""),
        reward=reward,
        detail=detail,
        facts=Facts(task_key=task_key),
    )
    loss = -float(np.mean(values)) if values else None
    return ImitatedSequence(row, task_key, detail.removeprefix(IMITATES), loss, trajectory)
