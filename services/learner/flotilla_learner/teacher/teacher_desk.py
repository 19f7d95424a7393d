"""Questions to the teacher, repeated until each is answered: a teacher that is slow or down delays
a run, and changes no number of it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.alarms.event_rules import teacher_verdict
from flotilla_learner.alarms.types import AlarmVerdict
from flotilla_learner.config.teacher import TeacherConfig
from flotilla_learner.ports import HintRenderer, Teacher, TeacherDownError
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.teacher.hints import check_hints, hint_of
from flotilla_learner.types import TeacherScores

_log = get_logger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# Between looks for attempts that can be scored ahead.
_LOOK_AGAIN_S = 0.5
# Its stage of a step, as the watchdog knows it.
STAGE = "ask teacher"


class TeacherDesk:
    """Gets attempts scored by a teacher, several sequences at once."""

    def __init__(
        self,
        teacher: Teacher,
        config: TeacherConfig,
        renderer: HintRenderer | None = None,
        *,
        note_progress: Callable[[], None] = lambda: None,
        apply_verdict: Callable[[AlarmVerdict], None] = lambda verdict: None,
    ) -> None:
        """`renderer` renders the hints, if the teacher is given any. `note_progress` is called with
        every answer, `apply_verdict` when the teacher seems to be down, and when it answers
        again."""
        self._teacher = teacher
        self._config = config
        self._renderer = renderer
        self._note_progress = note_progress
        self._apply_verdict = apply_verdict
        # By attempt and the sequence's place in it: scored, and not taken by a step yet.
        self._known: dict[tuple[AttemptKey, int], TeacherScores] = {}
        # Since when nothing is answered; None: the last question was.
        self._silent_since: float | None = None
        self._retries = 0
        self._seconds = 0.0

    async def open(self, tasks: Sequence[Task] = ()) -> None:
        """Wait for the teacher, and prove that it reads token ids as the policy does, with the
        hints of all tasks of the run before them. Raises ConfigError."""
        longest = 0
        if self._config.hint is not None:
            check_hints(tasks, self._config.hint)
            rendered = map(self._render_hint, tasks)
            longest = await asyncio.to_thread(lambda: max(map(len, rendered), default=0))
        for pause_s in _pauses():
            try:
                return await self._teacher.prove_tokenizer(longest)
            except TeacherDownError as error:
                await self._wait_after(error, pause_s)

    async def score_attempts(
        self, attempts: Sequence[Trajectory], tasks: Mapping[str, Task]
    ) -> dict[AttemptKey, tuple[TeacherScores, ...]]:
        """Score all policy tokens of the attempts, each sequence of them, unless they were scored
        ahead; `tasks` are those of their groups, by group id. Raises TeacherRefusedError."""
        started = loop_time()
        await self._score_missing(attempts, tasks)
        self._seconds += loop_time() - started
        pop = self._known.pop
        return {t.key: tuple(pop((t.key, n)) for n in range(len(t.sequences))) for t in attempts}

    async def work_ahead(
        self,
        list_waiting: Callable[[], Mapping[AttemptKey, Task]],
        load: Callable[[Sequence[AttemptKey]], Awaitable[Sequence[Trajectory]]],
    ) -> None:
        """Score attempts that wait for a step, until cancelled. What has no answer by then is asked
        again with its step. Raises TeacherRefusedError."""
        while True:
            waiting = list_waiting()
            # Others were dropped as too old.
            self._known = {key: own for key, own in self._known.items() if key[0] in waiting}
            scored = {key for key, _ in self._known}
            if new := [key for key in waiting if key not in scored]:
                tasks = {key.group_id: waiting[key] for key in new}
                await self._score_missing(await load(new), tasks)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _score_missing(
        self, attempts: Sequence[Trajectory], tasks: Mapping[str, Task]
    ) -> None:
        """Score the sequences that have no scores yet."""
        hints = {group: self._render_hint(task) for group, task in tasks.items()}
        places = [((t.key, n), s) for t in attempts for n, s in enumerate(t.sequences)]
        missing = [(place, sequence) for place, sequence in places if place not in self._known]
        waiting = iter(missing)

        async def work() -> None:
            for place, sequence in waiting:
                hint = hints[place[0].group_id]
                self._known[place] = await self._score_sequence(sequence, hint)

        workers = min(self._config.concurrency, len(missing))
        async with running_tasks(*(work() for _ in range(workers))) as running:
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)

    def take_metrics(self) -> dict[str, float]:
        """Return figures since the last call.

        - teacher/seconds: waiting for the scores of a step's attempts
        - teacher/retries: questions that were asked again"""
        taken = {"teacher/seconds": self._seconds, "teacher/retries": float(self._retries)}
        self._seconds, self._retries = 0.0, 0
        return taken

    def _render_hint(self, task: Task) -> NDArray[np.int32]:
        """Return the tokens of the message that the teacher is shown about a task; none without
        hints."""
        if self._config.hint is None or self._renderer is None:
            return np.zeros(0, np.int32)
        return self._renderer.render_message(hint_of(task, self._config.hint))

    async def _score_sequence(self, sequence: Sampled, hint: NDArray[np.int32]) -> TeacherScores:
        places = np.flatnonzero(policy_mask(sequence.spans))
        if not len(places):
            none = np.zeros((0, self._teacher.top_k), np.float32)
            return TeacherScores(np.zeros(0, np.float32), none.astype(np.int32), none)
        # Nothing after the last policy token counts.
        ids = sequence.token_ids[: places[-1] + 1]
        begun = int(self._renderer is not None and ids[0] == self._renderer.first_id)
        asked = np.concatenate([ids[:begun], hint, ids[begun:]])
        return await self._ask(asked, places + len(hint))

    async def _ask(self, token_ids: NDArray[np.int32], places: NDArray[np.int64]) -> TeacherScores:
        for pause_s in _pauses():
            try:
                scores = await self._teacher.score_tokens(token_ids, places)
            except TeacherDownError as error:
                await self._wait_after(error, pause_s)
                continue
            self._silent_since = None
            self._note_progress()
            self._apply_verdict(teacher_verdict(bad=False))
            return scores
        raise AssertionError("pauses never end")

    async def _wait_after(self, error: TeacherDownError, pause_s: float) -> None:
        """Wait before the next try, and say why."""
        self._retries += 1
        if self._silent_since is None:
            self._silent_since = loop_time()
        silent_s, wait_s = loop_time() - self._silent_since, max(error.wait_s, pause_s)
        _log.warning("the teacher gives no answer", error=str(error), retry_in_s=round(wait_s, 1))
        if silent_s >= self._config.patience_s:
            self._apply_verdict(teacher_verdict(bad=True, cause=str(error), seconds=silent_s))
        await asyncio.sleep(wait_s)


def _pauses() -> Iterator[float]:
    """Yield growing pauses for ever, each a little longer by chance: requests that failed together
    should not come back together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(1.0, 1.2)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
