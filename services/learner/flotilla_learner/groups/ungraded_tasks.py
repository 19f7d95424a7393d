"""Fate of a task that could not be graded: another group, none, or quarantine."""

from flotilla_common.domain.attempts import FailureKind, Purpose
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.counters import Tally
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.sampling.curriculum import Curriculum
from flotilla_learner.sampling.refused_tasks import Refusal, RefusalHistory, common_refusal
from flotilla_learner.sampling.suspect_tasks import SuspectTask, Witnesses
from flotilla_learner.sampling.template_failures import TemplateFailures


class UngradedTasks:
    """Requeues a task `max_requeues` times, then gives it up.

    A task that the gateway refuses is given up at once, since the gateway would refuse it
    again. `problem` is set if that makes the run pointless."""

    def __init__(
        self, curriculum: Curriculum, refusals: RefusalHistory, tally: Tally, *, max_requeues: int
    ) -> None:
        self.problem = ""
        self._curriculum = curriculum
        self._refusals = refusals
        self._tally = tally
        self._max_requeues = max_requeues
        self._witnesses = Witnesses()
        self._unrendered = TemplateFailures(sum(curriculum.task_counts.values()))
        # Time since which a sequence number's task is tried, once a group for it was dropped.
        self._since: dict[int, float] = {}

    def note_attempt(self, spec: GroupSpec, record: AttemptRecord, now: float) -> None:
        """Record the end of a try; it may show that another task itself is at fault."""
        task, trajectory = spec.task, record.trajectory
        self._refusals.note_attempt(task.env_key, trajectory)
        if trajectory.reward is None:
            return
        began = now - _attempt_seconds(trajectory)
        for suspect in self._witnesses.note_graded(task.env_key, task.key, began, now):
            self._condemn_task(suspect.task)

    def note_complete(self, group: ReadyGroup, *, open_since: float) -> None:
        """Record a group that is complete, or any that an evaluation ended.

        `open_since`: see `make_replacement`."""
        self._unrendered.note_complete()
        if group.graded:
            self._tally.count_sound(group.spec.task.env_key)
        if group.spec.purpose is Purpose.TRAIN:
            self.forget_task(group.spec)
        elif not group.graded:
            self._judge_refusal(group, open_since)

    def note_spoiled(self, group: ReadyGroup) -> None:
        """Record a group that was dropped because of one of its attempts."""
        spec = group.spec
        spoiling = next(r.trajectory for r in group.failed if r.spoils_group)
        self._tally.count_spoiled(spec, spoiling)
        if spoiling.failure is FailureKind.TEMPLATE_ERROR:
            problem = self._unrendered.note_dropped(spec.task.key, spoiling.detail)
            self.problem = self.problem or problem

    def forget_task(self, spec: GroupSpec) -> None:
        """Drop the task of a TRAIN group: it needs no other group."""
        self._since.pop(spec.sequence_number, None)

    def make_replacement(self, group: ReadyGroup, *, open_since: float) -> GroupSpec | None:
        """Make the next group for the task of a TRAIN group with too few grades, if any.

        `open_since` is the lease time of the oldest incomplete group of the same environment,
        which may still show that the environment works."""
        spec = group.spec
        began = self._since.setdefault(spec.sequence_number, group.leased_at)
        refused = self._judge_refusal(group, open_since)
        if spec.requeues < self._max_requeues and refused is not Refusal.BAD_TASK:
            return spec.to_requeued()
        self.forget_task(spec)
        self._tally.count_given_up(spec)
        if refused is Refusal.BAD_TASK:
            self._condemn_task(
                spec.task.key, f"the gateway refuses it: {group.failed[-1].trajectory.detail}"
            )
        elif refused is None:
            suspect = SuspectTask(spec.task.key, began, group.ended_at)
            if self._witnesses.judge_suspect(spec.task.env_key, suspect):
                self._condemn_task(spec.task.key)
        return None

    def _judge_refusal(self, group: ReadyGroup, open_since: float) -> Refusal | None:
        """Return the refusal if the gateway refused every try of a group."""
        refusal = None if group.graded else common_refusal([r.trajectory for r in group.failed])
        env = group.spec.task.env_key
        if refusal is None:
            self._note_failure(group, open_since)
            return None
        kind, detail = refusal
        self._tally.count_refused(env, len(group.failed), detail)
        problem = self._refusals.note_refused(
            env, group.spec.task.key, kind, detail, at=group.ended_at, open_since=open_since
        )
        self.problem = self.problem or problem
        return kind

    def _note_failure(self, group: ReadyGroup, open_since: float) -> None:
        """Record a group without any grade; its task may never get one."""
        if group.graded or self.problem:
            return
        task, tries = group.spec.task, [record.trajectory for record in group.failed]
        self.problem = self._refusals.note_failed(
            task.env_key, task.key, tries, at=group.ended_at, open_since=open_since
        )

    def _condemn_task(self, task_key: str, reason: str = "") -> None:
        tries = f"{self._max_requeues + 1} groups had too few grades while other tasks were graded"
        self._curriculum.condemn_task(task_key, reason or tries)


def _attempt_seconds(trajectory: Trajectory) -> float:
    """Return how long a try took, as far as it reports that."""
    turns = sum(turn.generate_s + turn.tools_s for turn in trajectory.turns)
    return trajectory.counts.open_s + turns + trajectory.counts.grade_s
