"""Rules about learning, over finished steps. Pure, except for the memory of earlier steps."""

from collections.abc import Iterable, Mapping

from flotilla_learner.alarms.moving_windows import MovingRatio, RuleMemory, too_high, too_low
from flotilla_learner.alarms.types import ALL, AlarmVerdict, Severity, StepFacts
from flotilla_learner.config.alarms import AlarmsConfig

# Below this pass rate an environment without signal is too hard rather than too easy.
_HALF = 0.5
# Share of the staleness bound above which the next delay drops groups.
_NEAR = 0.9
# Measures of the mismatch guard, by level.
_MEASURES = (
    "engine and trainer agree again",
    "tokens that are far off get no gradient",
    "samples are dropped, and all engines reload",
)


class LearningRules:
    """Rules that judge whether the policy learns from its tasks."""

    def __init__(self, config: AlarmsConfig, memory: RuleMemory, *, max_staleness: int) -> None:
        self._config = config
        self._memory = memory
        self._max_staleness = max_staleness

    def judge_step(self, facts: StepFacts) -> list[AlarmVerdict]:
        """Return verdicts on everything that has enough data."""
        return [
            *self._judge_signal(facts),
            *self._judge_stale_drops(facts),
            *self._judge_staleness(facts),
            *self._judge_lengths(facts),
            *self._judge_entropy(facts),
            *self._judge_skipped(facts),
            *self._judge_guard(facts),
            *self._judge_uploads(facts),
        ]

    def _judge_signal(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.signal_ratio
        for env, (part, whole) in _with_all(facts.signal).items():
            name = "avg_pass_at_1" if env == ALL else f"{env.replace('/', '_')}/pass_at_1"
            passes = facts.metrics.get(f"reward/{name}", 0.0)
            mean = self._memory.update_mean(f"passes/{env}", passes).mean or 0.0
            ratio = self._memory.update_ratio(f"signal/{env}", facts.step, part, whole)
            if ratio.value is None:
                continue
            hard, low = passes < _HALF, too_low(ratio.value, limit)
            solved = too_high(mean, self._config.solved_share)
            yield _solved_verdict(env, ratio, facts.step, mean, low if solved else solved)
            yield AlarmVerdict(
                "signal_ratio",
                env,
                False if solved else low,
                f"in steps {ratio.since} to {facts.step} only {ratio} groups had attempts that"
                f" differ in reward; {passes:.0%} of its attempts pass",
                "The tasks are too hard: provide easier ones, more attempts (learner.group_size) or"
                " partial rewards; check that the verifier ever passes (flotilla env try)"
                if hard
                else "The tasks are too easy or too hard, with hardly any in between: see"
                " docs/sampling.md, learner.sampling.difficulty",
                ratio.value,
                limit,
            )

    def _judge_stale_drops(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        ratio = self._memory.update_ratio("stale", facts.step, *facts.stale)
        if ratio.value is None:
            return
        yield AlarmVerdict(
            "stale_drops",
            ALL,
            too_high(ratio.value, self._config.stale_share),
            f"in steps {ratio.since} to {facts.step} {ratio} groups were dropped because they"
            " were too old",
            "Long attempts are lost more often than short ones: raise learner.max_staleness, add"
            " rollout workers, or shorten attempts (rollout.max_turns)",
            ratio.value,
            self._config.stale_share,
        )

    def _judge_staleness(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        bound = self._max_staleness
        newest = facts.metrics.get("async/staleness_max", 0.0)
        yield AlarmVerdict(
            "staleness_over",
            ALL,
            newest > bound,
            f"step {facts.step} trained on tokens that are {newest:g} versions old; the bound is"
            f" {bound}",
            "This is a fault of the learner, not of the run: keep the journal and report it",
            newest,
            bound,
            Severity.ERROR,
        )
        mean = self._memory.update_mean(
            "staleness", facts.metrics.get("async/staleness_mean", 0.0)
        ).mean
        # With a bound of 1, every step of an asynchronous run is at the bound.
        if mean is None or bound < 2:
            return
        yield AlarmVerdict(
            "staleness_near",
            ALL,
            too_high(mean, _NEAR * bound),
            f"over the last {self._config.window} steps attempts were {mean:.1f} versions old on"
            f" average; the bound is {bound}",
            "Sampling is slower than training: add rollout workers, or raise"
            " learner.groups_per_step; beyond the bound groups are dropped",
            mean,
            _NEAR * bound,
        )

    def _judge_lengths(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        factor = self._config.length_factor
        for env, length in facts.lengths.items():
            level = self._memory.update_mean(f"length/{env}", length)
            if level.mean is None or not level.first:
                continue
            change = level.mean / level.first
            cause = (
                f"an attempt has {level.mean:.0f} tokens of the policy, and had"
                f" {level.first:.0f} at the start of the run"
            )
            yield AlarmVerdict(
                "length_collapse",
                env,
                too_low(change, 1 / factor),
                cause,
                "The policy gives up early: look at its attempts (flotilla show), and at what it"
                " is rewarded for; try a lower learning rate or algorithm.kl",
                change,
                1 / factor,
            )
            yield AlarmVerdict(
                "length_explosion",
                env,
                too_high(change, factor),
                cause,
                "The policy rambles or loops: look at its attempts (flotilla show); try"
                " algorithm.overlong.soft_limit, and a reduction other than token_mean",
                change,
                factor,
            )

    def _judge_entropy(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        if "policy/entropy" not in facts.metrics:
            return
        level = self._memory.update_mean("entropy", facts.metrics["policy/entropy"])
        if level.mean is None or not level.first:
            return
        limit = self._config.entropy_share
        yield AlarmVerdict(
            "entropy_collapse",
            ALL,
            too_low(level.mean / level.first, limit),
            f"the policy's entropy is {level.mean:.3g} nats a token, and was {level.first:.3g} at"
            " the start of the run",
            "Attempts at a task become alike and carry no signal: raise algorithm.clip_high or"
            " algorithm.entropy_coefficient, or lower optimizer.lr",
            level.mean / level.first,
            limit,
        )

    def _judge_skipped(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        skipped = facts.metrics.get("policy/skipped", 0.0) > 0
        recent = self._memory.update_mean("skipped", float(skipped)).mean
        yield AlarmVerdict(
            "skipped_update",
            ALL,
            # Cleared by a whole window without a skipped update.
            True if skipped else False if recent == 0 else None,
            f"an update of step {facts.step} was refused because its loss or gradient is not"
            " finite; the parameters are unchanged",
            "One may happen. If it recurs, lower optimizer.lr, look at policy/grad_norm and"
            " mismatch/is_ratio_max before it, and try float32",
            float(skipped),
            0.0,
            Severity.ERROR,
        )

    def _judge_guard(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        level = int(facts.metrics.get("mismatch/guard_level", 0.0))
        yield AlarmVerdict(
            "mismatch_guard",
            ALL,
            level > 0,
            f"engine and trainer differ more than before: {_MEASURES[min(level, 2)]}",
            "See the mismatch/* metrics and docs/mismatch.md: temperature, dtype, rope or chat"
            " template may differ between rollout and learner, or an engine holds other weights",
            float(level),
            0.0,
            Severity.ERROR if level > 1 else Severity.WARNING,
        )

    def _judge_uploads(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        failures = facts.metrics.get("checkpoint/upload_failures", 0.0)
        recent = self._memory.update_mean("uploads", failures).total
        yield AlarmVerdict(
            "upload_failing",
            ALL,
            recent > 0,
            f"{failures:.0f} uploads of checkpoints failed before step {facts.step}",
            "They are retried, and are intact on this machine: check the store that the log"
            " names, its credentials and its space (learner.checkpoint.remote)",
            recent,
        )


def _solved_verdict(
    env: str, ratio: MovingRatio, step: int, passes: float, bad: bool | None
) -> AlarmVerdict:
    """Return the good news that attempts do not differ because nearly all of them pass."""
    return AlarmVerdict(
        "solved",
        env,
        bad,
        f"in steps {ratio.since} to {step} {passes:.0%} of its attempts passed, and only {ratio}"
        " groups had attempts that differ in reward",
        "There is hardly anything left to learn from these tasks: stop, add harder ones, or give"
        " less weight to this environment",
        passes,
        severity=Severity.NOTICE,
    )


def _with_all(pairs: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Add the sum over all environments, if there is more than one."""
    if len(pairs) < 2:
        return dict(pairs)
    parts, wholes = zip(*pairs.values(), strict=True)
    return {ALL: (sum(parts), sum(wholes)), **pairs}
