"""Verdicts on events outside the steps: evaluations, tries, stages, files. Pure."""

from collections.abc import Mapping

from flotilla_learner.alarms.types import ALL, AlarmVerdict, Severity, SpoiledGroup, Streak
from flotilla_learner.config.alarms import AlarmsConfig
from flotilla_learner.journal.disk_incidents import Incident

NO_PROGRESS = "no_progress"
# Groups of an environment after which the failure that spoiled one counts as gone.
CALM_GROUPS = 16
_CHARACTERS = 1000
# Where to look, by the reason why tries fail.
_LOOK_AT = {
    "env_lost": "Its server does not start, or loses episodes: see flotilla env status and"
    " logs/env_gateway-0.log, and open one episode by hand (flotilla env try)",
    "no_grade": "Its verifier or grader fails: grade one attempt by hand (flotilla env try), and"
    " see logs/env_gateway-0.log",
    "engine_error": "The engine fails on its prompts: see logs/rollout-0.log",
    "template_error": "The chat template of policy.model does not render its tool results:"
    ' set rollout.dialect.name = "full", or fix the template',
    "refused_by_learner": "This is a bug, which selects among attempts: keep the run's folder, and"
    " report it with logs/rollout-0.log and logs/learner-0.log",
    "aborted": "Rollout workers abandon its attempts: see logs/rollout-0.log",
}
# By the failure of the attempt that spoils its group.
_SPOILED = {
    "template_error": "the policy's input cannot be rendered",
    "refused_by_learner": "the learner refused what a rollout worker submitted",
}
_ASIDE = "The learner's log has the details (logs/learner-0.log)"
_DAMAGE = {
    "damaged_checkpoint": "The run resumed from the previous checkpoint and replays the steps"
    " in between; check the disk, and keep more checkpoints (checkpoint.keep)",
    "checkpoint_failed": "Earlier checkpoints are intact; free or repair the disk",
    "lost_with_disk": "The run resumed from what was left; what came after it is sampled again",
    "damaged_mark": "Nothing is known to be missing; check the disk, and what copies its folders",
    "lost_metrics": "Training is not affected; restore the file from a copy for the curves",
    "corrupt_record": "Damaged records are not trained on; check the disk and its cables",
}


def judge_streak(config: AlarmsConfig, env: str, streak: Streak) -> AlarmVerdict:
    """Judge an environment where every try fails; also called while no step ends."""
    bad = True if streak.tries >= config.failing_tries else None if streak.tries else False
    reason, count = max(streak.reasons.items(), key=lambda item: item[1], default=("", 0))
    kind = reason.partition(":")[0].partition("/")[0]
    words = streak.words.get(reason, "")
    detail = f"{reason}: {words}" if words else reason
    return AlarmVerdict(
        "failing_environment",
        env,
        bad,
        f"the last {streak.tries} tries there all failed, {count} of them with: {detail}",
        _LOOK_AT.get(kind, _ASIDE),
        float(streak.tries),
        float(config.failing_tries),
        Severity.ERROR,
    )


def judge_spoiled(env: str, kind: str, found: SpoiledGroup) -> AlarmVerdict:
    """Judge groups dropped because of one attempt; cleared after `CALM_GROUPS` sound groups."""
    since = found.groups_since
    return AlarmVerdict(
        kind,
        env,
        True if not since else False if since >= CALM_GROUPS else None,
        f"a group was dropped whole because {_SPOILED[kind]}, {found.message}"[:_CHARACTERS],
        _LOOK_AT[kind],
        severity=Severity.ERROR,
    )


