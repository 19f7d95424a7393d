"""`flotilla analyze`: what it prints and writes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli.app import app
from tests.reading.analysis.episode_rows import row, says, write_evaluation

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
        "from services.reading.analysis.failure_classes import Rule\n"
        "RULES = [Rule('boasts', 'It says that it closed it.', "
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
