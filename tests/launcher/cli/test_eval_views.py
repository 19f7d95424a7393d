"""What `flotilla eval` prints, also about evaluations that failed or cannot be compared."""

import json

import pytest

from flotilla_launcher.cli.eval_views import NamedAttempts, find_common, show_evaluations
from flotilla_launcher.cli.terminal import CommandError
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt


def evaluation(name: str, rewards: dict[str, float | None], k: int = 1) -> NamedAttempts:
    attempts = [EvaluatedAttempt(key, "notes", reward) for key, reward in rewards.items()]
    return NamedAttempts(name, attempts, dict.fromkeys(rewards, "digest"), k)


BEFORE = evaluation("before", {"a": 0.0, "b": 1.0})
FAILED = NamedAttempts("gone", (), {"a": "digest"}, 1, failed="nobody answers")


def test_one_that_failed_is_named_among_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_evaluations([FAILED, BEFORE], None, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["gone", "failed: nobody answers", "before"]
    assert lines[-1].split()[:6] == ["all", "2", "2", "2", "0", "0.500"]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (FAILED, "gone failed, so it is not compared with before"),
        (evaluation("none", {"a": None}), "none has no attempt with a grade"),
        (evaluation("other", {"c": 1.0}), "before and other have no task in common"),
        (evaluation("apart", {"a": None, "c": 1.0}), "no task has graded attempts in both"),
    ],
)
def test_scores_are_shown_even_if_they_cannot_be_compared(
    second: NamedAttempts, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_evaluations([second], BEFORE, as_json=False) == 1
    printed = capsys.readouterr().out
    assert printed.index(f"\n{second.name}\n") < printed.index(why)
    assert show_evaluations([second], BEFORE, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["evaluations"][0]["name"] == second.name
    assert told["comparison"] is None
    assert why in told["not_compared"]


def test_what_is_not_comparable_is_known_before_anything_is_played() -> None:
    planned = NamedAttempts("planned", (), {"b": "digest", "c": "digest"}, 4)
    assert find_common(BEFORE, planned, planned.digests) == {"b"}
    changed = NamedAttempts("planned", (), {"b": "another"}, 4)
    with pytest.raises(CommandError, match="1 tasks of the same key differ, such as b"):
        find_common(BEFORE, changed, changed.digests)
    with pytest.raises(CommandError, match="before has no attempt with a grade"):
        find_common(evaluation("before", {"a": None}), planned, planned.digests)
