"""The analysis of one evaluation of a run, as plain values: what `step_N.json` holds.

    analysis = analyze_run(Path("runs/RUN_ID"), step=None)
    analysis["failures"][0]["name"], analysis["failures"][0]["count"]

`sections.py` makes text of it."""

import sqlite3
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.pass_rates import pass_at_k
from flotilla_common.files.json_files import read_json_object
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder import dump_files
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.text.parsing import as_object
from flotilla_reading.analysis.attempt_measures import AttemptMeasures
from flotilla_reading.analysis.evaluation_files import NOT_JUDGED, choose_evaluation, read_attempts
from flotilla_reading.analysis.failure_classes import OTHER, RULES, FailureRule
from flotilla_reading.analysis.hacking_suspects import MOST_SUSPECTS, SIGNS, find_suspects
from flotilla_reading.evaluation.scores import mean_rate
from flotilla_reading.metric_series import MetricSeries
from flotilla_reading.statistics.paired import compare_paired

FORMAT = 1
# Below this share of groups with signal, sampling is mostly wasted (docs/metrics.md).
LEAST_SIGNAL = 0.25
_EXAMPLES, _MOST_TASKS = 3, 50
Attempts = Sequence[AttemptMeasures]


def analyze_run(
    run_dir: Path,
    step: int | None,
    rules: Sequence[FailureRule] = RULES,
    judged: Mapping[AttemptKey, str] = NOT_JUDGED,
) -> dict[str, Any]:
    """Analyze an evaluation, the newest for `step` None; `judged` are classes that a model gave to
    attempts that no rule knows. Raises NothingToAnalyzeError."""
    version, folder = choose_evaluation(run_dir, step)
    first, first_folder = dump_files.find_evaluations(run_dir)[0]
    after = read_attempts(folder, rules, judged)
    before = read_attempts(first_folder, rules) if first_folder != folder else []
    by_env = _by_env(after)
    spec = _read_spec(run_dir / "spec.json")
    said = as_object(spec.get("policy")).get("max_model_len")
    window = said if isinstance(said, int) else None
    return {
        **{"format": FORMAT, "written_by": str(own_version()), "run_id": run_dir.name},
        **{"step": version, "first_step": first, "context_window": window},
        "environments": {env: measure_environment(found, window) for env, found in by_env.items()},
        "failures": count_failures(after, rules),
        "before_after": compare_evaluations(before, after),
        "failures_before": _class_counts(before),
        "learning": read_learning(run_dir, version, list(by_env)),
        "tasks": {**judge_tasks(after), "standing": read_standings(run_dir)},
        "suspects": [
            {
                **_example(each.attempt),
                "score": each.score,
                "signs": [SIGNS[sign][1] for sign in each.signs],
            }
            for each in find_suspects(after)[:MOST_SUSPECTS]
        ],
    }


def measure_environment(attempts: Attempts, window: int | None) -> dict[str, Any]:
    """Measure the behaviour in one environment; rates are None without anything to divide by."""
    calls, tokens = sum(each.calls for each in attempts), sum(e.policy_tokens for e in attempts)
    most = max((each.context_tokens for each in attempts), default=0)
    return {
        "attempts": len(attempts),
        "ungraded": sum(each.reward is None for each in attempts),
        "tasks": len({each.task_key for each in attempts}),
        "avg_turns": _mean(each.turns for each in attempts),
        "avg_tool_calls": _mean(each.calls for each in attempts),
        "repeated_calls": _share(sum(each.repeats for each in attempts), calls),
        "tool_errors": _share(sum(each.tool_errors for each in attempts), calls),
        "thinking_share": _share(sum(each.thinking_tokens for each in attempts), tokens),
        "context_tokens_max": most,
        "context_use_max": _share(most, window or 0),
        "context_use_mean": _share(_mean(e.context_tokens for e in attempts) or 0, window or 0),
    }


def count_failures(
    attempts: Attempts, rules: Sequence[FailureRule] = RULES
) -> list[dict[str, Any]]:
    """Count the attempts by the main reason why they failed, most frequent first, with examples;
    `judged` counts those of them that a model classed, `also` those that have the class next to
    another main one."""
    counts = _class_counts(attempts)
    described = {rule.name: rule.description for rule in rules}
    described[OTHER] = "No rule knows why."
    failed = [each for each in attempts if each.classes]
    return [
        {
            **{"name": name, "description": described[name], "count": counts[name]},
            "share": _share(counts[name], len(attempts)),
            "judged": sum(e.judged for e in failed if e.classes[0] == name),
            "also": sum(name in each.classes[1:] for each in failed),
            "examples": [_example(e) for e in failed if e.classes[0] == name][:_EXAMPLES],
        }
        for name, _ in Counter(counts).most_common()
    ]


def _class_counts(attempts: Attempts) -> dict[str, int]:
    return dict(Counter(each.classes[0] for each in attempts if each.classes))


def _example(attempt: AttemptMeasures) -> dict[str, Any]:
    names = ("env_key", "task_key", "group_id", "attempt_index", "attempt_try")
    return {name: getattr(attempt, name) for name in names}


