"""Verdicts on what happens beside the steps: evaluations, tries, stages, files. Pure."""

from collections.abc import Mapping

from services.learner.alarms.types import ALL, Severity, Streak, TemplateError, Verdict
from services.learner.config.alarms import AlarmsConfig
from services.learner.journal.disk_incidents import Incident

NO_PROGRESS = "no_progress"
# Groups of an environment after which nobody need look for a template error any more.
CALM_GROUPS = 16
_CHARACTERS = 1000
# Why tries fail, and where to look.
_LOOK_AT = {
    "env_lost": "Its server does not start, or loses episodes: see flotilla env status and"
    " logs/env_gateway-0.log, and open one episode by hand (flotilla env try)",
    "no_grade": "Its verifier or grader fails: grade one attempt by hand (flotilla env try), and"
    " see logs/env_gateway-0.log",
    "engine_error": "The engine fails on its prompts: see logs/rollout-0.log",
    "template_error": "The chat template of policy.model does not render what its tools answer:"
    ' set rollout.prompt.profile = "full", or mend the template',
    "aborted": "Rollout workers give its attempts up: see logs/rollout-0.log",
}
_ASIDE = "The learner's log says what happened (logs/learner-0.log)"
_DAMAGE = {
    "damaged_checkpoint": "The run went on from the checkpoint before it and replays the steps"
    " between; look at the disk, and keep more (checkpoint.keep)",
    "checkpoint_failed": "The checkpoints before it are whole; free or mend the disk",
    "lost_with_disk": "The run goes on from what was left; what came after it is sampled again",
    "damaged_mark": "Nothing is known to be missing; look at the disk, and who copies its folders",
    "corrupt_record": "What is damaged is not trained on; look at the disk and its cables",
}


def failing(config: AlarmsConfig, streaks: Mapping[str, Streak]) -> list[Verdict]:
    """Environments at which nothing works any more; judged while no step ends, too."""
    return [_failing(config, env, streak) for env, streak in streaks.items()]


def _failing(config: AlarmsConfig, env: str, streak: Streak) -> Verdict:
    bad = True if streak.tries >= config.failing_tries else None if streak.tries else False
    reason, count = max(streak.reasons.items(), key=lambda item: item[1], default=("", 0))
    kind = reason.partition(":")[0].partition("/")[0]
    words = streak.words.get(reason, "")
    told = f"{reason}: {words}" if words else reason
    return Verdict(
        "failing_environment",
        env,
        bad,
        f"the last {streak.tries} tries there all failed, {count} of them with: {told}",
        _LOOK_AT.get(kind, _ASIDE),
        float(streak.tries),
        float(config.failing_tries),
        Severity.ERROR,
    )


def template_errors(newest: Mapping[str, TemplateError]) -> list[Verdict]:
    """Groups that were dropped whole; over once `CALM_GROUPS` others there were not."""
    return [_template_error(env, found) for env, found in newest.items()]


def _template_error(env: str, found: TemplateError) -> Verdict:
    since = found.groups_since
    return Verdict(
        "template_error",
        env,
        True if not since else False if since >= CALM_GROUPS else None,
        "a group was dropped whole because what its policy was to read cannot be rendered,"
        f" {found.said}"[:_CHARACTERS],
        _LOOK_AT["template_error"],
        severity=Severity.ERROR,
    )


class EvalRule:
    """Compares each evaluation of a set with the best one before it.

    pass@1 has fallen when the difference is over `eval_fall` and over 1.96 standard errors of it,
    the errors taken from the 95 % intervals: two evaluations of one policy rarely do that.
    """

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        # By set: pass@1, its standard error, the version.
        self._best: dict[str, tuple[float, float, int]] = {}

    def of(self, version: int, metrics: Mapping[str, float]) -> list[Verdict]:
        """`metrics` as they are logged: `eval/all/pass_at_1` and its interval, and so on."""
        ends = "/all/pass_at_1"
        found = [name.removesuffix(ends) for name in metrics if name.endswith(ends)]
        return [self._set(version, prefix, metrics) for prefix in found]

    def _set(self, version: int, prefix: str, metrics: Mapping[str, float]) -> Verdict:
        name = f"{prefix}/all/pass_at_1"
        value = metrics[name]
        error = (metrics[f"{name}_high"] - metrics[f"{name}_low"]) / (2 * 1.96)
        best, best_error, best_version = self._best.get(prefix, (value, error, version))
        fall = best - value
        chance = 1.96 * (error**2 + best_error**2) ** 0.5
        if value >= best:
            self._best[prefix] = (value, error, version)
        return Verdict(
            "eval_regression",
            prefix,
            fall > max(chance, self._config.eval_fall) or (False if fall <= chance / 2 else None),
            f"pass@1 fell from {best:.1%} (version {best_version}) to {value:.1%} (version"
            f" {version}), by more than chance ({chance:.1%})",
            "The policy gets better at its training tasks alone, or worse at all: compare"
            " reward/avg_pass_at_1; lower optimizer.lr, add tasks, or go back to the checkpoint"
            " before",
            value,
            best,
        )


def standstill(stage: str, seconds: float) -> Verdict:
    """A stage does not move; cleared by the next step or evaluation that ends."""
    return Verdict(
        NO_PROGRESS,
        stage,
        True,
        f"the stage has stood still for {seconds:.0f} s",
        _STANDSTILL.get(stage, "What every thread was doing is in the run's folder stacks/"),
        seconds,
        severity=Severity.ERROR,
    )


_STANDSTILL = {
    "collect": "No trajectory comes in: see whether rollout workers live and environments open"
    " (flotilla status, flotilla env status, logs/rollout-0.log)",
    "evaluate": "No evaluation attempt comes in: see whether rollout workers live and"
    " environments open (flotilla status, logs/rollout-0.log)",
    "train": "The ranks do not answer: see logs/learner-rank-0.log and the memory of their"
    " device; lower rank.pack_tokens if it is full",
    "publish": "The ranks do not hand out the weights: see logs/learner-rank-0.log and the space"
    " in /dev/shm",
    "checkpoint": "The disk does not take the checkpoint: see its space and its speed",
}


def damage(incident: Incident) -> Verdict:
    """Something on disk is not what was written. Never cleared: somebody should look."""
    return Verdict(
        incident.kind,
        ALL,
        True,
        incident.text,
        _DAMAGE.get(incident.kind, _ASIDE),
        severity=Severity.ERROR,
    )


def failed(problem: str) -> Verdict:
    """The run ends in an error. Nobody clears it."""
    return Verdict(
        "run_failed",
        ALL,
        True,
        problem[:_CHARACTERS],
        "What is journaled is kept: mend the cause and resume the run",
        severity=Severity.ERROR,
    )
