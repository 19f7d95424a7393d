"""Alarms about events outside the steps, and the sinks that receive them."""

import json
from pathlib import Path

import pytest

from flotilla_common.telemetry.watchdog import Standstill
from flotilla_learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
from flotilla_learner.alarms.types import Severity, Streak
from flotilla_learner.journal.disk_incidents import Incident, Incidents
from tests.support.alarm_steps import alarms, facts


def evaluation(passes: float, half: float = 0.05, prefix: str = "eval") -> dict[str, float]:
    name = f"{prefix}/all/pass_at_1"
    return {name: passes, f"{name}_low": passes - half, f"{name}_high": passes + half}


def test_a_fall_of_an_evaluation_beyond_chance_names_both_versions() -> None:
    raiser, heard = alarms()
    for version, passes in enumerate((0.4, 0.6, 0.58)):
        raiser.judge_evaluation(version, evaluation(passes))
    assert heard.names == []
    raiser.judge_evaluation(3, evaluation(0.45))
    assert heard.names == ["+eval_regression/eval"]
    assert "fell from 60.0% (version 1) to 45.0% (version 3)" in heard.alarms[0].verdict.cause
    raiser.judge_evaluation(4, evaluation(0.59))
    assert heard.names[-1] == "-eval_regression/eval"


def test_a_fall_within_chance_and_one_of_another_set_are_none() -> None:
    raiser, heard = alarms()
    raiser.judge_evaluation(0, {**evaluation(0.6, 0.2), **evaluation(0.9, prefix="eval_greedy")})
    raiser.judge_evaluation(1, {**evaluation(0.4, 0.2), **evaluation(0.88, prefix="eval_greedy")})
    assert heard.names == []


def test_an_environment_where_every_try_fails_is_named_with_the_reason() -> None:
    raiser, heard = alarms()
    reason = "env_lost: connection refused"
    raiser.judge_tries({"shop": Streak(15, {reason: 15})})
    assert heard.names == []
    reason, words = "env_lost: UNAVAILABLE", "connection refused"
    for tries in (16, 40):
        reasons = {reason: tries - 1, "aborted": 1}
        raiser.judge_tries({"shop": Streak(tries, reasons, {reason: words})})
    assert heard.names == ["+failing_environment/shop"]
    verdict = heard.alarms[0].verdict
    assert "the last 16 tries there all failed, 15 of them with" in verdict.cause
    assert verdict.cause.endswith("with: env_lost: UNAVAILABLE: connection refused")
    assert "flotilla env status" in verdict.fix
    raiser.judge_tries({"shop": Streak(0, {})})
    assert heard.names[-1] == "-failing_environment/shop"


def test_a_stage_that_stands_still_is_cleared_by_the_next_step() -> None:
    raiser, heard = alarms()
    raiser.report_standstill(Standstill("collect", 301.0))
    raiser.report_standstill(Standstill("collect", 640.0))
    assert heard.names == ["+no_progress/collect"]
    assert "rollout workers" in heard.alarms[0].verdict.fix
    raiser.judge_step(facts(7))
    assert heard.names[-1] == "-no_progress/collect"
    assert (heard.alarms[-1].step, heard.alarms[-1].since_step) == (7, 0)


def test_damage_on_disk_is_an_alarm_that_stays() -> None:
    raiser, heard = alarms()
    incidents = Incidents()
    incidents.on_report = raiser.report_damage
    incidents.report_incident(
        "damaged_checkpoint", "the checkpoint of step 40 is damaged", "step-000040"
    )
    raiser.judge_step(facts(41))
    assert heard.names == ["+damaged_checkpoint/all"]
    assert "step-000040" in heard.alarms[0].verdict.cause
    assert "the previous checkpoint" in heard.alarms[0].verdict.fix


@pytest.mark.parametrize(("level", "severity"), [(1, Severity.WARNING), (2, Severity.ERROR)])
def test_the_mismatch_guards_level_is_an_alarm(level: int, severity: Severity) -> None:
    raiser, heard = alarms()
    raiser.judge_step(facts(1, {"mismatch/guard_level": float(level)}))
    raiser.judge_step(facts(2, {"mismatch/guard_level": 0.0}))
    assert heard.names == ["+mismatch_guard/all", "-mismatch_guard/all"]
    assert heard.alarms[0].verdict.severity is severity


def test_what_is_raised_is_a_metric_until_it_is_cleared() -> None:
    raiser, _ = alarms()
    raiser.judge_tries({"web/shop": Streak(16, {"aborted": 16})})
    assert raiser.metrics == {"alarms/failing_environment/web_shop": 1.0}
    raiser.judge_tries({"web/shop": Streak(0, {})})
    assert raiser.metrics == {}


def test_a_view_of_alarms_is_woken_by_each_change_and_by_nothing_else() -> None:
    raiser, _ = alarms()
    changes: list[list[str]] = []
    raiser.on_change = lambda: changes.append([alarm.verdict.rule for alarm in raiser.raised])
    for streak in (Streak(15, {"x": 15}), Streak(16, {"x": 16}), Streak(17, {"x": 17})):
        raiser.judge_tries({"shop": streak})
    raiser.judge_step(facts(1))
    raiser.judge_tries({"shop": Streak(0, {})})
    assert changes == [["failing_environment"], []]


def test_an_alarm_quotes_others_without_terminal_controls() -> None:
    raiser, heard = alarms()
    raiser.report_failure("\x1b[2Jtwo\nlines" + "x" * 9_999)
    cause = heard.alarms[0].verdict.cause
    assert cause.startswith("two linesxxx") and len(cause) == 700


def test_the_most_severe_comes_first() -> None:
    raiser, _ = alarms()
    raiser.judge_step(facts(1, {"mismatch/guard_level": 1.0}))
    raiser.report_failure("broken")
    assert [alarm.verdict.rule for alarm in raiser.raised] == ["run_failed", "mismatch_guard"]


def test_alarms_are_kept_in_a_file(tmp_path: Path) -> None:
    raiser, heard = alarms()
    file = JsonlAlarmSink(tmp_path / "alarms.jsonl", "run")
    raiser.report_damage(Incident("corrupt_record", "a record is damaged"))
    file.send_alarm(heard.alarms[0])
    (line,) = (tmp_path / "alarms.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert (written["alarm"], written["state"], written["severity"]) == (
        "corrupt_record",
        "raised",
        "error",
    )
    assert written["cause"] == "a record is damaged"


def test_a_file_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path: Path) -> None:
    raiser, heard = alarms()
    raiser.report_damage(Incident("corrupt_record", "a record is damaged"))
    for _ in range(2):
        JsonlAlarmSink(tmp_path / "missing" / "alarms.jsonl", "run").send_alarm(heard.alarms[0])