def compare_evaluations(before: Attempts, after: Attempts) -> list[dict[str, Any]]:
    """Compare two evaluations by set and environment; a figure is None without graded attempts.

    `difference` is that of pass@1 over the tasks that both graded, with its 95 % interval."""
    found = list[dict[str, Any]]()
    for place in sorted({(each.eval_set, each.env_key) for each in after}):
        first = [each for each in before if (each.eval_set, each.env_key) == place]
        second = [each for each in after if (each.eval_set, each.env_key) == place]
        paired = [_rewards_by_task(side, passes=True) for side in (first, second)]
        common = paired[0].keys() & paired[1].keys()
        found.append(
            {
                **{"set": place[0], "env_key": place[1]},
                **{"before": measure_success(first), "after": measure_success(second)},
                "difference": asdict(compare_paired(*paired)) if common else None,
            }
        )
    return found


def measure_success(attempts: Attempts) -> dict[str, Any]:
    """Measure pass@1 with its 95 % interval, pass@k of the largest k that every task allows, and
    the mean population variance of the rewards of a task, over tasks with two graded attempts or
    more."""
    rewards = _rewards_by_task(attempts)
    k = min(map(len, rewards.values()), default=0)
    first, best = (mean_rate(rewards.values(), pass_at_k, each) for each in (1, k))
    return {
        **{"tasks": len(rewards), "k": k},
        "ungraded": len(attempts) - sum(map(len, rewards.values())),
        "pass_at_1": first.mean if first else None,
        "interval": (first.low, first.high) if first else None,
        "pass_at_k": best.mean if best else None,
        "variance_per_prompt": _mean(
            statistics.pvariance(own) for own in rewards.values() if len(own) > 1
        ),
    }


def _rewards_by_task(attempts: Attempts, *, passes: bool = False) -> dict[str, list[float]]:
    """Return the rewards of the graded attempts, as 0 or 1 if only `passes` count."""
    found = defaultdict[str, list[float]](list)
    for each in attempts:
        if each.reward is not None:
            found[each.task_key].append(float(each.passed) if passes else each.reward)
    return found


def read_learning(run_dir: Path, last: int, envs: Sequence[str]) -> dict[str, Any]:
    """Read the signal of the training steps up to `last`, by environment, from the metrics."""
    metrics, found = MetricSeries(run_dir / METRICS_FILE), dict[str, Any]()
    for env in envs:
        prefix = f"reward/{env.replace('/', '_')}"
        signal, rates, variances = (
            dict(zip(*metrics.curve(f"{prefix}/{name}"), strict=True))
            for name in ("signal_ratio", "pass_at_1", "variance_per_prompt")
        )
        signal = {step: value for step, value in signal.items() if step <= last}
        if not signal:
            continue
        mean = statistics.fmean(signal.values())
        passes = _mean(rates[step] for step in signal if step in rates)
        found[env] = {
            **{"steps": len(signal), "signal_ratio": mean, "pass_at_1": passes},
            "steps_with_signal": _share(sum(each > 0 for each in signal.values()), len(signal)),
            "variance_per_prompt": _mean(variances[step] for step in signal),
            "verdict": _judge_signal(mean, passes),
            "curve": list(map(list, signal.items())),
        }
    return found


def _judge_signal(signal: float, passes: float | None) -> str:
    if signal >= LEAST_SIGNAL or passes is None:
        return ""
    return "too hard" if passes < 0.5 else "too easy"


def judge_tasks(attempts: Attempts) -> dict[str, Any]:
    """Return the tasks of which every graded attempt passed, or none, of several."""
    by_task = defaultdict[str, list[bool]](list)
    for each in attempts:
        if each.reward is not None:
            by_task[each.task_key].append(each.passed)
    several = {task: passed for task, passed in by_task.items() if len(passed) > 1}
    saturated = sorted(task for task, passed in several.items() if all(passed))
    impossible = sorted(task for task, passed in several.items() if not any(passed))
    return {
        "judged": len(several),
        **{"saturated": saturated[:_MOST_TASKS], "saturated_count": len(saturated)},
        **{"impossible": impossible[:_MOST_TASKS], "impossible_count": len(impossible)},
    }


def read_standings(run_dir: Path) -> dict[str, int]:
    """Return how many training tasks the curriculum holds in each standing; none without one."""
    sql = "SELECT standing, count(*) FROM curriculum_tasks GROUP BY standing ORDER BY standing"
    try:
        with open_read_only(run_dir / JOURNAL_FILE) as db:
            return dict(db.execute(sql).fetchall())
    except (JournalError, sqlite3.Error):
        # It is of another version, or on another machine.
        return {}


def _by_env(attempts: Attempts) -> dict[str, list[AttemptMeasures]]:
    found = defaultdict[str, list[AttemptMeasures]](list)
    for each in attempts:
        found[each.env_key].append(each)
    return dict(sorted(found.items()))


def _read_spec(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError:
        return {}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
