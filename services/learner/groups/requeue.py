"""What becomes of a task that could not be graded: another group, none, or quarantine."""

from services.learner.groups.batcher import ReadyGroup, Record
from services.learner.groups.counters import Tally
from services.learner.groups.types import GroupSpec, Purpose
from services.learner.sampling.curriculum import Curriculum
from services.learner.sampling.quarantine import Suspect, Witnesses
from services.learner.sampling.refused_tasks import Refusal, Refusals, refusal_of
from services.learner.sampling.template_failures import Unrendered
from services.learner.trajectory import Trajectory


class GivingUp:
    """Requeues a task `max_requeues` times, then gives it up.

    What the gateway will not have is given up at once: the gateway answered, and would answer
    the same again. `problem` is set when that makes the run pointless.
    """

    def __init__(
        self, curriculum: Curriculum, refusals: Refusals, tally: Tally, *, max_requeues: int
    ) -> None:
        self.problem = ""
        self._curriculum = curriculum
        self._refusals = refusals
        self._tally = tally
        self._max_requeues = max_requeues
        self._witnesses = Witnesses()
        self._unrendered = Unrendered(sum(curriculum.sizes.values()))
        # Since when the task of a sequence number is tried, once a group for it was dropped.
        self._since: dict[int, float] = {}

    def tried(self, spec: GroupSpec, record: Record, now: float) -> None:
        """A try has ended: it may show that another task is at fault itself."""
        task, trajectory = spec.task, record.trajectory
        self._refusals.tried(task.env_key, trajectory)
        if trajectory.reward is None:
            return
        began = now - _seconds(trajectory)
        for suspect in self._witnesses.graded(task.env_key, task.key, began, now):
            self._condemn(suspect.task)

    def completed(self, group: ReadyGroup, *, open_since: float) -> None:
        """A group has what it needs, or was an evaluation's, which come to their end whatever
        they have. `open_since`: see `replacement`."""
        self._unrendered.completed()
        if group.graded:
            self._tally.rendered(group.spec.task.env_key)
        if group.spec.purpose is Purpose.TRAIN:
            self.over(group.spec)
        elif not group.graded:
            self._refused(group, open_since)

    def unrendered(self, group: ReadyGroup) -> None:
        """A group was dropped because what its policy was to read could not be rendered."""
        spec = group.spec
        said = next(r.trajectory.detail for r in group.failed if r.spoils_its_group)
        self._tally.unrendered(spec, said)
        self.problem = self.problem or self._unrendered.dropped(spec.task.key, said)

    def over(self, spec: GroupSpec) -> None:
        """The task of a TRAIN group needs no other group."""
        self._since.pop(spec.sequence_number, None)

    def replacement(self, group: ReadyGroup, *, open_since: float) -> GroupSpec | None:
        """The next group for the task of a TRAIN group with too few grades, or none.

        `open_since` is when the oldest group that is not complete, of the same environment, was
        leased: it may still show that the environment works.
        """
        spec = group.spec
        began = self._since.setdefault(spec.sequence_number, group.leased_at)
        refused = self._refused(group, open_since)
        if spec.requeues < self._max_requeues and refused is not Refusal.BAD_TASK:
            return spec.requeued()
        self.over(spec)
        self._tally.quarantined(spec)
        if refused is Refusal.BAD_TASK:
            self._condemn(
                spec.task.key, f"the gateway refuses it: {group.failed[-1].trajectory.detail}"
            )
        elif refused is None:
            suspect = Suspect(spec.task.key, began, group.ended_at)
            if self._witnesses.suspect(spec.task.env_key, suspect):
                self._condemn(spec.task.key)
        return None

    def _refused(self, group: ReadyGroup, open_since: float) -> Refusal | None:
        """Whether the gateway refused every try of a group."""
        refusal = None if group.graded else refusal_of([r.trajectory for r in group.failed])
        env = group.spec.task.env_key
        if refusal is None:
            self._failed(group, open_since)
            return None
        kind, detail = refusal
        self._tally.refused(env, len(group.failed), detail)
        problem = self._refusals.refused(
            env, group.spec.task.key, kind, detail, at=group.ended_at, open_since=open_since
        )
        self.problem = self.problem or problem
        return kind

    def _failed(self, group: ReadyGroup, open_since: float) -> None:
        """Note a group without any grade: nothing may ever get one."""
        if group.graded or self.problem:
            return
        task, tries = group.spec.task, [record.trajectory for record in group.failed]
        self.problem = self._refusals.failed(
            task.env_key, task.key, tries, at=group.ended_at, open_since=open_since
        )

    def _condemn(self, task_key: str, reason: str = "") -> None:
        tries = f"{self._max_requeues + 1} groups had too few grades while other tasks were graded"
        self._curriculum.condemn(task_key, reason or tries)


def _seconds(trajectory: Trajectory) -> float:
    """How long a try took, as far as it says."""
    turns = sum(turn.generate_s + turn.tools_s for turn in trajectory.turns)
    return trajectory.counts.open_s + turns + trajectory.counts.grade_s
