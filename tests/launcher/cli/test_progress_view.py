"""Lines and the board that show a run's progress."""

import io

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.api import codec
from services.launcher.cli.progress_view import PlainView, draw_board
from services.launcher.cli.run_view import RunBoard
from services.launcher.cli.terminal import Terminal
from services.launcher.run_progress import Alarm


def progress(step: int, seconds: int) -> pb.WatchRunResponse:
    event = pb.WatchRunResponse(event=step)
    event.time.seconds = seconds
    event.progress.CopyFrom(pb.Progress(phase="training", step=step, total_steps=50))
    event.progress.metrics["reward/avg_pass_at_1"] = 0.5
    event.progress.metrics["reward/booking/pass_at_1"] = 0.25
    return event


def test_a_plain_line_per_step_with_the_time_left() -> None:
    board, console = RunBoard(), Terminal(record=True, width=200, file=io.StringIO())
    view = PlainView(console)
    for step in (1, 2, 2, 3):
        board.take_event(progress(step, 100 + 4 * step))
        view.show_board(board)
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("step 3/50  training  training pass@1 50.0%  (booking 25%)")
    assert lines[-1].endswith("3 min 8 s left")


def test_alarms_that_are_raised_are_in_the_line_of_a_step() -> None:
    board, console = RunBoard(), Terminal(record=True, width=200, file=io.StringIO())
    for scope, severity in (("shop", "notice"), ("desk", "warning"), ("all", "error")):
        alarm = Alarm("a_rule", scope, severity, 3, "its cause", "a fix")
        event = pb.WatchRunResponse(raised=codec.alarm_to_pb(alarm))
        line = board.take_event(event)
        assert line.endswith("since step 3: its cause. a fix")
    board.take_event(progress(4, 100))
    PlainView(console).show_board(board)
    console.print(draw_board(board))
    step, *drawn = console.export_text().splitlines()
    assert "ALARM: a_rule of desk, a_rule" in step and "shop" not in step
    severest = [line.partition(",")[0] for line in drawn if "a_rule" in line]
    assert severest == ["alarm: a_rule", "alarm: a_rule of desk", "notice: a_rule of shop"]
    cleared = pb.WatchRunResponse(cleared=codec.alarm_to_pb(Alarm("a_rule", "desk")))
    assert board.take_event(cleared) == "over: a_rule of desk"
    assert sorted(board.alarms) == ["a_rule", "a_rule of shop"]
