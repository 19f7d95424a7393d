"""Questions to the teacher, repeated until each is answered: a teacher that is slow or down delays
a run, and changes no number of it."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.common.aio.concurrency import raise_failure, running_tasks
from services.common.domain.attempts import AttemptKey
from services.common.domain.token_authors import policy_mask
from services.common.domain.trajectory import Sequence as Sampled
from services.common.domain.trajectory import Trajectory
from services.common.rpc.deadlines import loop_time
from services.common.telemetry.log import get_logger
from services.learner.alarms.event_rules import teacher_verdict
from services.learner.alarms.types import AlarmVerdict
from services.learner.config.teacher import TeacherConfig
from services.learner.ports import Teacher, TeacherDownError
from services.learner.types import TeacherScores

_log = get_logger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# Its stage of a step, as the watchdog knows it.
STAGE = "ask teacher"


class TeacherDesk:
    """Gets attempts scored by a teacher, several sequences at once."""

    def __init__(
        self,
        teacher: Teacher,
        config: TeacherConfig,
        *,
        note_progress: Callable[[], None] = lambda: None,
        apply_verdict: Callable[[AlarmVerdict], None] = lambda verdict: None,
    ) -> None:
        """`note_progress` is called with every answer, `apply_verdict` when the teacher seems to be
        down, and when it answers again."""
        self._teacher = teacher
        self._config = config
        self._note_progress = note_progress
        self._apply_verdict = apply_verdict
        self._answered_at: float | None = None
        self._retries = 0
        self._seconds = 0.0

    async def open(self) -> None:
        """Wait for the teacher, and prove that it reads token ids as the policy does. Raises
        TeacherRefusedError."""
        for pause_s in _pauses():
            try:
                return await self._teacher.prove_tokenizer()
            except TeacherDownError as error:
                await self._wait_after(error, pause_s)

    async def score_attempts(
        self, attempts: Sequence[Trajectory]
    ) -> dict[AttemptKey, tuple[TeacherScores, ...]]:
        """Score all policy tokens of the attempts, each sequence of them. Raises
        TeacherRefusedError."""
        started = loop_time()
        places = [(t.key, n, s) for t in attempts for n, s in enumerate(t.sequences)]
        found: dict[tuple[AttemptKey, int], TeacherScores] = {}
        waiting = iter(places)

        async def work() -> None:
            for key, number, sequence in waiting:
                found[key, number] = await self._score_sequence(sequence)

        workers = min(self._config.concurrency, len(places))
        async with running_tasks(*(work() for _ in range(workers))) as running:
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)
        self._seconds += loop_time() - started
        return {t.key: tuple(found[t.key, n] for n in range(len(t.sequences))) for t in attempts}

    def take_metrics(self) -> dict[str, float]:
        """Return figures since the last call.

        - teacher/seconds: waiting for the scores of a step's attempts
        - teacher/retries: questions that were asked again"""
        taken = {"teacher/seconds": self._seconds, "teacher/retries": float(self._retries)}
        self._seconds, self._retries = 0.0, 0
        return taken

    async def _score_sequence(self, sequence: Sampled) -> TeacherScores:
        places = np.flatnonzero(policy_mask(sequence.spans))
        if not len(places):
            none = np.zeros((0, self._teacher.top_k), np.float32)
            return TeacherScores(np.zeros(0, np.float32), none.astype(np.int32), none)
        # Nothing after the last policy token counts.
        return await self._ask(sequence.token_ids[: places[-1] + 1], places)

    async def _ask(self, token_ids: NDArray[np.int32], places: NDArray[np.int64]) -> TeacherScores:
        for pause_s in _pauses():
            try:
                scores = await self._teacher.score_tokens(token_ids, places)
            except TeacherDownError as error:
                await self._wait_after(error, pause_s)
                continue
            self._answered_at = loop_time()
            self._note_progress()
            self._apply_verdict(teacher_verdict(bad=False))
            return scores
        raise AssertionError("pauses never end")

    async def _wait_after(self, error: TeacherDownError, pause_s: float) -> None:
        """Wait before the next try, and say why."""
        self._retries += 1
        now = loop_time()
        since = self._answered_at = now if self._answered_at is None else self._answered_at
        wait_s = max(error.wait_s, pause_s)
        _log.warning("the teacher gives no answer", error=str(error), retry_in_s=round(wait_s, 1))
        if now - since >= self._config.patience_s:
            verdict = teacher_verdict(bad=True, cause=str(error), seconds=now - since)
            self._apply_verdict(verdict)
        await asyncio.sleep(wait_s)


def _pauses() -> Iterator[float]:
    """Yield growing pauses for ever, each a little longer by chance: requests that failed together
    should not come back together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(1.0, 1.2)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
