"""Mismatch guard of one start of a learner: it compares, judges, remembers and orders."""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.guard.cause_search import CauseSearch, errors_by_worker
from flotilla_learner.guard.mismatch_limits import (
    ChartRules,
    ChartVerdict,
    ControlChart,
    GuardLevel,
    bound_of,
)
from flotilla_learner.guard.mismatch_report import MismatchError, write_report
from flotilla_learner.guard.probes import (
    EngineReport,
    Probe,
    ProbeResult,
    build_evidence,
    check_results,
    probe_batch,
    start_probes,
)
from flotilla_learner.guard.rescored_samples import (
    RescoredSample,
    interleave_attempts,
    load_samples,
)
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import RankError, Ranks
from flotilla_learner.types import (
    Comparison,
    ModelInfo,
    Publication,
    StepResult,
    StepSettings,
    TrainBatch,
    VersionMismatch,
)

_log = get_logger(__name__)
_GUARD_META = "guard"
# An engine may fail once; one that has reloaded and still disagrees is configured differently.
_REFUSALS = 2
_HISTORY = 64


@dataclass(frozen=True, slots=True)
class Ruling:
    """Decision about a batch: train it with `settings`, drop it and sample again, or, with
    neither, stop the run."""

    settings: StepSettings = field(default_factory=StepSettings)
    resync: bool = False
    stop: MismatchError | None = None


