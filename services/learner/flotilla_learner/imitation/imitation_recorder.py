"""Logging of each step of a run that imitates, exactly once: to the trackers, the status and the
journal."""

from collections.abc import Mapping, Sequence

from flotilla_learner.alarms.types import StepFacts
from flotilla_learner.dumps.jobs import ImitationJob
from flotilla_learner.imitation.demonstration_set import DemonstrationSet
from flotilla_learner.run.run_record import RunRecord
from flotilla_learner.types import BatchScore, StepResult, TrainBatch

# What compares the policy with one that sampled, and `policy/loss`, which is `sft/loss`.
_OF_SAMPLES = frozenset({"policy/loss", "policy/clip_ratio", "policy/correction_weight"})
_STAGES = ("train", "score", "publish", "eval_wait", "checkpoint")
_HISTOGRAMS = ("policy/token_entropy", "policy/response_tokens")


class ImitationRecorder:
    """Records steps that imitate."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    @property
    def logged_step(self) -> int:
        """The newest step that was logged, over all starts of the run."""
        return self._record.logged_step

    def record_start(self, score: BatchScore | None) -> None:
        """Record the loss of the initial policy on what is held out."""
        if score is not None:
            self._record.sinks.tracker.log_metrics(0, _heldout_metrics(score), {})

    def dump_step(
        self, step: int, imitated: DemonstrationSet, places: Sequence[int], result: StepResult
    ) -> None:
        """Have the sequences that a step imitated written, with the numbers of their tokens."""
        token_file = str(result.token_file) if result.token_file else None
        self._record.dumps.offer_imitation(
            ImitationJob(
                *(step, token_file, imitated.path, imitated.sha256),
                tuple(imitated.trained[place].place for place in places),
                imitated.longest,
            )
        )

    async def record_step(
        self,
        batch: TrainBatch,
        epochs: float,
        result: StepResult,
        score: BatchScore | None,
        lap: tuple[dict[str, float], float] | None,
    ) -> None:
        """Record a finished step, unless an earlier start has.

        `epochs` are those behind it, `score` is that of the held-out sequences, and `lap` the
        seconds of its stages and their total, None if it was trained again after a restart."""
        record, sinks = self._record, self._record.sinks
        if batch.step <= record.logged_step:
            return
        metrics = imitation_metrics(batch, epochs, result)
        if score is not None:
            metrics.update(_heldout_metrics(score))
        if lap is not None:
            metrics.update(self._run_metrics(batch, lap))
        # Entropy falls in the course of imitation, which is no fault.
        judged = {key: value for key, value in metrics.items() if key != "policy/entropy"}
        sinks.alarms.judge_step(_make_facts(batch.step, judged))
        metrics["alarms/raised"] = float(sinks.alarms.count)
        shapes = {name: shape for name, shape in result.histograms.items() if name in _HISTOGRAMS}
        sinks.tracker.log_metrics(batch.step, metrics, shapes)
        left = record.seconds_left(batch.step, None, 0)
        sinks.status.update_metrics({**metrics, **left}, step=batch.step)
        await record.remember_step(batch.step)

    def _run_metrics(
        self, batch: TrainBatch, lap: tuple[dict[str, float], float]
    ) -> dict[str, float]:
        """Return times and costs of a step of this start."""
        record, (stages, whole) = self._record, lap
        record.clock.note_step(whole)
        tokens = sum(len(each.token_ids) for each in batch.sequences)
        return {
            **{f"timing/{name}": stages.get(name, 0.0) for name in _STAGES},
            "timing/step": whole,
            "throughput/tokens_per_sec_train": tokens / max(stages.get("train", 0.0), 1e-9),
            **record.first_step_metrics,
            **record.checkpoint_metrics(),
            **record.dumps.metrics(),
            **record.launcher_metrics(),
        }


def imitation_metrics(batch: TrainBatch, epochs: float, result: StepResult) -> dict[str, float]:
    """Return what a step itself tells:

    - sft/loss: mean negative log-likelihood of the step's trained tokens before its update, in
      nats; absent if the update was refused
    - sft/tokens, sft/sequences: trained tokens of the step, and its sequences
    - sft/epoch: epochs behind the step
    - policy/*: those of an update that have a meaning without samples"""
    own = {
        name: value
        for name, value in result.metrics.items()
        if name.startswith("policy/") and name not in _OF_SAMPLES
    }
    loss = {} if result.skipped else {"sft/loss": result.metrics["policy/loss"]}
    return {
        "policy/skipped": float(result.skipped),
        **own,
        **loss,
        "sft/tokens": float(sum(int(each.policy_mask.sum()) for each in batch.sequences)),
        "sft/sequences": float(len(batch.sequences)),
        "sft/epoch": epochs,
    }


def _heldout_metrics(score: BatchScore) -> dict[str, float]:
    return {"sft/heldout_loss": score.loss}


def _make_facts(step: int, metrics: Mapping[str, float]) -> StepFacts:
    """Return the facts that alarms judge: those of updates and uploads alone."""
    none: dict[str, tuple[int, int]] = {}
    return StepFacts(step, metrics, none, none, (0, 0), {}, {}, {})
