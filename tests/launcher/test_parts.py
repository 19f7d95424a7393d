"""The smaller parts: logs, GPUs, orphans, the ledger, what is shown and what is reported."""

import asyncio
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.api import codec
from services.launcher.backends.local.backend import LocalBackend
from services.launcher.backends.local.gpu_slots import GpuSlots
from services.launcher.backends.local.marked_processes import MARK_VARIABLE
from services.launcher.backends.ports import BackendError, LaunchSpec
from services.launcher.cli import train_report
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.prepare import PrepareError, run_prepare_commands
from services.launcher.cli.progress_view import PlainView, draw_board
from services.launcher.cli.run_view import RunBoard, duration_text
from services.launcher.cli.terminal import Terminal
from services.launcher.run_progress import Alarm
from services.launcher.security import launcher_address
from services.launcher.state import Replica, ReplicaState, Run, RunState, Unit
from services.launcher.store import logs
from services.launcher.store.ledger import PROGRESS_KEPT, Ledger
from services.launcher.store.roster import Member, ReplacedError, Roster


def test_the_tail_of_a_log_is_found_across_blocks_and_without_a_last_newline(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rollout-0.log"
    for ending in ("", "\n"):
        log.write_text("\n".join(f"{i} {'x' * 300}" for i in range(1000)) + ending)
        position = logs.find_tail_position(log, 400)
        lines = logs.read_lines(log, position, limit=10**6)
        assert [line.text.split()[0] for line in lines] == [str(i) for i in range(600, 1000)]
    assert logs.find_tail_position(log, 5000) == 0
    assert logs.find_tail_position(log, 0) == log.stat().st_size


def test_an_endless_line_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    log.write_text("x" * (2 * logs.LINE_BYTES + 10))
    assert [len(line.text) for line in logs.read_lines(log, 0, final=False)] == [
        logs.LINE_BYTES
    ] * 2
    assert len(logs.read_lines(log, 0, final=True)) == 3


def test_gpus_are_shared_out_without_overlap_and_come_back() -> None:
    slots = GpuSlots(["0", "1", "2"])
    assert slots.take_gpus("a", 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert slots.take_gpus("nothing", 0) == {}
    with pytest.raises(BackendError, match="b needs 2 GPUs, 1 are free"):
        slots.take_gpus("b", 2)
    slots.release_gpus("a")
    assert slots.take_gpus("b", 3) == {"CUDA_VISIBLE_DEVICES": "0,1,2"}


async def test_an_orphan_is_found_by_its_mark_alone_and_ended_with_its_children(
    tmp_path: Path,
) -> None:
    dead = LocalBackend(tmp_path)
    sleeper = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    launch = LaunchSpec(
        "run-1", ("rollout", 0), (sys.executable, "-c", sleeper), {}, tmp_path / "log"
    )
    unit = await dead.start_replica(launch)
    await asyncio.sleep(0.3)
    heir = LocalBackend(tmp_path)
    [found] = await heir.list_orphans([])
    assert found.name == unit.name
    assert found.pid == unit.pid
    await heir.end_orphan(found, 2.0)
    assert await heir.list_orphans([unit]) == []
    assert (await dead.wait_for_exit(unit)).code == -15


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the environments of others")
async def test_a_strangers_process_with_a_mark_of_ours_is_left_alone(tmp_path: Path) -> None:
    mark = {MARK_VARIABLE: f"{tmp_path}:run-1/rollout-0#1"}
    stranger = await asyncio.create_subprocess_exec("sleep", "300", env=mark, user=63_999)
    backend = LocalBackend(tmp_path)
    launch = LaunchSpec("run-1", ("rollout", 0), ("true",), {}, tmp_path / "log")
    try:
        assert await backend.find_replica(launch) is None
        assert await backend.list_strays([]) == await backend.list_orphans([]) == []
        assert await backend.reap_strays([]) == []
        assert (await backend.clean_run("run-1")).gone
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "300", start_new_session=True)
    backend = LocalBackend(tmp_path)
    stale = Unit("run-1/rollout-0#1", other.pid, started=1.0)
    assert await backend.list_orphans([stale]) == []
    await backend.end_orphan(stale, 0.1)
    await backend.kill_replica(stale)
    assert other.returncode is None
    other.kill()
    await other.wait()


async def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    launch = LaunchSpec("run-1", ("rollout", 0), ("/no/such/program",), {}, tmp_path / "log")
    with pytest.raises(BackendError, match="/no/such/program"):
        await LocalBackend(tmp_path).start_replica(launch)


def test_the_file_of_a_dead_launcher_counts_for_nothing(tmp_path: Path) -> None:
    assert launcher_address.read_address(tmp_path) is None
    with launcher_address.published_address(tmp_path, "127.0.0.1:1", "token"):
        path = tmp_path / "launcher.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert launcher_address.read_address(tmp_path) is not None
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "started": 1.0}))
        assert launcher_address.read_address(tmp_path) is None
        path.write_text("{")
        assert launcher_address.read_address(tmp_path) is None
    assert not path.exists()


