"""Scores of tasks against values worked out by hand."""

from flotilla_launcher.cli.task_scores import TaskScore, format_scores


def scored(key: str, *rewards: float | None) -> TaskScore:
    score = TaskScore(key)
    for reward in rewards:
        score.add_attempt(reward)
    return score


def test_pass_at_k_counts_the_graded_attempts_only() -> None:
    score = scored("a", 1.0, 0.5, None, 0.0, 1.0)
    assert (score.attempts, score.graded, score.passed) == (5, 4, 2)
    # 1 - 2/4; 1 - C(2, 3) / C(4, 3) = 1; and five attempts have no grade among them.
    assert (score.pass_at(1), score.pass_at(3), score.pass_at(5)) == (0.5, 1.0, None)
    assert scored("b", 1.0, 0.0, 0.0, 0.0).pass_at(2) == 0.5


def test_a_task_without_any_grade_has_no_figure_and_is_in_no_mean() -> None:
    lines = format_scores([scored("a", 1.0, 0.0), scored("b\nc", None, None)], 2)
    assert [line.split() for line in lines] == [
        ["attempts", "graded", "passed", "pass@1", "pass@2", "task"],
        ["2", "2", "1", "0.500", "1.000", "a"],
        ["2", "0", "0", "-", "-", "b␊c"],
        ["4", "2", "1", "0.500", "1.000", "all", "2", "tasks"],
    ]


def test_one_attempt_has_one_figure() -> None:
    assert format_scores([scored("a", 1.0)], 1)[0].split()[-2:] == ["pass@1", "task"]
