"""The run, as a list of named steps.

    start ranks -> replay -> publish -> (evaluate before)
      -> [collect -> commit plan -> train -> publish -> free slots -> checkpoint] x steps
      -> evaluate after -> summary

In mode `eval`: start ranks -> replay -> publish -> evaluate -> summary.

Rollout workers sample all the while: what keeps them from running ahead are the lease slots,
which a step frees when its policy is published. Evaluations run beside training; the next
publication waits for them, so that they see one policy only.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from services.common import trace
from services.common.domain.policy import PolicyId
from services.common.errors import ConfigError
from services.common.log import bind_process, get_logger
from services.learner.groups.batcher import Batch, build_train_batch
from services.learner.journal.row_codec import count_fates
from services.learner.journal.schema import Plan
from services.learner.run.clock import Stopwatch
from services.learner.run.context import RunContext
from services.learner.run.eval_report import Moment
from services.learner.run.eval_schedule import EvalSchedule
from services.learner.run.guard_actions import judge_batch
from services.learner.run.resume_checks import check_weights_are_the_same
from services.learner.run.status import Phase
from services.learner.run.step_recorder import StepRecorder
from services.learner.run.summary import write_summary
from services.learner.types import ModelInfo, StepResult, StepSettings
from services.learner.weights.weight_broadcast import Announcement

T = TypeVar("T")
_log = get_logger(__name__)


class ReplayError(Exception):
    """Something that is needed to replay a run is gone; the message says what."""


class TrainLoop:
    """One learner's part in a run; `run_until_done` returns when it is done or drained."""

    def __init__(self, parts: RunContext, on_loaded: Callable[[ModelInfo], None]) -> None:
        """Create it; `on_loaded` is told what the ranks loaded, before anything is
        published."""
        self._parts = parts
        self._on_loaded = on_loaded
        self._config = parts.config
        self._version = 0
        self._saved_step = 0
        self._watch = Stopwatch()
        self._evals = EvalSchedule(parts)
        self._recorder = StepRecorder(parts)

    async def run_until_done(self) -> bool:
        """Run to the end. Return True when every step and evaluation is done, False when
        drained before."""
        if not await self._load_and_replay():
            return await self._stop_early()
        await self._publish_policy(None)
        if self._config.mode == "eval":
            return await self._evaluate_only()
        await self._begin_eval()
        while self._version < self._config.steps:
            batch = await self._or_drain(self._collect_batch())
            if batch is None:
                return await self._stop_early()
            ruling = await judge_batch(self._parts, batch, self._version, self._save_if_new)
            if not ruling.resync and not await self._run_step(batch, ruling.settings):
                return await self._stop_early(save=False)
        return await self._finish_run()

    # --- steps of a run

    async def _load_and_replay(self) -> bool:
        """Load the newest checkpoint and replay the plans that were committed after it.

        A policy on the way that should have been evaluated and was not is evaluated first:
        there is no way back to it. Return False if the drain came before the end."""
        parts = self._parts
        self._evals.reports = await parts.journal.load_eval_results()
        newest = await parts.checkpoints.find_newest()
        with parts.watchdog.stage("start ranks"):
            starting = parts.ranks.start_ranks(Path(newest.directory) if newest else None)
            info = await self._or_drain(starting)
        if info is None:
            return False
        self._version = self._saved_step = newest.step if newest else 0
        await check_weights_are_the_same(parts.dispatcher.lineage, parts.ranks, info)
        self._on_loaded(info)
        parts.guard.note_model(info)
        for plan in await parts.journal.plans_after(self._version):
            if plan.step != self._version + 1:
                raise ReplayError(f"the journal has no plan for step {self._version + 1}")
            if not await self._catch_up_eval():
                return False
            await self._recorder.record_replayed(plan.step, await self._train_plan(plan))
            parts.status.update_metrics({}, step=self._version)
        parts.status.update_metrics({}, step=self._version)
        _log.info("loaded", parameters=info.parameters, step=self._version)
        self._watch.end_lap()
        return True

    async def _catch_up_eval(self) -> bool:
        """Do the evaluation of this version that an earlier start began.

        Return False when drained."""
        if self._config.mode == "eval" or not self._evals.is_due(self._eval_moment, self._version):
            return True
        await self._publish_policy(None, train=False)
        await self._begin_eval()
        self._parts.status.enter_phase(Phase.EVALUATING)
        return await self._or_drain(self._evals.wait_until_done()) is not None

    async def _collect_batch(self) -> Batch:
        phase = Phase.EVALUATING if self._evals.is_running else Phase.SAMPLING
        self._parts.status.enter_phase(phase)
        with self._watch.time_stage("rollout_wait"), self._parts.watchdog.stage("collect"):
            return await self._parts.dispatcher.wait_for_batch()

    async def _run_step(self, batch: Batch, settings: StepSettings) -> bool:
        """Train on a batch and publish the result.

        Return False if the drain came while an evaluation held the publication back: the plan
        is journaled, and the next start evaluates and then trains again."""
        parts, base = self._parts, self._version
        bind_process(step=base + 1)
        plan = Plan(base + 1, batch.attempt_keys, settings)
        groups = [group.spec.group_id for group in batch.groups]
        filtered = [group.spec.group_id for group in batch.filtered]
        snapshot = parts.dispatcher.learn_from_batch(plan.step, batch)
        epoch = parts.dispatcher.run_epoch
        await parts.journal.commit_plan(plan, epoch, groups, filtered, snapshot)
        parts.dispatcher.mark_journaled(snapshot)
        parts.status.enter_phase(Phase.TRAINING)
        sync = parts.broadcast.sync_seconds
        facts = {"step": plan.step, "attempts": len(plan.attempts)}
        stage = parts.watchdog.stage("train")
        with self._watch.time_stage("train"), stage, trace.span("train", facts):
            result = parts.guard.with_metrics(await self._train_plan(plan), base)
        with self._watch.time_stage("eval_wait"):
            if not await self._evals.wait_at_most(self._config.eval.hold_s, parts.drain):
                return False
        await self._publish_policy(batch)
        if self._is_due(self._config.checkpoint.every):
            await self._save_checkpoint()
        await self._recorder.record_step(batch, result, self._watch.end_lap(), sync, base=base)
        await self._begin_eval()
        return True

    async def _train_plan(self, plan: Plan) -> StepResult:
        attempts = await self._parts.journal.load_intact(plan.attempts)
        if not attempts:
            raise ReplayError(
                f"no trajectory of step {plan.step} is what was journaled: restore the journal"
                " from a copy, or start a new run"
            )
        if any(not attempt.sequences for attempt in attempts):
            raise ReplayError(
                f"the trajectories of step {plan.step} were pruned, and no checkpoint after it"
                " can be read: restore a folder under checkpoints/, or start a new run"
            )
        result = await self._parts.ranks.train_step(
            build_train_batch(plan.step, attempts, plan.settings)
        )
        self._version = plan.step
        return result

    async def _publish_policy(self, batch: Batch | None, *, train: bool = True) -> None:
        """Announce the weights of this version, and free the slots of the step behind it.

        Without `train` nothing is leased but evaluations."""
        parts = self._parts
        parts.status.enter_phase(Phase.PUBLISHING)
        stage = parts.watchdog.stage("publish")
        with (
            self._watch.time_stage("publish"),
            stage,
            trace.span("publish", {"step": self._version}),
        ):
            publication = await parts.ranks.publish_weights(self._version)
        epoch, lineage = parts.dispatcher.run_epoch, parts.dispatcher.lineage
        policy = PolicyId(epoch, self._version, publication.fingerprint)
        known = lineage.fingerprints_of(self._version)
        if known and publication.fingerprint not in known:
            _log.warning("the replay gave other weights than before", version=self._version)
        await parts.journal.add_publication(policy)
        if parts.snapshots:
            await parts.snapshots.serve_publication(publication, policy)
        remaining = (self._config.steps - self._version) * self._config.groups_per_step
        rules = parts.dispatcher.book.rules
        train = train and self._config.mode == "train"
        parts.dispatcher.book.train_slots = min(rules.train_slots, remaining) if train else 0
        probes = parts.guard.probes_for(publication)
        parts.broadcast.announce_policy(Announcement(policy, publication, probes))
        await parts.dispatcher.advance_policy(policy, batch)
        parts.status.policy = policy
        asyncio.get_running_loop().call_later(
            self._config.publish_timeout_s, self._end_absent_leases, policy
        )

    async def _save_checkpoint(self) -> None:
        with self._watch.time_stage("checkpoint"), self._parts.watchdog.stage("checkpoint"):
            await self._parts.checkpoints.save_step(self._parts.ranks, self._version)
        self._saved_step = self._version

    async def _save_if_new(self) -> None:
        if self._saved_step < self._version:
            await self._save_checkpoint()

    async def _finish_run(self) -> bool:
        await self._save_if_new()
        if not await self._evals.wait_at_most(self._config.eval.hold_s, self._parts.drain):
            return await self._stop_early()
        if self._evals.is_due("after", self._version):
            return await self._evaluate_to_the_end("after")
        return await self._mark_done()

    async def _evaluate_only(self) -> bool:
        """Evaluate the newest policy of the run on all sets: mode `eval`."""
        if not self._parts.eval_sets:
            raise ConfigError("learner.mode is eval, but learner.eval.sets has no set to evaluate")
        return await self._evaluate_to_the_end("eval_only")

    async def _evaluate_to_the_end(self, moment: Moment) -> bool:
        await self._evals.begin_evaluation(moment)
        self._parts.status.enter_phase(Phase.EVALUATING)
        if await self._or_drain(self._evals.wait_until_done()) is None:
            return await self._stop_early()
        return await self._mark_done()

    async def _mark_done(self) -> bool:
        await self._write_summary()
        self._parts.status.enter_phase(Phase.DONE)
        return True

    async def _stop_early(self, *, save: bool = True) -> bool:
        """Leave a drained run so that it can go on later."""
        self._parts.status.enter_phase(Phase.DRAINING)
        await self._evals.cancel_running()
        if save and self._config.mode == "train":
            await self._save_if_new()
        await self._write_summary()
        return False

    async def _begin_eval(self) -> None:
        """Begin to evaluate the policy that was just published, if it should be."""
        if self._evals.is_due(self._eval_moment, self._version):
            await self._evals.begin_evaluation(self._eval_moment)

    @property
    def _eval_moment(self) -> Moment:
        return "before" if self._version == 0 else "during"

    async def _write_summary(self) -> None:
        parts = self._parts
        await parts.journal.set_meta({"seconds": parts.clock.seconds})
        by_moment = {
            eval_id.split("-")[0]: report for eval_id, report in self._evals.reports.items()
        }
        write_summary(
            parts.run_dir,
            by_moment,
            parts.clock.seconds,
            steps=self._version,
            seed=parts.seed,
            accounts=await parts.journal.run_read(count_fates),
        )

    # --- small things

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._version > 0 and self._version % every == 0

    def _end_absent_leases(self, policy: PolicyId) -> None:
        for worker_id in self._parts.broadcast.list_absent(policy):
            _log.warning(
                "a worker has not loaded in time", worker=worker_id, version=policy.version
            )
            self._parts.dispatcher.book.end_leases_of(worker_id)

    async def _or_drain(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if the drain came first."""
        task = asyncio.create_task(work)
        drained = asyncio.create_task(self._parts.drain.wait())
        try:
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for waiter in (task, drained):
                waiter.cancel()
            await asyncio.gather(task, drained, return_exceptions=True)
