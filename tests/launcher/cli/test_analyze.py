"""`flotilla analyze`: what it prints and writes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flotilla_launcher.cli.app import app
from tests.reading.analysis.episode_rows import call, row, says, write_evaluation
from tests.support.scripted_model import MODEL, as_answer, serve_model

RUN = "demo-20261128-120000"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "journal.sqlite").touch()
    write_evaluation(tmp_path / RUN, 2, [row(says("I closed it. <done>"))])
    return tmp_path


def analyze(runs: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["analyze", RUN, "--runs", str(runs), *words])
    return result.exit_code, result.output


def test_it_prints_the_sections_and_the_files(runs: Path) -> None:
    code, printed = analyze(runs)
    assert code == 0
    for part in ("Why attempts fail", "false_completion", "Signal in training", "step_2.html"):
        assert part in printed


def test_json_is_that_of_the_file(runs: Path) -> None:
    code, printed = analyze(runs, "--json")
    assert code == 0
    known = json.loads((runs / RUN / "analysis" / "step_2.json").read_bytes())
    assert json.loads(printed) == known


def test_rules_of_a_user_come_first(runs: Path) -> None:
    path = runs / "rules.py"
    path.write_text(
        "from flotilla_reading.analysis.failure_classes import FailureRule\n"
        "RULES = [FailureRule('boasts', 'It says that it closed it.', "
        "lambda facts: 'I closed' in facts.last_words)]\n"
    )
    code, printed = analyze(runs, "--json", "--rules", str(path))
    [found] = json.loads(printed)["failures"]
    assert (code, found["name"]) == (0, "boasts")
    assert found["description"] == "It says that it closed it."


def test_mistakes_are_told_with_their_fix(runs: Path) -> None:
    code, printed = analyze(runs, "--step", "9")
    assert (code, "it has: 2" in printed) == (1, True)
    code, printed = analyze(runs, "--rules", str(runs / "none.py"))
    assert (code, "error: --rules:" in printed) == (2, True)


LOCKED = [call("close_issue", "it is locked", "tool_error", issue_id=4), says("<done>")]


def asked_judge(runs: Path, url: str, *words: str) -> dict[str, int]:
    """The failures by class, with those that the judge classed in place of the count of all."""
    code, printed = analyze(runs, "--json", "--judge", url, "--judge-model", MODEL, *words)
    assert code == 0, printed
    return {each["name"]: each["judged"] for each in json.loads(printed)["failures"]}


def test_a_judge_is_asked_once_about_what_no_rule_knows(runs: Path) -> None:
    unknown = [row(*LOCKED, attempt_index=n, checks_failed=[f"[X] {n}"]) for n in range(3)]
    write_evaluation(runs / RUN, 5, [*unknown, row(says("Closed it, done."), attempt_index=3)])
    with serve_model(lambda _: {"content": "The class is `environment_fault`."}) as (url, asked):
        found = asked_judge(runs, url, "--judge-calls", "2")
        assert found == {"environment_fault": 2, "other": 0, "false_completion": 0}
        assert len(asked.bodies) == 2
        assert "it is locked" in asked.bodies[0]["messages"][0]["content"]
        assert asked_judge(runs, url)["environment_fault"] == 3
        assert len(asked.bodies) == 3
    page = (runs / RUN / "analysis" / "newest.html").read_text()
    assert "3 (3 judged by a model)" in page


def test_an_answer_that_names_no_class_leaves_it_unknown(runs: Path) -> None:
    write_evaluation(runs / RUN, 5, [row(*LOCKED)])
    with serve_model(lambda _: {"content": "gave_up or never_done, who knows"}) as (url, _):
        assert asked_judge(runs, url) == {"other": 0}


def test_a_judge_that_cannot_be_reached_is_an_error(runs: Path) -> None:
    write_evaluation(runs / RUN, 5, [row(*LOCKED)])
    with serve_model(lambda _: as_answer({"error": "no"}, 401)) as (url, _):
        code, printed = analyze(runs, "--judge", url, "--judge-model", MODEL)
    assert (code, "answered 401" in printed) == (1, True)


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b"[1]", b'{"reward": 1}', b'{"reward": NaN}', b"[" * 100_000]
)
def test_a_damaged_dump_is_named_with_its_line(runs: Path, line: bytes) -> None:
    path = runs / RUN / "evals" / "step_2" / "tracker.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    code, printed = analyze(runs)
    assert (code, "tracker.jsonl: line 2 is no row of an attempt" in printed) == (1, True)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"step": "x"}', '{"step": null}'])
def test_a_damaged_newest_analysis_is_replaced(runs: Path, text: str) -> None:
    newest = runs / RUN / "analysis" / "newest.json"
    newest.parent.mkdir()
    newest.write_text(text)
    code, printed = analyze(runs)
    assert (code, json.loads(newest.read_bytes())["step"]) == (0, 2), printed


def test_a_window_that_is_no_number_is_unknown(runs: Path) -> None:
    (runs / RUN / "spec.json").write_text('{"policy": {"max_model_len": "8k"}}')
    code, printed = analyze(runs, "--json")
    assert (code, json.loads(printed)["context_window"]) == (0, None)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("[FailureRule('odd', 'Odd.', lambda facts: 1 / 0)]", "the rule odd fails at attempt g0/0"),
        ("[FailureRule('odd', 'Odd.', lambda facts: exit(3))]", "the rule odd fails at attempt"),
        ("[FailureRule('odd', 'Odd.', lambda: True)]", "the rule odd fails at attempt"),
        ("exit(3)", "cannot be run: SystemExit(3)"),
        ("[FailureRule('two words', 'Odd.', bool)]", "a name that is one word"),
        ("[FailureRule(5, 'Odd.', bool)]", "a name that is one word"),
        ("[FailureRule('odd', None, bool)]", "a name that is one word"),
        ("[FailureRule('odd', 'Odd.', 'true')]", "a name that is one word"),
    ],
)
def test_a_rule_of_a_user_that_fails_is_named(runs: Path, rules: str, why: str) -> None:
    path = runs / "rules.py"
    module = "flotilla_reading.analysis.failure_classes"
    path.write_text(f"from {module} import FailureRule\nRULES = {rules}\n")
    code, printed = analyze(runs, "--rules", str(path))
    assert (code, why in printed) == (2, True), printed


def test_a_rule_of_a_user_may_add_to_a_class_of_ours(runs: Path) -> None:
    path = runs / "rules.py"
    module = "flotilla_reading.analysis.failure_classes"
    added = "[FailureRule('false_completion', 'It says so.', lambda facts: facts.said_done)]"
    path.write_text(f"from {module} import FailureRule\nRULES = {added}\n")
    code, printed = analyze(runs, "--json", "--rules", str(path))
    [found] = json.loads(printed)["failures"]
    assert (code, found["name"], found["count"], found["also"]) == (0, "false_completion", 1, 0)


@pytest.mark.parametrize(
    "kept",
    [
        b'{"digest": "x", "cla',
        b'[1]\n"x"\n5\n{"digest": "x"}\n{"digest": ["x"], "class": 5}\n',
        b"\xff\xfe\n" + b"[" * 100_000 + b"\n",
    ],
    ids=["cut", "foreign", "garbage"],
)
def test_answers_that_cannot_be_read_are_asked_again_and_kept(runs: Path, kept: bytes) -> None:
    write_evaluation(runs / RUN, 5, [row(*LOCKED)])
    path = runs / RUN / "analysis" / "judged.jsonl"
    path.parent.mkdir()
    path.write_bytes(kept)
    with serve_model(lambda _: {"content": "gave_up"}) as (url, asked):
        for _ in range(2):
            assert asked_judge(runs, url) == {"gave_up": 1}
        assert len(asked.bodies) == 1
        path.write_bytes(path.read_bytes().replace(b'"gave_up"', b'"unheard_of"'))
        assert asked_judge(runs, url) == {"gave_up": 1}
        assert len(asked.bodies) == 2
