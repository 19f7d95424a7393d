"""Order of the tasks: a function of the seed, the sequence number and the changes that were
journaled before it.

Draws are numbered from 0, in windows of one step's groups. The environment of a number depends
only on the seed (`environment_mix`); the task drawn from it depends on the environment's progress
(`task_passes`) and on the parked or quarantined tasks. Those change only through
`learn_from_outcomes` and `flush_condemned`, whose result is journaled before anything that is
drawn after it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.sampling import SamplingConfig
from flotilla_learner.sampling.curriculum_changes import (
    CurriculumChange,
    CurriculumEvent,
    EventKind,
    PassCursor,
    StoredCurriculum,
    TaskStanding,
    TaskState,
)
from flotilla_learner.sampling.difficulty import update_difficulty
from flotilla_learner.sampling.environment_mix import EnvironmentMix
from flotilla_learner.sampling.group_signal import GroupOutcome
from flotilla_learner.sampling.task_passes import TaskPasses
from flotilla_learner.sampling.tasks import Task

_log = get_logger(__name__)


class NoTasksError(ValueError):
    """An environment has no task left that may be drawn."""


class Curriculum:
    """An endless, seeded order over tasks. Raises MixtureError and NoTasksError."""

    def __init__(
        self,
        tasks: Sequence[Task],
        config: SamplingConfig,
        *,
        seed: int,
        window: int,
        steps_before: int = 0,
        stored: StoredCurriculum | None = None,
        seen: Iterable[str] = (),
    ) -> None:
        """Create a curriculum; `window` is the number of groups of a step, `steps_before` that
        of the steps that draw nothing, before all others, and `seen` are the keys of tasks drawn
        before. Without tasks, in a run that only imitates, nothing may be drawn."""
        stored = stored or StoredCurriculum()
        self._config = config
        self._tasks: dict[str, list[Task]] = {}
        self._index: dict[str, tuple[str, int]] = {}
        for task in tasks:
            own = self._tasks.setdefault(task.env_key, [])
            self._index[task.key] = (task.env_key, len(own))
            own.append(task)
        self._mixture = EnvironmentMix(self.task_counts, config, window=window, seed=seed)
        self._window = window
        self._steps_before = steps_before
        self._order: tuple[int, list[str]] = (-1, [])
        self._states = {s.task: self._adopt_state(s) for s in stored.tasks if s.task in self._index}
        # Number of tasks by environment and standing; active ones only once they were judged.
        self.standings = Counter((state.env, state.standing) for state in self._states.values())
        self._passes = {env: self._resume_passes(env, stored, seed) for env in self._tasks}
        self._seen = set(seen) & self._index.keys()
        # Number of the next draw.
        self.number = stored.number
        # Since the last change: events, changed tasks, and tasks to quarantine.
        self._events: list[CurriculumEvent] = []
        self._dirty: dict[str, TaskState] = {}
        self._condemned: dict[str, str] = {}
        self._counts: Counter[tuple[str, EventKind]] = Counter()

    # --- drawing

    def draw_task(self) -> Task:
        """Draw the task of group number `number`, and increment `number`."""
        turn, place = divmod(self.number, self._window)
        if self._order[0] != turn:
            self._order = (turn, self._mixture.window_order(turn))
        env = self._order[1][place]
        index, queued = self._passes[env].draw_index()
        task = self._tasks[env][index]
        if queued is not None:
            state = self._touch_state(task.key)
            state.queued = queued
            self._note_event(state, EventKind.PROBED, f"{state.standing} at {state.pass_rate:.2f}")
        self._seen.add(task.key)
        self.number += 1
        return task

    def catch_up(self, number: int) -> None:
        """Repeat the draws after the stored change, up to but excluding `number`."""
        while self.number < number:
            self.draw_task()

    # --- learning

    def learn_from_outcomes(self, step: int, outcomes: Iterable[GroupOutcome]) -> CurriculumChange:
        """Learn from a step's outcomes. The caller journals the change before it draws."""
        if self._config.difficulty.enabled:
            for outcome in outcomes:
                self._judge_outcome(outcome)
        self._quarantine_condemned()
        return self._make_change(step)

    def condemn_task(self, task_key: str, reason: str) -> None:
        """Mark a task for quarantine by the next change."""
        if task_key in self._index and self.standing_of(task_key) is not TaskStanding.QUARANTINED:
            self._condemned.setdefault(task_key, reason)

    def flush_condemned(self) -> CurriculumChange | None:
        """Quarantine the condemned tasks, if any.

        The caller journals the change before it draws."""
        if not self._condemned:
            return None
        self._quarantine_condemned()
        return self._make_change(None)

    # --- what is known

    @property
    def task_counts(self) -> Mapping[str, int]:
        """Number of tasks of each environment."""
        return {env: len(own) for env, own in self._tasks.items()}

    @property
    def distinct_tasks(self) -> int:
        """Number of tasks drawn at least once."""
        return len(self._seen)

    def standing_of(self, task_key: str) -> TaskStanding:
        state = self._states.get(task_key)
        return state.standing if state else TaskStanding.ACTIVE

    def epoch_at(self, step: int) -> float:
        """Return the epochs behind `step` steps: by steps, else by groups drawn per task."""
        if self._config.epoch_steps:
            return (step - self._steps_before) / self._config.epoch_steps
        return self.number / len(self._index)

    def whole_passes(self) -> Mapping[str, int]:
        """Count the whole passes over each environment's tasks."""
        return {env: passes.cursor.turn for env, passes in self._passes.items()}

    def take_counts(self) -> Counter[tuple[str, EventKind]]:
        """Return the events of each environment since the last call."""
        taken, self._counts = self._counts, Counter()
        return taken

    # --- inside

    def _adopt_state(self, state: TaskState) -> TaskState:
        """Adopt a stored state: without the difficulty curriculum nothing is parked."""
        active = state.standing.is_parked and not self._config.difficulty.enabled
        return replace(state, standing=TaskStanding.ACTIVE if active else state.standing)

    def _resume_passes(self, env: str, stored: StoredCurriculum, seed: int) -> TaskPasses:
        own = (
            (i, self._states[t.key])
            for i, t in enumerate(self._tasks[env])
            if t.key in self._states
        )
        passes = TaskPasses(
            env,
            len(self._tasks[env]),
            seed=seed,
            probe_share=self._config.difficulty.probe_share,
            cursor=stored.cursors.get(env, PassCursor()),
            states=own,
        )
        if self._mixture.rates[env] and not passes.has_drawable:
            raise NoTasksError(
                f"learner.tasks: all {passes.size} tasks of environment {env!r} are quarantined;"
                " add others under new keys, or remove it from the mixture with a weight of 0"
            )
        return passes

    def _judge_outcome(self, outcome: GroupOutcome) -> None:
        if (
            self.standing_of(outcome.task) is TaskStanding.QUARANTINED
            or outcome.task not in self._index
        ):
            return
        state = self._touch_state(outcome.task)
        before = state.standing
        self._set_standing(state, update_difficulty(state, outcome, self._config.difficulty))
        passes, index = self._passes[state.env], self._index[state.task][1]
        rate = f"pass rate {state.pass_rate:.2f} after {state.groups} groups"
        if state.standing.is_parked and not before.is_parked:
            state.queued = passes.park_task(index)
            self._note_event(state, EventKind.PARKED, f"{state.standing}: {rate}")
        elif before.is_parked and not state.standing.is_parked:
            passes.unpark_task(index)
            self._note_event(state, EventKind.UNPARKED, f"no longer {before}: {rate}")

    def _quarantine_condemned(self) -> None:
        condemned, self._condemned = self._condemned, {}
        for task_key, reason in condemned.items():
            state = self._touch_state(task_key)
            if not self._may_lose_one(state.env):
                self._note_event(state, EventKind.QUARANTINE_REFUSED, reason)
                continue
            self._set_standing(state, TaskStanding.QUARANTINED)
            self._passes[state.env].remove_task(self._index[task_key][1])
            self._note_event(state, EventKind.QUARANTINED, reason)

    def _may_lose_one(self, env: str) -> bool:
        """Return True if another task may be quarantined.

        One always may, unless it is the only one."""
        size = len(self._tasks[env])
        most = min(max(1, int(size * self._config.quarantine_share)), size - 1)
        return self.standings[env, TaskStanding.QUARANTINED] < most

    def _set_standing(self, state: TaskState, standing: TaskStanding) -> None:
        self.standings[state.env, state.standing] -= 1
        self.standings[state.env, standing] += 1
        state.set_standing(standing, self._passes[state.env].cursor.turn)

    def _touch_state(self, task_key: str) -> TaskState:
        """Return a task's state, to be journaled with the next change."""
        state = self._states.get(task_key)
        if state is None:
            state = self._states[task_key] = TaskState(task_key, self._index[task_key][0])
            self.standings[state.env, state.standing] += 1
        self._dirty[task_key] = state
        return state

    def _note_event(self, state: TaskState, kind: EventKind, reason: str) -> None:
        self._events.append(CurriculumEvent(state.task, state.env, kind, reason))
        self._counts[state.env, kind] += 1
        facts = {"task": state.task, "env": state.env, "reason": reason}
        if kind is EventKind.QUARANTINE_REFUSED:
            _log.error(
                "a task was not quarantined: too many of its environment already are, so the"
                " environment itself is more likely broken",
                **facts,
            )
        elif kind is EventKind.QUARANTINED:
            _log.error("a task is quarantined for the rest of the run", **facts)
        elif kind is not EventKind.PROBED:
            _log.info(f"task {kind}", **facts)

    def _make_change(self, step: int | None) -> CurriculumChange:
        change = CurriculumChange(
            self.number,
            step,
            {env: passes.cursor for env, passes in self._passes.items()},
            tuple(replace(state) for state in self._dirty.values()),
            tuple(self._events),
        )
        self._dirty, self._events = {}, []
        return change
