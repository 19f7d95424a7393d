"""Classes of failures: what each rule sees, and which of several is the main one."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_reading.analysis.failure_classes import RULES, classify, load_rules
from tests.reading.analysis.episode_rows import call, row, says

FOUND = call("find_issues", '[{"id": 4}]', repo="api", label="billing")
CLOSED = call("close_issue", '{"ok": true}', issue_id=4)
DONE = says("<done>")


def failed(kind: str, answer: str) -> Any:
    return call("close_issue", answer, kind, issue_id=9)


CASES = {
    "system_fault": row(reward=None, stop="engine_error", failure="engine_error"),
    "no_environment_answer": row(
        reward=None, stop="env_lost", failure="env_lost", detail="find: no answer in 30.0 s"
    ),
    "environment_fault": row(reward=None, failure="no_grade", no_grade="execution_failed"),
    "context_overflow": row(FOUND, stop="context_overflow"),
    "false_completion": row(FOUND, CLOSED, DONE),
    "authorization": row(FOUND, failed("tool_error", "403: you may not close issues"), DONE),
    "tool_arguments": row(
        FOUND, failed("bad_arguments", "'issue_id' is a required property"), DONE
    ),
    "not_found": row(FOUND, failed("tool_error", "not found"), DONE),
    "gave_up": row(FOUND, says("I cannot tell which of them you mean. <done>")),
    "never_done": row(FOUND, FOUND, FOUND, stop="max_turns"),
    "other": row(FOUND, failed("tool_error", "the issue is locked"), DONE),
}


@pytest.mark.parametrize("name", CASES)
def test_an_attempt_has_the_class_of_what_went_wrong(name: str) -> None:
    assert classify(CASES[name])[0] == name


def test_every_class_of_the_table_has_a_case() -> None:
    assert {rule.name for rule in RULES} == CASES.keys() - {"other"}


def test_a_passed_attempt_has_no_class() -> None:
    assert classify(row(failed("tool_error", "not found"), DONE, reward=1.0)) == ()


def test_a_false_claim_comes_before_the_error_that_it_hides_and_both_are_kept() -> None:
    found = classify(row(failed("tool_error", "not found"), says("I closed the issue. <done>")))
    assert found == ("false_completion", "not_found")


def test_a_cause_comes_before_the_limit_that_ended_the_attempt() -> None:
    denied = failed("tool_error", "permission denied")
    assert classify(row(denied, denied, stop="max_turns")) == ("authorization", "never_done")


def test_an_error_that_a_later_call_of_the_tool_got_past_is_no_class() -> None:
    assert classify(row(failed("tool_error", "not found"), CLOSED, DONE)) == ("false_completion",)


def test_a_tool_that_does_not_exist_is_got_past_with_another() -> None:
    wrong = call("shut_issue", "unknown tool 'shut_issue'", "bad_tool")
    counts = {"unknown_tools": {"shut_issue": 1}}
    assert classify(row(wrong, DONE, counts=counts))[0] == "tool_arguments"
    assert classify(row(wrong, FOUND, CLOSED, DONE, counts=counts)) == ("false_completion",)


def test_a_search_that_finds_nothing_is_not_found() -> None:
    for nothing in ("[]", '{"issues": [], "total": 0}', "No results found.", "Tool result:\n[]"):
        assert classify(row(call("find_issues", nothing), DONE))[0] == "not_found", nothing


def test_an_id_is_no_status_of_http() -> None:
    for text, name in (("HTTP 403", "authorization"), ("booking 403 not found", "not_found")):
        assert classify(row(failed("tool_error", text), DONE))[0] == name


def test_a_good_answer_with_an_empty_list_in_it_is_no_failed_search() -> None:
    assert classify(row(call("close_issue", '{"ok": true, "warnings": []}'), DONE)) == (
        "false_completion",
    )


def test_an_error_that_is_told_as_a_good_answer_counts() -> None:
    for text in ('{"error": "forbidden"}', "Error: forbidden", '{"ok": false, "why": "forbidden"}'):
        assert classify(row(call("close_issue", text), DONE))[0] == "authorization", text
    assert classify(row(call("close_issue", '{"error": null}'), DONE)) == ("false_completion",)


def test_an_ungraded_attempt_has_no_class_of_the_policys_behaviour() -> None:
    told = row(FOUND, CLOSED, DONE, reward=None, failure="no_grade", no_grade="judge_error")
    assert classify(told) == ("environment_fault",)


def test_rules_of_a_user_come_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from flotilla_reading.plugins import FailureRule\n"
        "RULES = [FailureRule('locked', 'It was locked.', "
        "lambda facts: any('locked' in call.answer for call in facts.calls))]\n"
    )
    rules = load_rules(path)
    assert classify(row(failed("tool_error", "it is locked"), DONE), rules)[0] == "locked"
    assert classify(row(FOUND, CLOSED, DONE), rules) == ("false_completion",)


@pytest.mark.parametrize("text", ["RULES = [1]", "import nothing_of_this_name", "RULES ="])
def test_a_file_without_rules_is_refused_with_the_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--rules: .*mine.py"):
        load_rules(path)


def test_a_file_that_imports_an_old_name_is_told_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from services.reading.analysis.failure_classes import FailureRule\n")
    new = "flotilla_reading.analysis.failure_classes"
    with pytest.raises(
        ConfigError, match=f"{new} now; plugins import from flotilla_reading.plugins"
    ):
        load_rules(path)
