"""Lines and the board that show a run's progress."""

import io

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.api import codec
from flotilla_launcher.cli.progress_view import PlainView, draw_board
from flotilla_launcher.cli.run_view import RunBoard
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.run_progress import Alarm


def progress(step: int, seconds: int) -> pb.WatchRunResponse:
    event = pb.WatchRunResponse(event=step)
    event.time.seconds = seconds
    event.progress.CopyFrom(pb.Progress(phase="training", step=step, total_steps=50))
    event.progress.metrics["reward/avg_pass_at_1"] = 0.5
    event.progress.metrics["reward/booking/pass_at_1"] = 0.25
    event.progress.metrics["timing/seconds_left"] = {1: 0.0, 2: 240.0}.get(step, 188.0)
    return event


def test_a_plain_line_per_step_with_the_time_left() -> None:
    board, console = RunBoard(), Terminal(record=True, width=200, file=io.StringIO())
    view = PlainView(console)
    for step in (1, 2, 2, 3):
        board.take_event(progress(step, 100 + 4 * step))
        view.show_board(board)
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert "left" not in lines[0], "there is no estimate yet"
    assert lines[-1].startswith("step 3/50  training  training pass@1 50.0%  (booking 25%)")
    assert lines[-1].endswith("3 min 8 s left")


def test_the_time_left_passes_between_estimates() -> None:
    board = RunBoard()
    for seconds in (100, 130):
        board.take_event(progress(2, seconds))
    assert board.seconds_left == 210.0
    board.take_event(progress(1, 140))
    assert board.seconds_left is None, "a resumed run begins without one"


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_board_fits_the_terminal(width: int) -> None:
    board, console = RunBoard(), Terminal(record=True, width=width, file=io.StringIO())
    board.take_event(progress(2, 100))
    board.metrics |= {f"reward/{env}/pass_at_1": 0.5 for env in ("tracker", "shop", "mail")}
    console.print(draw_board(board, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    words = ("step 2/50", "4 min 0 s left", "training pass@1", "50.0%", "training tracker")
    assert all(word in text for word in words), text


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


def test_the_board_has_tokens_and_dollars_of_a_run_that_is_billed_by_tokens() -> None:
    board, console = RunBoard(), Terminal(record=True, width=200, file=io.StringIO())
    board.take_event(progress(2, 100))
    tokens = pb.TokenCount(prompt=1_000_000, sampled=200_000, trained=30_000)
    cost = pb.Cost(accrued=1.5, tokens=tokens)
    assert board.take_event(pb.WatchRunResponse(event=3, cost=cost)) == ""
    PlainView(console).show_board(board)
    console.print(draw_board(board))
    for line in console.export_text().split("\n", 1):
        assert "1,230,000" in line and "$1.50" in line
    board.take_event(pb.WatchRunResponse(event=4, cost=pb.Cost(tokens=tokens)))
    PlainView(console).show_board(board)
    printed = console.export_text()
    assert "1,230,000" in printed and "$" not in printed
