"""Episodes and steps that a tracker shows, and the limits on their text."""

import json
from pathlib import Path

import pytest

from flotilla_learner.tracking import sampled_episodes
from flotilla_learner.tracking.sampled_episodes import EpisodeSchedule, sample_episodes
from tests.learner.tracking.dumped_steps import dump_steps, episode_row


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 100])
def test_up_to_eight_episodes_are_spread_over_a_dump_each_once(tmp_path: Path, rows: int) -> None:
    dump_steps(tmp_path, 1, rows=rows)
    groups = [one.group for one in sample_episodes(tmp_path / "rollouts" / "step_1.jsonl")]
    assert len(set(groups)) == len(groups)
    assert len(groups) == min(rows, 8)
    if rows:
        assert groups[0] == "g0"
    if rows == 100:
        assert int(groups[-1][1:]) > 80


def test_long_texts_are_cut_and_long_lines_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_episodes, "_LINE_BYTES", 20_000)
    texts = ["x" * 9000 + "end", "y" * 30_000]
    rows = [episode_row(1, n, output_response=text) for n, text in enumerate(texts)]
    path = tmp_path / "step_1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [one] = sample_episodes(path)
    assert one.answer == "[...] " + "x" * 3997 + "end"


def test_an_episode_without_a_grade_or_advantages_has_none(tmp_path: Path) -> None:
    row = episode_row(1, 0, reward=None, sequences=[{"advantages": None}])
    path = tmp_path / "step_1.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [one] = sample_episodes(path)
    assert (one.reward, one.advantage) == (None, None)


def test_each_due_step_is_shown_once_when_its_dump_is_there(tmp_path: Path) -> None:
    schedule = EpisodeSchedule(tmp_path, 2)
    assert schedule.take_due(2) == []
    dump_steps(tmp_path, 1, 2, 3)
    assert {one.step for one in schedule.take_due(3)} == {2}
    assert schedule.take_due(3) == []
    # An evaluation of an earlier version is logged later.
    assert schedule.take_due(1) == []
    dump_steps(tmp_path, 4)
    assert {one.step for one in schedule.take_due(5)} == {4}
    assert schedule.take_due() == []


def test_a_resumed_run_shows_nothing_of_what_was_logged(tmp_path: Path) -> None:
    dump_steps(tmp_path, 2, 4)
    schedule = EpisodeSchedule(tmp_path, 2)
    schedule.begin_after(2)
    assert schedule.take_due(3) == []
    assert {one.step for one in schedule.take_due(4)} == {4}


def test_nothing_is_due_with_0(tmp_path: Path) -> None:
    dump_steps(tmp_path, 1)
    assert EpisodeSchedule(tmp_path, 0).take_due(1) == []


def test_a_damaged_dump_fails_once(tmp_path: Path) -> None:
    dump_steps(tmp_path, 1)
    (tmp_path / "rollouts" / "step_1.jsonl").write_text('{"step": 1}\n')
    schedule = EpisodeSchedule(tmp_path, 1)
    with pytest.raises(ValueError, match="group_id"):
        schedule.take_due(1)
    assert schedule.take_due(1) == []
