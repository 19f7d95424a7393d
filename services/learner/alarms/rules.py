"""The rules over finished steps. Pure, but for what they remember of the steps before."""

from collections.abc import Iterable, Mapping

from services.learner.alarms.config import AlarmsConfig
from services.learner.alarms.types import ALL, Severity, StepFacts, Verdict
from services.learner.alarms.windows import Level, Ratio, too_high, too_low

# Below this share of passes an environment without signal is too hard rather than too easy.
_HALF = 0.5
# A mean staleness above this share of the bound: the next delay drops groups.
_NEAR = 0.9


class StepRules:
    """Judges each step by those before it."""

    def __init__(
        self, config: AlarmsConfig, *, max_staleness: int, firsts: Mapping[str, float]
    ) -> None:
        """`firsts` is what `firsts` of an earlier start said."""
        self._config = config
        self._max_staleness = max_staleness
        self._ratios: dict[str, Ratio] = {}
        self._levels: dict[str, Level] = {}
        self._firsts = dict(firsts)

    @property
    def firsts(self) -> dict[str, float]:
        """Means over the first steps of the run, which later ones are compared with."""
        found = {name: level.first for name, level in self._levels.items()}
        return self._firsts | {n: first for n, first in found.items() if first is not None}

    def of(self, facts: StepFacts) -> list[Verdict]:
        """Verdicts on everything of which there is enough to judge."""
        return [
            *self._signal(facts),
            *self._no_grade(facts),
            *self._stale(facts),
            *self._staleness(facts),
            *self._lengths(facts),
            *self._entropy(facts),
            *self._skipped(facts),
            *self._given_up(facts),
            *self._quarantine(facts),
        ]

    def _signal(self, facts: StepFacts) -> Iterable[Verdict]:
        limit = self._config.signal_ratio
        for env, (part, whole) in _with_all(facts.signal).items():
            ratio = self._ratio(f"signal/{env}", facts.step, part, whole)
            if ratio.value is None:
                continue
            name = "reward/avg_pass_at_1" if env == ALL else f"reward/{env}/pass_at_1"
            passes = facts.metrics.get(name, 0.0)
            hard = passes < _HALF
            yield Verdict(
                "signal_ratio",
                env,
                too_low(ratio.value, limit),
                f"in steps {ratio.since} to {facts.step} only {_of(ratio)} groups had attempts that"
                f" differ in reward; {passes:.0%} of its attempts pass",
                "The tasks are too hard: give easier ones, more attempts (learner.group_size), or"
                " partial rewards; check that the verifier ever passes (flotilla env try)"
                if hard
                else "The tasks are solved: give harder ones, or less weight to this environment",
                ratio.value,
                limit,
            )

    def _no_grade(self, facts: StepFacts) -> Iterable[Verdict]:
        limit = self._config.no_grade_rate
        for env, (part, whole) in facts.no_grade.items():
            ratio = self._ratio(f"no_grade/{env}", facts.step, part, whole)
            if ratio.value is None:
                continue
            yield Verdict(
                "no_grade_rate",
                env,
                too_high(ratio.value, limit),
                f"in steps {ratio.since} to {facts.step} the grade of {_of(ratio)} tries is not"
                " known",
                "Look for the reason in the gateway's log (logs/env_gateway-0.log) and grade one"
                " attempt by hand (flotilla env try); these tries are not trained on",
                ratio.value,
                limit,
            )

    def _stale(self, facts: StepFacts) -> Iterable[Verdict]:
        ratio = self._ratio("stale", facts.step, *facts.stale)
        if ratio.value is None:
            return
        yield Verdict(
            "stale_drops",
            ALL,
            too_high(ratio.value, self._config.stale_share),
            f"in steps {ratio.since} to {facts.step} {_of(ratio)} groups were dropped because they"
            " were too old",
            "Long attempts are lost more often than short ones: raise learner.max_staleness, add"
            " rollout workers, or shorten attempts (rollout.max_turns)",
            ratio.value,
            self._config.stale_share,
        )

    def _staleness(self, facts: StepFacts) -> Iterable[Verdict]:
        bound = self._max_staleness
        newest = facts.metrics.get("async/staleness_max", 0.0)
        yield Verdict(
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
        mean = self._level("staleness", facts.metrics.get("async/staleness_mean", 0.0)).mean
        # With a bound of 1 every step of an asynchronous run is at the bound.
        if mean is None or bound < 2:
            return
        yield Verdict(
            "staleness_near",
            ALL,
            too_high(mean, _NEAR * bound),
            f"over the last {self._config.window} steps attempts were {mean:.1f} versions old in"
            f" the mean; the bound is {bound}",
            "Sampling is slower than training: add rollout workers, or raise"
            " learner.groups_per_step; beyond the bound groups are dropped",
            mean,
            _NEAR * bound,
        )

    def _lengths(self, facts: StepFacts) -> Iterable[Verdict]:
        factor = self._config.length_factor
        for env, length in facts.lengths.items():
            level = self._level(f"length/{env}", length)
            if level.mean is None or not level.first:
                continue
            change = level.mean / level.first
            told = (
                f"an attempt has {level.mean:.0f} tokens of the policy, and had"
                f" {level.first:.0f} at the start of the run"
            )
            yield Verdict(
                "length_collapse",
                env,
                too_low(change, 1 / factor),
                told,
                "The policy gives up early: look at its attempts (flotilla show), and at what it"
                " is rewarded for; try a lower learning rate or algorithm.kl",
                change,
                1 / factor,
            )
            yield Verdict(
                "length_explosion",
                env,
                too_high(change, factor),
                told,
                "The policy rambles or loops: look at its attempts (flotilla show); try"
                " algorithm.overlong.soft_limit, and reduction other than token_mean",
                change,
                factor,
            )

    def _entropy(self, facts: StepFacts) -> Iterable[Verdict]:
        if "policy/entropy" not in facts.metrics:
            return
        level = self._level("entropy", facts.metrics["policy/entropy"])
        if level.mean is None or not level.first:
            return
        limit = self._config.entropy_share
        yield Verdict(
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

    def _skipped(self, facts: StepFacts) -> Iterable[Verdict]:
        skipped = facts.metrics.get("policy/skipped", 0.0) > 0
        recent = self._level("skipped", float(skipped)).mean
        yield Verdict(
            "skipped_update",
            ALL,
            # Cleared by a whole window without one.
            True if skipped else False if recent == 0 else None,
            f"an update of step {facts.step} was refused because its loss or gradient is not"
            " finite; the parameters stayed as they were",
            "Once may happen. Again: lower optimizer.lr, look at policy/grad_norm and"
            " mismatch/is_ratio_max before it, and try float32",
            float(skipped),
            0.0,
            Severity.ERROR,
        )

    def _given_up(self, facts: StepFacts) -> Iterable[Verdict]:
        limit = self._config.given_up_tasks
        for env, count in facts.given_up.items():
            tasks = self._level(f"given_up/{env}", float(count)).total
            yield Verdict(
                "given_up_tasks",
                env,
                tasks >= limit or (False if tasks == 0 else None),
                f"{tasks:.0f} of its tasks were given up within {self._config.window} steps: too"
                " few of their attempts could be graded",
                "The log names them (a task was given up): mend the tasks or their verifier, or"
                " take them out of the task file",
                tasks,
                limit,
            )

    def _quarantine(self, facts: StepFacts) -> Iterable[Verdict]:
        ending = "/quarantine_refused"
        names = [n for n in facts.metrics if n.startswith("sampling/") and n.endswith(ending)]
        for name in names:
            env = name.removeprefix("sampling/").removesuffix(ending)
            tasks = self._level(f"quarantine/{env}", facts.metrics[name]).total
            yield Verdict(
                "quarantine_stopped",
                env,
                tasks > 0,
                f"{tasks:.0f} of its tasks cannot be graded within {self._config.window} steps, but"
                " are not quarantined: as many as learner.sampling.quarantine_share allows are",
                "It is rather the environment or its verifier that does not work: see"
                " logs/env_gateway-0.log, and grade one attempt by hand (flotilla env try)",
                tasks,
                severity=Severity.ERROR,
            )

    def _ratio(self, name: str, step: int, part: int, whole: int) -> Ratio:
        ratio = self._ratios.get(name)
        if ratio is None:
            ratio = self._ratios[name] = Ratio(self._config.window, self._config.count)
        ratio.add(step, part, whole)
        return ratio

    def _level(self, name: str, value: float) -> Level:
        level = self._levels.get(name)
        if level is None:
            level = self._levels[name] = Level(self._config.window, self._firsts.get(name))
        level.add(value)
        return level


def _with_all(pairs: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """With the sum of all environments, where there is more than one."""
    if len(pairs) < 2:
        return dict(pairs)
    parts, wholes = zip(*pairs.values(), strict=True)
    return {ALL: (sum(parts), sum(wholes)), **pairs}


def _of(ratio: Ratio) -> str:
    return f"{ratio.part} of {ratio.whole} ({ratio.part / ratio.whole:.0%})"
