"""Rules about tasks and environments, over finished steps. Pure, except for the memory of earlier
steps."""

from collections import deque
from collections.abc import Iterable

from flotilla_learner.alarms.attempt_behavior import Conduct, find_habits
from flotilla_learner.alarms.moving_windows import RuleMemory, too_high
from flotilla_learner.alarms.types import AlarmVerdict, Severity, StepFacts
from flotilla_learner.config.alarms import AlarmsConfig


class TaskRules:
    """Rules that judge whether tasks can be played and graded."""

    def __init__(self, config: AlarmsConfig, memory: RuleMemory) -> None:
        self._config = config
        self._memory = memory
        # The newest steps with attempts in an environment, and the policy's conduct there.
        self._steps: dict[str, deque[tuple[int, Conduct]]] = {}

    def judge_step(self, facts: StepFacts) -> list[AlarmVerdict]:
        """Return verdicts on everything that has enough data."""
        return [
            *self._judge_no_grade(facts),
            *self._judge_tool_errors(facts),
            *self._judge_given_up(facts),
            *self._judge_quarantine(facts),
            *self._judge_refused(facts),
            *self._judge_no_reward(facts),
        ]

    def _judge_no_grade(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.no_grade_rate
        for env, (part, whole) in facts.no_grade.items():
            ratio = self._memory.update_ratio(f"no_grade/{env}", facts.step, part, whole)
            if ratio.value is None:
                continue
            yield AlarmVerdict(
                "no_grade_rate",
                env,
                too_high(ratio.value, limit),
                f"in steps {ratio.since} to {facts.step} the grade of {ratio} tries is not known"
                + _format_last(facts.no_grade_words.get(env, "")),
                "Look for the reason in the gateway's log (logs/env_gateway-0.log) and grade one"
                " attempt by hand (flotilla env try); these tries are not trained on",
                ratio.value,
                limit,
            )

    def _judge_tool_errors(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.tool_error_rate
        for name in facts.metrics:
            prefix, _, rest = name.partition("/")
            env, _, figure = rest.partition("/")
            if (prefix, figure) != ("environment", "tool_error_rate"):
                continue
            rate = self._memory.update_mean(f"tool_errors/{env}", facts.metrics[name]).mean
            if rate is None:
                continue
            yield AlarmVerdict(
                "tool_error_rate",
                env,
                too_high(rate, limit),
                f"over the last {self._config.window} steps {rate:.0%} of the tool calls there"
                " ended in an error",
                "Look at what the tools return (flotilla show, logs/env_gateway-0.log): the policy"
                " may call them wrongly, or the environment may be broken",
                rate,
                limit,
            )

    def _judge_given_up(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.given_up_tasks
        for env, count in facts.given_up.items():
            tasks = self._memory.update_mean(f"given_up/{env}", float(count)).total
            yield AlarmVerdict(
                "given_up_tasks",
                env,
                tasks >= limit or (False if tasks == 0 else None),
                f"{tasks:.0f} of its tasks were given up within {self._config.window} steps: too"
                " few of their attempts could be graded",
                "The log names them (a task was given up): fix the tasks or their verifier, or"
                " remove them from the task file",
                tasks,
                limit,
            )

    def _judge_quarantine(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        for name in facts.metrics:
            prefix, _, rest = name.partition("/")
            env, _, figure = rest.partition("/")
            if (prefix, figure) != ("sampling", "quarantine_refused"):
                continue
            tasks = self._memory.update_mean(f"quarantine/{env}", facts.metrics[name]).total
            yield AlarmVerdict(
                "quarantine_stopped",
                env,
                tasks > 0,
                f"{tasks:.0f} of its tasks cannot be graded within {self._config.window} steps, but"
                " are not quarantined: learner.sampling.quarantine_share allows no more",
                "The cause is more likely the environment or its verifier: see"
                " logs/env_gateway-0.log, and grade one attempt by hand (flotilla env try)",
                tasks,
                severity=Severity.ERROR,
            )

    def _judge_refused(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.failing_tries
        for env, count in facts.refused.items():
            tries = self._memory.update_mean(f"refused/{env}", float(count)).total
            yield AlarmVerdict(
                "refused_tasks",
                env,
                tries >= limit or (False if tries == 0 else None),
                f"the gateway refused to open {tries:.0f} tries at its tasks within"
                f" {self._config.window} steps" + _format_last(facts.refused_words.get(env, "")),
                "The gateway's reply is in the log, and with each attempt (flotilla show): fix"
                " the task file or the environment's entry in the spec",
                tries,
                limit,
            )

    def _judge_no_reward(self, facts: StepFacts) -> Iterable[AlarmVerdict]:
        limit = self._config.no_reward_steps
        for env, conduct in facts.conduct.items():
            steps = self._steps.setdefault(env, deque(maxlen=limit))
            steps.append((facts.step, conduct))
            played = sum((each for _, each in steps), Conduct())
            none = not played.rewarded
            found = find_habits(played)
            yield AlarmVerdict(
                "no_reward",
                env,
                False if not none else True if len(steps) == limit else None,
                f"in steps {steps[0][0]} to {facts.step} no attempt of {played.attempts} got a"
                f" reward: the policy {'; it '.join(habit.phrase for habit in found)}",
                found[0].fix,
                float(len(steps)),
                float(limit),
            )


def _format_last(words: str) -> str:
    return f"; the last one failed with: {words}" if words else ""
