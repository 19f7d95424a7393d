"""Durations and phases in readable form."""

from flotilla_launcher.cli.run_view import RunBoard, duration_text


def test_durations_read_well() -> None:
    assert [duration_text(s) for s in (5.4, 65, 7300)] == ["5 s", "1 min 5 s", "2 h 1 min"]


def test_an_evaluation_shows_how_far_it_has_come() -> None:
    board = RunBoard(
        phase="evaluating", metrics={"eval/progress_done": 64, "eval/progress_total": 192}
    )
    assert board.phase_text == "evaluating 64/192"
    assert RunBoard(phase="training", metrics=board.metrics).phase_text == "training"