def test_the_ledger_gives_back_what_was_written_and_bounds_progress(tmp_path: Path) -> None:
    store = Ledger(tmp_path / "launcher.sqlite")
    unit = Unit("r/rollout-0#1", 42, 7.5)
    addresses = "127.0.0.1:1", "127.0.0.1:2"
    replica = Replica("rollout", 0, ReplicaState.RUNNING, unit, "serving", *addresses, 2)
    run = Run("r", "demo", {"rollout": 1}, state=RunState.RUNNING)
    with store.transaction():
        store.begin_run(run, "{}", 1.0)
        store.save_run(run, [replica], None)
        for step in range(PROGRESS_KEPT + 200):
            store.add_event("r", 1.0, "progress", {"step": step})
    store.close()
    store = Ledger(tmp_path / "launcher.sqlite")
    stored = store.get_run("r")
    assert stored is not None
    assert stored.run.replicas[("rollout", 0)] == replica
    kept = store.list_events("r", 0, limit=10**6)
    assert PROGRESS_KEPT <= len(kept) <= PROGRESS_KEPT + 100
    assert kept[-1].number == PROGRESS_KEPT + 200
    store.close()


def test_a_roster_takes_nobody_back_who_was_replaced() -> None:
    roster = Roster()
    roster.register_member(Member("rollout", 0, "a", "x:1"))
    assert roster.record_heartbeat(("rollout", 0), "a", serving=True, now=1.0)
    version = roster.version
    assert roster.record_heartbeat(("rollout", 0), "a", serving=True, now=2.0)
    assert roster.version == version, "a heartbeat is no news"
    assert roster.silent_members(40.0, 30.0) == roster.serving_members("rollout")
    roster.register_member(Member("rollout", 0, "b", "x:2"))
    with pytest.raises(ReplacedError):
        roster.record_heartbeat(("rollout", 0), "a", serving=True, now=3.0)
    roster.forget_member(("rollout", 0))
    with pytest.raises(ReplacedError):
        roster.register_member(Member("rollout", 0, "b", "x:2"))


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


def test_what_a_learner_says_of_an_alarm_cannot_steer_a_terminal() -> None:
    words = "\x1b]0;t\x07why" + "x" * 9_999
    alarm = alarm_pb.Alarm(rule="r\x1b[2J", scope="a\nb", cause=words, fix="\x9b")
    request = registry_pb.HeartbeatRequest(alarms=[alarm])
    (told,) = codec.progress_from_pb(request).alarms
    assert (told.rule, told.scope, told.severity, told.fix) == ("r", "a b", "warning", "")
    assert told.cause.startswith("whyxxx") and len(told.cause) == 1_000


def test_durations_read_well() -> None:
    assert [duration_text(s) for s in (5.4, 65, 7300)] == ["5 s", "1 min 5 s", "2 h 1 min"]


def test_the_report_shows_before_and_after_and_draws_the_curve(tmp_path: Path) -> None:
    figures = {"pass_at_1": 0.25, "ci95": [0.2, 0.3], "greedy_pass_at_1": 0.0}
    before = {**figures, "by_env": {"shop": 0.5}, "unseen_names": None}
    summary = {"eval": {"before": before, "after": {"pass_at_1": 0.95}}, "seconds": {"train": 9}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    record = {"step": 1, "reward/avg_pass_at_1": 0.5, "policy/kl": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"step": 2, "cut')
    train_report.add_total_seconds(tmp_path, 12.34)
    console = Terminal(record=True, width=200, file=io.StringIO())
    train_report.print_report(tmp_path, console)
    text = console.export_text()
    assert "25.0% [20.0%, 30.0%]" in text
    assert "95.0%" in text
    assert "curve.svg" in text
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    seconds = json.loads((tmp_path / "summary.json").read_text())["seconds"]
    assert seconds == {"train": 9, "total": 12.3}


async def test_a_failed_preparation_shows_what_it_said(tmp_path: Path) -> None:
    table = {"creates": str(tmp_path / "x"), "command": ["python", "-c", "exit('no luck')"]}
    console = Terminal(file=io.StringIO())
    with pytest.raises(PrepareError, match="no luck"):
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=True)
    table["command"] = ["true"]
    with pytest.raises(PrepareError, match="did not create"):
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=True)


async def test_a_preparation_runs_again_when_what_it_needs_is_newer(tmp_path: Path) -> None:
    source, made = tmp_path / "source.txt", tmp_path / "made.txt"
    program = f"open({str(made)!r}, 'a').write('x')"
    table = {"creates": str(made), "command": ["python", "-c", program], "needs": ["*.txt"]}
    console = Terminal(file=io.StringIO())
    source.write_text("1")
    with contextlib.chdir(tmp_path):
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=True)
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=True)
        assert made.read_text() == "x"
        later = made.stat().st_mtime + 10
        os.utime(source, (later, later))
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=False)
        assert made.read_text() == "x", "a run that goes on keeps what it began with"
        await run_prepare_commands({"prepare": [table]}, console, Interrupts(), refresh=True)
        assert made.read_text() == "xx"


def test_an_evaluation_shows_how_far_it_has_come() -> None:
    board = RunBoard(
        phase="evaluating", metrics={"eval/progress_done": 64, "eval/progress_total": 192}
    )
    assert board.phase_text == "evaluating 64/192"
    assert RunBoard(phase="training", metrics=board.metrics).phase_text == "training"


def test_an_evaluation_alone_has_a_column_of_its_own(tmp_path: Path) -> None:
    summary = {"eval": {"before": None, "eval_only": {"pass_at_1": 0.5, "ci95": [0.4, 0.6]}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    console = Terminal(record=True, width=200, file=io.StringIO())
    train_report.print_report(tmp_path, console, evaluated=True)
    text = console.export_text()
    assert "eval only" in text
    assert "50.0% [40.0%, 60.0%]" in text
