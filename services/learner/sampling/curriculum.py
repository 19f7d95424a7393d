"""Which task comes when: a function of the seed, the sequence number and the changes that the
journal had committed before it.

Draws are numbered from 0, in windows of as many as a step takes. Which environment a number
belongs to depends on nothing but the seed (`mixing`); which of its tasks, on how far the
environment has come (`passes`) and on what is parked or quarantined. That changes only through
`learn` and `flush`, whose result is journaled before anything that is drawn after it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.common.log import get_logger
from services.learner.config.sampling import SamplingConfig
from services.learner.sampling.curriculum_changes import (
    Change,
    Cursor,
    Event,
    EventKind,
    Standing,
    Stored,
    TaskState,
)
from services.learner.sampling.difficulty import Outcome, take_in
from services.learner.sampling.environment_mix import Mixture
from services.learner.sampling.task_passes import Passes
from services.learner.sampling.tasks import Task

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
        stored: Stored | None = None,
        seen: Iterable[str] = (),
    ) -> None:
        """`window` is the number of groups of a step; `seen` are keys of tasks drawn before."""
        if not tasks:
            raise ValueError("a curriculum needs at least one task")
        stored = stored or Stored()
        self._config = config
        self._tasks: dict[str, list[Task]] = {}
        self._index: dict[str, tuple[str, int]] = {}
        for task in tasks:
            own = self._tasks.setdefault(task.env_key, [])
            self._index[task.key] = (task.env_key, len(own))
            own.append(task)
        self._mixture = Mixture(self.sizes, config, window=window, seed=seed)
        self._window = window
        self._order: tuple[int, list[str]] = (-1, [])
        self._states = {s.task: self._taken_up(s) for s in stored.tasks if s.task in self._index}
        # How many tasks of each environment stand how; active ones only once they were judged.
        self.standings = Counter((state.env, state.standing) for state in self._states.values())
        self._passes = {env: self._resumed(env, stored, seed) for env in self._tasks}
        self._seen = set(seen) & self._index.keys()
        # The number of the next draw.
        self.number = stored.number
        # Since the last change: events, tasks that are not as they were, tasks to quarantine.
        self._events: list[Event] = []
        self._dirty: dict[str, TaskState] = {}
        self._condemned: dict[str, str] = {}
        self._counts: Counter[tuple[str, EventKind]] = Counter()

    # --- drawing

    def draw(self) -> Task:
        """The task of group number `number`, which grows by one."""
        turn, place = divmod(self.number, self._window)
        if self._order[0] != turn:
            self._order = (turn, self._mixture.order(turn))
        env = self._order[1][place]
        index, queued = self._passes[env].draw()
        task = self._tasks[env][index]
        if queued is not None:
            state = self._touch(task.key)
            state.queued = queued
            self._note(state, EventKind.PROBED, f"{state.standing} at {state.pass_rate:.2f}")
        self._seen.add(task.key)
        self.number += 1
        return task

    def catch_up(self, number: int) -> None:
        """Draw again what was drawn after the stored change, up to but without `number`."""
        while self.number < number:
            self.draw()

    # --- learning

    def learn(self, step: int, outcomes: Iterable[Outcome]) -> Change:
        """What a step's groups showed. The caller journals the change before it draws."""
        if self._config.difficulty.enabled:
            for outcome in outcomes:
                self._judge(outcome)
        self._quarantine_condemned()
        return self._change(step)

    def condemn(self, task_key: str, reason: str) -> None:
        """Have a task quarantined by the next change."""
        if task_key in self._index and self.standing(task_key) is not Standing.QUARANTINED:
            self._condemned.setdefault(task_key, reason)

    def flush(self) -> Change | None:
        """Quarantine what was condemned, if anything. The caller journals the change before it
        draws."""
        if not self._condemned:
            return None
        self._quarantine_condemned()
        return self._change(None)

    # --- what is known

    @property
    def sizes(self) -> Mapping[str, int]:
        """Tasks of each environment."""
        return {env: len(own) for env, own in self._tasks.items()}

    @property
    def distinct_tasks(self) -> int:
        """Tasks that were drawn at least once."""
        return len(self._seen)

    def standing(self, task_key: str) -> Standing:
        state = self._states.get(task_key)
        return state.standing if state else Standing.ACTIVE

    def epoch(self, step: int) -> float:
        """Epochs behind the first `step` steps: by steps, else by groups drawn per task."""
        if self._config.epoch_steps:
            return step / self._config.epoch_steps
        return self.number / len(self._index)

    def passes(self) -> Mapping[str, int]:
        """Whole passes over each environment's tasks."""
        return {env: passes.cursor.turn for env, passes in self._passes.items()}

    def take_counts(self) -> Counter[tuple[str, EventKind]]:
        """Events of each environment since last asked."""
        taken, self._counts = self._counts, Counter()
        return taken

    # --- inside

    def _taken_up(self, state: TaskState) -> TaskState:
        """Without the difficulty curriculum nothing is parked."""
        active = state.standing.parked and not self._config.difficulty.enabled
        return replace(state, standing=Standing.ACTIVE if active else state.standing)

    def _resumed(self, env: str, stored: Stored, seed: int) -> Passes:
        own = (
            (i, self._states[t.key])
            for i, t in enumerate(self._tasks[env])
            if t.key in self._states
        )
        passes = Passes(
            env,
            len(self._tasks[env]),
            seed=seed,
            probe_share=self._config.difficulty.probe_share,
            cursor=stored.cursors.get(env, Cursor()),
            states=own,
        )
        if self._mixture.rates[env] and not passes.drawable:
            raise NoTasksError(
                f"learner.tasks: all {passes.size} tasks of environment {env!r} are quarantined;"
                " add others under new keys, or take it out of the mixture with a weight of 0"
            )
        return passes

    def _judge(self, outcome: Outcome) -> None:
        if self.standing(outcome.task) is Standing.QUARANTINED or outcome.task not in self._index:
            return
        state = self._touch(outcome.task)
        before = state.standing
        self._stand(state, take_in(state, outcome, self._config.difficulty))
        passes, index = self._passes[state.env], self._index[state.task][1]
        rate = f"pass rate {state.pass_rate:.2f} after {state.groups} groups"
        if state.standing.parked and not before.parked:
            state.queued = passes.park(index)
            self._note(state, EventKind.PARKED, f"{state.standing}: {rate}")
        elif before.parked and not state.standing.parked:
            passes.unpark(index)
            self._note(state, EventKind.UNPARKED, f"no longer {before}: {rate}")

    def _quarantine_condemned(self) -> None:
        condemned, self._condemned = self._condemned, {}
        for task_key, reason in condemned.items():
            state = self._touch(task_key)
            if not self._may_lose_one(state.env):
                self._note(state, EventKind.QUARANTINE_REFUSED, reason)
                continue
            self._stand(state, Standing.QUARANTINED)
            self._passes[state.env].remove(self._index[task_key][1])
            self._note(state, EventKind.QUARANTINED, reason)

    def _may_lose_one(self, env: str) -> bool:
        """Whether another task may be quarantined: one always may, unless it is the only one."""
        size = len(self._tasks[env])
        most = min(max(1, int(size * self._config.quarantine_share)), size - 1)
        return self.standings[env, Standing.QUARANTINED] < most

    def _stand(self, state: TaskState, standing: Standing) -> None:
        self.standings[state.env, state.standing] -= 1
        self.standings[state.env, standing] += 1
        state.stand(standing, self._passes[state.env].cursor.turn)

    def _touch(self, task_key: str) -> TaskState:
        """A task's state, to be journaled with the next change."""
        state = self._states.get(task_key)
        if state is None:
            state = self._states[task_key] = TaskState(task_key, self._index[task_key][0])
            self.standings[state.env, state.standing] += 1
        self._dirty[task_key] = state
        return state

    def _note(self, state: TaskState, kind: EventKind, reason: str) -> None:
        self._events.append(Event(state.task, state.env, kind, reason))
        self._counts[state.env, kind] += 1
        facts = {"task": state.task, "env": state.env, "reason": reason}
        if kind is EventKind.QUARANTINE_REFUSED:
            _log.error(
                "a task was not quarantined: too many of its environment are already, so it is"
                " rather the environment that does not work",
                **facts,
            )
        elif kind is EventKind.QUARANTINED:
            _log.error("a task is quarantined for the rest of the run", **facts)
        elif kind is not EventKind.PROBED:
            _log.info(f"task {kind}", **facts)

    def _change(self, step: int | None) -> Change:
        change = Change(
            self.number,
            step,
            {env: passes.cursor for env, passes in self._passes.items()},
            tuple(replace(state) for state in self._dirty.values()),
            tuple(self._events),
        )
        self._dirty, self._events = {}, []
        return change