class EvalRule:
    """Compares each evaluation of a set with the best earlier one.

    pass@1 has fallen if the difference exceeds both `eval_fall` and 1.96 of its standard
    errors, taken from the 95 % intervals: two evaluations of one policy rarely differ that
    much."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        # By set: pass@1, its standard error, the version.
        self._best: dict[str, tuple[float, float, int]] = {}

    def judge_evaluation(self, version: int, metrics: Mapping[str, float]) -> list[AlarmVerdict]:
        """Judge an evaluation by its logged `metrics`: `eval/all/pass_at_1`, its interval, and
        so on."""
        ends = "/all/pass_at_1"
        found = [name.removesuffix(ends) for name in metrics if name.endswith(ends)]
        return [self._judge_set(version, prefix, metrics) for prefix in found]

    def _judge_set(self, version: int, prefix: str, metrics: Mapping[str, float]) -> AlarmVerdict:
        name = f"{prefix}/all/pass_at_1"
        value = metrics[name]
        error = (metrics[f"{name}_high"] - metrics[f"{name}_low"]) / (2 * 1.96)
        best, best_error, best_version = self._best.get(prefix, (value, error, version))
        fall = best - value
        chance = 1.96 * (error**2 + best_error**2) ** 0.5
        if value >= best:
            self._best[prefix] = (value, error, version)
        return AlarmVerdict(
            "eval_regression",
            prefix,
            fall > max(chance, self._config.eval_fall) or (False if fall <= chance / 2 else None),
            f"pass@1 fell from {best:.1%} (version {best_version}) to {value:.1%} (version"
            f" {version}), by more than chance ({chance:.1%})",
            "The policy improves only on its training tasks, or gets worse overall: compare"
            " reward/avg_pass_at_1; lower optimizer.lr, add tasks, or return to the previous"
            " checkpoint",
            value,
            best,
        )


def standstill_verdict(stage: str, seconds: float) -> AlarmVerdict:
    """Return the verdict on a stalled stage; cleared when the next step or evaluation ends."""
    return AlarmVerdict(
        NO_PROGRESS,
        stage,
        True,
        f"the stage has made no progress for {seconds:.0f} s",
        _STANDSTILL.get(stage, "The run's folder stacks/ shows what every thread was doing"),
        seconds,
        severity=Severity.ERROR,
    )


_STANDSTILL = {
    "collect": "No trajectory arrives: check that rollout workers live and environments open"
    " (flotilla status, flotilla env status, logs/rollout-0.log)",
    "evaluate": "No evaluation attempt arrives: check that rollout workers live and"
    " environments open (flotilla status, logs/rollout-0.log)",
    "ask teacher": "The server of learner.teacher.url does not answer, or too slowly: see its log",
    "train": "The ranks do not answer: see logs/learner-rank-0.log and the memory of their"
    " device; lower rank.pack_tokens if it is full",
    "publish": "The ranks do not deliver the weights: see logs/learner-rank-0.log and the space"
    " in /dev/shm",
    "checkpoint": "The disk does not accept the checkpoint: check its space and its speed",
}


def teacher_verdict(*, bad: bool, cause: str = "", seconds: float = 0.0) -> AlarmVerdict:
    """Return the verdict on a teacher that gives no answers; cleared by its next one."""
    return AlarmVerdict(
        "teacher_down",
        ALL,
        bad,
        f"the teacher has answered nothing for {seconds:.0f} s: {cause}"[:_CHARACTERS],
        "The run waits, and goes on with its next answer: start the server of learner.teacher.url"
        " again, or see why it is slow",
        seconds,
        severity=Severity.ERROR,
    )


def judge_down_verdict(*, bad: bool, cause: str = "", seconds: float = 0.0) -> AlarmVerdict:
    """Return the verdict on a judge that gives no answers; cleared by its next one."""
    return AlarmVerdict(
        "judge_down",
        ALL,
        bad,
        f"the judge has answered nothing for {seconds:.0f} s: {cause}"[:_CHARACTERS],
        "Its groups wait, and go on with its next answer: see whether learner.judge.url serves",
        seconds,
        severity=Severity.ERROR,
    )


def judge_failing_verdict(*, bad: bool, cause: str = "", groups: int = 0) -> AlarmVerdict:
    """Return the verdict on a judge whose answers name no scores; cleared by the next that do."""
    return AlarmVerdict(
        "judge_failing",
        ALL,
        bad,
        f"the last {groups} groups have no verdict, and so no grades: {cause}"[:_CHARACTERS],
        "See its answers in the table `verdicts` of the run's journal: choose a model that writes"
        " the JSON asked for, shorten learner.judge.instructions, or raise learner.judge.max_tokens"
        " or timeout_s",
        float(groups),
        severity=Severity.ERROR,
    )


def judge_budget_verdict(*, bad: bool, used: int = 0, most: int = 0) -> AlarmVerdict:
    """Return the verdict on a judge's budget that is nearly used up."""
    return AlarmVerdict(
        "judge_budget",
        ALL,
        bad,
        f"{used} of the run's {most} answers of the judge are used",
        "The run stops when all are: raise learner.judge.max_calls then, and resume it with"
        " --update",
        float(used),
        float(most),
    )


def damage_verdict(incident: Incident) -> AlarmVerdict:
    """Return the verdict on damage on disk. Never cleared: a person should look at it."""
    return AlarmVerdict(
        incident.kind,
        ALL,
        True,
        incident.text,
        _DAMAGE.get(incident.kind, _ASIDE),
        severity=Severity.ERROR,
    )


def failure_verdict(problem: str) -> AlarmVerdict:
    """Return the verdict on a run that ends in an error. Never cleared."""
    return AlarmVerdict(
        "run_failed",
        ALL,
        True,
        problem[:_CHARACTERS],
        "The journal is intact: fix the cause and resume the run",
        severity=Severity.ERROR,
    )
