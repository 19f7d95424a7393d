"""The evaluation that runs beside training, and the reports of earlier ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_common.aio.concurrency import cancel_tasks, wait_unless
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dumps.run_dumps import Dumps
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.journal.store import Journal
from flotilla_learner.run.eval_report import Evaluation, Moment, eval_metrics
from flotilla_learner.run.result_sinks import ResultSinks
from flotilla_learner.run.status import Phase
from flotilla_learner.sampling.eval_sets import EvalSet

_log = get_logger(__name__)


@dataclass
class EvalSchedule:
    """Schedule of evaluations, one at a time.

    A result is in the journal once `is_running` is False again."""

    config: LearnerConfig
    eval_sets: Sequence[EvalSet]
    dispatcher: GroupDispatcher
    journal: Journal
    sinks: ResultSinks
    dumps: Dumps
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self._current: tuple[Evaluation, asyncio.Task[None]] | None = None
        # By eval id, in version order.
        self.reports: dict[str, dict[str, Any]] = {}

    async def load_reports(self) -> None:
        """Load the reports that earlier starts of the run left in the journal."""
        self.reports = await self.journal.load_eval_results()

    @property
    def has_sets(self) -> bool:
        return bool(self.eval_sets)

    @property
    def is_running(self) -> bool:
        return self._current is not None and not self._current[1].done()

    def is_due(self, moment: Moment, version: int) -> bool:
        """Return True if this version's evaluation is configured and not in the journal.

        `during` is due at the end of a warm start, and then every `eval.every` steps before the
        last."""
        if moment == "during" and not self.config.evaluates_during(version):
            return False
        if not any(moment in chosen.config.when for chosen in self.eval_sets):
            return False
        rows = [eval_id.split("-") for eval_id in self.reports]
        return not any(row[0] == moment and row[2] == str(version) for row in rows)

    async def begin_evaluation(self, moment: Moment) -> None:
        """Start evaluating the newest policy."""
        policy = self.sinks.status.policy
        assert policy is not None, "an evaluation follows a publication"
        evaluation = Evaluation(moment, policy, self.eval_sets)
        evaluation.on_progress = lambda: self._show_progress(evaluation)
        self.dispatcher.endings.on_eval_group = evaluation.add_group
        self._show_progress(evaluation)
        await self.dispatcher.add_eval_groups(evaluation.specs)
        task = asyncio.create_task(self._run_evaluation(evaluation), name="evaluation")
        self._current = (evaluation, task)

    async def wait_until_done(self) -> bool:
        """Wait until it is done; return True, so that callers can race this with other waits."""
        if self._current:
            _, task = self._current
            await asyncio.shield(task)
            self._current = None
        return True

    async def wait_at_most(self, seconds: float, drain: asyncio.Event) -> bool:
        """Wait for the running evaluation; after `seconds`, unfinished groups count as missing.

        Return False if a drain came first: the run is then to be left as it is."""
        if self._current is None:
            return True
        evaluation, task = self._current
        if not await wait_unless(drain, task, timeout_s=seconds):
            if drain.is_set():
                return False
            unfinished = evaluation.unfinished_groups
            _log.warning("evaluation delayed the publication too long", missing=len(unfinished))
            await self.dispatcher.drop_eval_groups(unfinished, "eval_hold")
            evaluation.done.set()
        return await self.wait_until_done()

    async def cancel_running(self) -> None:
        """Cancel the running evaluation; the next start resumes it."""
        if self._current:
            _, task = self._current
            await cancel_tasks([task])
            self._current = None

    async def _run_evaluation(self, evaluation: Evaluation) -> None:
        with self.watchdog.stage("evaluate"):
            await evaluation.done.wait()
        report = evaluation.build_report()
        version = evaluation.policy.version
        await self.journal.add_evaluation(evaluation.eval_id, evaluation.moment, version, report)
        self.reports[evaluation.eval_id] = report
        logged = eval_metrics(report)
        if self.config.engine == "tinker":
            logged["eval/num_samples"] = float(evaluation.num_samples)
        sinks = self.sinks
        sinks.tracker.log_metrics(version, logged, {})
        self.dumps.offer_eval(evaluation.eval_id, evaluation.moment, version, logged)
        sinks.alarms.judge_evaluation(version, logged)
        sinks.status.update_metrics(logged)
        if sinks.status.phase is Phase.EVALUATING:
            sinks.status.enter_phase(Phase.SAMPLING)

    def _show_progress(self, evaluation: Evaluation) -> None:
        """Update `eval/progress_done` and `eval/progress_total`.

        Both count tasks of the newest evaluation."""
        total = len(evaluation.specs)
        done = float(total - len(evaluation.unfinished_groups))
        progress = {"eval/progress_done": done, "eval/progress_total": float(total)}
        self.sinks.status.update_metrics(progress)