class MismatchGuard:
    """Guard against a mismatch of engine and trainer.

    Everything runs on one event loop; the ranks handle one call at a time."""

    def __init__(
        self,
        config: LearnerConfig,
        policy: PolicyConfig,
        ranks: Ranks,
        journal: Journal,
        run_dir: Path,
        *,
        run_epoch: int,
        state: Mapping[str, Any],
    ) -> None:
        """Create the guard; `state` is the chart that an earlier start of the run left."""
        self._config = config.guard
        self._temperature = config.temperature
        self._policy = policy
        self._ranks = ranks
        self._journal = journal
        self._run_dir = run_dir
        self._run_epoch = run_epoch
        self._rules = ChartRules(bound_of(config.guard, policy.dtype), config.guard)
        self._cause = CauseSearch(ranks, policy, config.temperature, self._rules.bound)
        self._chart = ControlChart.from_state(state)
        self._probes: tuple[Probe, ...] = ()
        self._publication: Publication | None = None
        self._vocab_size = 0
        self._banned: tuple[int, ...] = ()
        # True once samples of this start have been judged.
        self._checked = config.guard.mode == "off"
        # True once this start has given a batch to the trainer.
        self._begun = False
        self._refusals: Counter[str] = Counter()
        self._refused: asyncio.Queue[EngineReport] = asyncio.Queue()
        self._ranks_turn = asyncio.Lock()
        self._work = BackgroundTasks()
        self._metrics: dict[str, float] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)

    # --- engines

    def note_model(self, info: ModelInfo) -> None:
        """Record what the ranks hold, before anything is published."""
        self._vocab_size = info.vocab_size
        self._banned = info.banned_ids

    def probes_for(self, publication: Publication) -> tuple[Probe, ...]:
        """Return the probes for a publication: none once a step has been trained."""
        self._publication = publication
        if self._begun or self._config.mode == "off":
            self._probes = ()
        else:
            self._probes = start_probes(
                self._policy, self._vocab_size, self._temperature, self._banned
            )
        return self._probes

    async def probes_agree(
        self, worker_id: str, policy: PolicyId, results: Sequence[ProbeResult]
    ) -> bool:
        """Return True if an engine samples what the trainer expects of it, or sent no results.

        Raises ProbeError. The comparison continues if the caller goes away, because the ranks are
        busy with it and must not get another one meanwhile."""
        if self._begun or not results:
            return True
        return await self._work.run_shielded(self._probes_agree(worker_id, policy, results))

    async def _probes_agree(
        self, worker_id: str, policy: PolicyId, results: Sequence[ProbeResult]
    ) -> bool:
        async with self._ranks_turn:
            if self._begun or not self._probes:
                return True
            check_results(self._probes, results, self._vocab_size)
            batch = probe_batch(policy.version, self._probes, results)
            try:
                found = (await self._ranks.compare_batch(batch)).versions.get(policy.version)
            except RankError as error:
                # The ranks have moved to other weights, or died, which the loop will notice.
                _log.warning("probes cannot be judged", worker=worker_id, reason=str(error))
                return True
        if found is None:
            return True
        excesses = self._rules.bound.find_excesses(policy.version, found)
        shown = {"worker": worker_id, "abs_diff": found.abs_diff, "tail": found.abs_diff_tail}
        if excesses:
            _log.error("probes disagree", **shown, over=[str(excess) for excess in excesses])
        else:
            _log.info("probes agree", **shown, tokens=found.tokens)
        return not excesses or self._config.mode == "warn"

    def note_refusal(
        self,
        worker_id: str,
        policy: PolicyId,
        canary: NDArray[np.float32],
        results: Sequence[ProbeResult],
    ) -> None:
        """Record an engine's refusal.

        Before the first step, the second one of a worker ends the run."""
        self._refusals[worker_id] += 1
        if self._config.mode != "enforce" or self._begun:
            return
        if self._refusals[worker_id] >= _REFUSALS:
            self._refused.put_nowait(EngineReport(worker_id, policy, canary, tuple(results)))

    async def wait_for_mismatch(self) -> None:
        """Wait for an engine that cannot be brought to agree; raises MismatchError."""
        answer = await self._refused.get()
        async with self._ranks_turn:
            source, batch = build_evidence(answer, self._publication, self._probes)
            workers = [answer.worker_id] * len(batch.sequences)
            finding = await self._cause.find_cause("start", source, batch, workers)
        raise write_report(self._run_dir, finding)

    # --- batches

    async def before_step(self, batch: Batch, version: int) -> Ruling:
        """Judge a batch's samples against the weights that sampled them, before any update.

        Raises MismatchError, with the report written, if the run must not start.
        """
        if self._config.mode == "off":
            return Ruling()
        async with self._ranks_turn:
            chosen, own = await self._choose_samples(batch, version)
            comparison = await self._compare_samples(chosen, version)
            if own and version in comparison.versions:
                await self._check_start(chosen, comparison, version)
            elif not self._checked:
                _log.warning("this start sampled none of the batch: checked later")
            ruling = await self._make_ruling(chosen, comparison, version)
        self._begun = self._begun or not (ruling.resync or ruling.stop)
        await self._journal.set_meta({_GUARD_META: self._chart.to_state()})
        return ruling

    def with_metrics(self, result: StepResult, base: int) -> StepResult:
        """Return a result with the `mismatch/*` metrics of docs/mismatch.md, for the step that
        began at `base`."""
        drift = {
            f"mismatch/kl_staleness_{base - version}": found.kl
            for version, found in result.versions.items()
        }
        return replace(result, metrics={**result.metrics, **self._metrics, **drift})

    # --- inside

    async def _choose_samples(
        self, batch: Batch, version: int
    ) -> tuple[list[RescoredSample], bool]:
        """Choose the samples to compare; also return whether they are this start's own.

        Until this start has been judged, they are those that its own engines sampled from the
        newest weights. After that, or without any, they are any of the batch."""
        groups = batch.groups
        if not self._checked:
            own = await load_samples(
                self._journal,
                interleave_attempts(groups),
                version,
                epoch=self._run_epoch,
                tokens=self._config.start_tokens,
            )
            if own:
                return own, True
        tokens = self._config.audit_tokens
        if not tokens:
            return [], False
        found = await load_samples(
            self._journal, interleave_attempts(groups), version, epoch=None, tokens=tokens
        )
        return found, False

    async def _compare_samples(self, chosen: Sequence[RescoredSample], version: int) -> Comparison:
        if not chosen:
            return Comparison()
        return await self._ranks.compare_batch(_samples_to_batch(chosen, version))

    async def _check_start(
        self, chosen: Sequence[RescoredSample], comparison: Comparison, version: int
    ) -> None:
        found = comparison.versions[version]
        self._checked = True
        excesses = self._rules.bound.find_excesses(version, found)
        if not excesses:
            _log.info(
                "engine and trainer agree",
                tokens=found.tokens,
                abs_diff=found.abs_diff,
                tail=found.abs_diff_tail,
                kl=found.kl,
            )
            return
        workers = [sample.worker_id for sample in chosen]
        finding = await self._cause.find_cause(
            "start", "samples", _samples_to_batch(chosen, version), workers
        )
        error = write_report(self._run_dir, finding)
        if self._config.mode == "enforce":
            raise error
        _log.error("engine and trainer disagree", reason=str(error))

    async def _make_ruling(
        self, chosen: Sequence[RescoredSample], comparison: Comparison, version: int
    ) -> Ruling:
        before = self._chart.level
        self._chart, verdict = self._chart.observe_versions(comparison.versions, self._rules)
        self._note_metrics(comparison.versions, version)
        if verdict.excesses or verdict.level is not before:
            self._log_change(before, verdict, chosen, comparison)
        if self._config.mode == "warn":
            return Ruling()
        settings = StepSettings()
        if verdict.level >= GuardLevel.MASK:
            settings = StepSettings(ratio_limit=self._config.ratio_limit)
        if verdict.level is not GuardLevel.STOP:
            return Ruling(settings, resync=verdict.resync)
        workers = [sample.worker_id for sample in chosen]
        finding = await self._cause.find_cause(
            "run", "samples", _samples_to_batch(chosen, version), workers
        )
        finding = replace(finding, excesses=verdict.excesses)
        return Ruling(settings, stop=write_report(self._run_dir, finding, list(self._history)))

    def _log_change(
        self,
        before: GuardLevel,
        verdict: ChartVerdict,
        chosen: Sequence[RescoredSample],
        comparison: Comparison,
    ) -> None:
        over = [str(excess) for excess in verdict.excesses]
        worst = errors_by_worker([sample.worker_id for sample in chosen], comparison)[:1]
        log = _log.error if verdict.excesses else _log.info
        levels = {"was": before.name.lower(), "level": verdict.level.name.lower()}
        log("mismatch guard", **levels, over=over, worst=worst, acts=self._config.mode)

    def _note_metrics(self, versions: Mapping[int, VersionMismatch], version: int) -> None:
        kl_limit, tail_limit = self._chart.current_limits(self._rules)
        self._metrics = {
            "mismatch/guard_level": float(self._chart.level),
            "mismatch/kl_limit": kl_limit,
            "mismatch/tail_limit": tail_limit,
            "mismatch/audit_tokens": float(sum(found.tokens for found in versions.values())),
        }
        if versions:
            worst = max(versions.values(), key=lambda found: found.abs_diff_tail)
            self._metrics["mismatch/audit_kl"] = worst.kl
            self._metrics["mismatch/audit_abs_diff_mean"] = worst.abs_diff
            self._metrics["mismatch/audit_abs_diff_tail"] = worst.abs_diff_tail
            largest = max(found.abs_diff_max for found in versions.values())
            self._metrics["mismatch/audit_abs_diff_max"] = largest
        self._history.append({"step": version + 1, **self._metrics})


async def load_guard(
    config: LearnerConfig,
    policy: PolicyConfig,
    ranks: Ranks,
    journal: Journal,
    run_dir: Path,
    run_epoch: int,
) -> MismatchGuard:
    """Create the guard of this start, with the state of earlier starts from the journal."""
    state = (await journal.read_meta()).get(_GUARD_META, {})
    return MismatchGuard(config, policy, ranks, journal, run_dir, run_epoch=run_epoch, state=state)


def _samples_to_batch(chosen: Sequence[RescoredSample], version: int) -> TrainBatch:
    files = {name: data for sample in chosen for name, data in sample.pictures.items()}
    return TrainBatch(version + 1, tuple(sample.sequence for sample in chosen), pictures=files)
