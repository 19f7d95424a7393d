"""`flotilla analyze`: what it prints and writes."""

import json
from pathlib import Path

import pytest

from services.launcher.cli.app import main
from tests.reading.analysis.episode_rows import row, says, write_evaluation

RUN = "demo-20261128-120000"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "journal.sqlite").touch()
    write_evaluation(tmp_path / RUN, 2, [row(says("I closed it. <done>"))])
    return tmp_path


def analyze(runs: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["analyze", RUN, "--runs", str(runs), *words])
    return int(ended.value.code or 0)


def test_it_prints_the_sections_and_the_files(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(runs) == 0
    printed = capsys.readouterr().out
    for part in ("Why attempts fail", "false_completion", "Signal in training", "step_2.html"):
        assert part in printed


def test_json_is_that_of_the_file(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(runs, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((runs / RUN / "analysis" / "step_2.json").read_bytes())


def test_rules_of_a_user_come_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "rules.py"
    path.write_text(
        "from services.reading.analysis.failure_classes import Rule\n"
        "RULES = [Rule('boasts', 'It says that it closed it.', "
        "lambda facts: 'I closed' in facts.last_words)]\n"
    )
    assert analyze(runs, "--json", "--rules", str(path)) == 0
    [found] = json.loads(capsys.readouterr().out)["failures"]
    assert (found["name"], found["description"]) == ("boasts", "It says that it closed it.")


def test_mistakes_are_told_with_their_fix(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(runs, "--step", "9") == 1
    assert "it has: 2" in capsys.readouterr().out
    assert analyze(runs, "--rules", str(runs / "none.py")) == 2
    assert "error: --rules:" in capsys.readouterr().out
