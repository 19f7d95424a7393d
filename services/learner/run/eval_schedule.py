"""The evaluation that runs beside training, and the reports of those that have ended."""

import asyncio
from typing import Any

from services.common.log import get_logger
from services.learner.run.context import Parts
from services.learner.run.eval_report import Evaluation, Moment, eval_metrics
from services.learner.run.status import Phase

_log = get_logger(__name__)


class Evaluations:
    """One at a time. What it does is in the journal when `running` is False again."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._current: tuple[Evaluation, asyncio.Task[None]] | None = None
        # By eval id, in order of version.
        self.reports: dict[str, dict[str, Any]] = {}

    @property
    def running(self) -> bool:
        return self._current is not None and not self._current[1].done()

    def wanted(self, moment: Moment, version: int) -> bool:
        """Whether this moment's evaluation of this version is configured and not in the journal.

        `during` is due every `eval.every` steps of those between the first and the last.
        """
        config = self._parts.config
        every = config.eval.every
        between = 0 < version < config.steps
        if moment == "during" and not (every and between and version % every == 0):
            return False
        if not any(moment in chosen.config.when for chosen in self._parts.eval_sets):
            return False
        rows = [eval_id.split("-") for eval_id in self.reports]
        return not any(row[0] == moment and row[2] == str(version) for row in rows)

    async def begin(self, moment: Moment) -> None:
        """Have the newest policy evaluated."""
        parts = self._parts
        assert parts.broadcast.newest is not None
        evaluation = Evaluation(moment, parts.broadcast.newest.policy, parts.eval_sets)
        evaluation.on_progress = lambda: self._progress(evaluation)
        parts.dispatcher.endings.on_eval_group = evaluation.add
        self._progress(evaluation)
        await parts.dispatcher.add_eval(evaluation.specs)
        task = asyncio.create_task(self._evaluate(evaluation), name="evaluation")
        self._current = (evaluation, task)

    async def finish(self) -> bool:
        """Wait until all of it is done; the value is for who waits for this or something else."""
        if self._current:
            _, task = self._current
            await asyncio.shield(task)
            self._current = None
        return True

    async def hold(self, seconds: float, drain: asyncio.Event) -> bool:
        """Wait for the running evaluation; what is unfinished after `seconds` is missing.

        False when the drain came before its end: the run is to be left as it is.
        """
        if self._current is None:
            return True
        evaluation, task = self._current
        drained = asyncio.create_task(drain.wait())
        await asyncio.wait({task, drained}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if not task.done():
            if drain.is_set():
                return False
            unfinished = evaluation.unfinished
            _log.warning("an evaluation held up publication too long", missing=len(unfinished))
            await self._parts.dispatcher.drop_eval(unfinished, "eval_hold")
            evaluation.done.set()
        return await self.finish()

    async def cancel(self) -> None:
        """Leave the running evaluation for the next start."""
        if self._current:
            _, task = self._current
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._current = None

    async def _evaluate(self, evaluation: Evaluation) -> None:
        parts = self._parts
        with parts.watchdog.stage("evaluate"):
            await evaluation.done.wait()
        report = evaluation.report()
        version = evaluation.policy.version
        await parts.journal.evaluated(evaluation.eval_id, evaluation.moment, version, report)
        self.reports[evaluation.eval_id] = report
        logged = eval_metrics(report)
        parts.tracker.log(version, logged, {})
        parts.alarms.evaluated(version, logged)
        parts.status.update(logged)
        if parts.status.phase is Phase.EVALUATING:
            parts.status.enter(Phase.SAMPLING)

    def _progress(self, evaluation: Evaluation) -> None:
        """`eval/progress_done` and `eval/progress_total`: tasks of the newest evaluation."""
        total = len(evaluation.specs)
        done = float(total - len(evaluation.unfinished))
        progress = {"eval/progress_done": done, "eval/progress_total": float(total)}
        self._parts.status.update(progress)
