"""The watcher's decisions, with the clock in hand."""

from dataclasses import replace

import pytest

from services.launcher.agent import decisions as watches
from services.launcher.agent.decisions import (
    EXIT_SILENCE,
    EndCause,
    ProcessAction,
    WatchStage,
    WatchState,
)
from services.launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase
from services.launcher.config.launcher import LauncherConfig
from services.launcher.state import ExitStatus

CONFIG = LauncherConfig(max_restarts=2, restart_window_s=100.0, backoff_s=1.0, drain_s=10.0)


def running(lease_s: float = 1000.0) -> WatchState:
    watch, action = watches.decide_action(
        watches.mark_prepared(WatchState(0.0, lease_s, CONFIG), 0.0), 0.0
    )
    assert action is ProcessAction.START
    return watch


def test_crashes_are_answered_with_growing_patience_and_then_with_the_exit_code() -> None:
    watch, now, waits = running(), 0.0, list[float]()
    while True:
        watch = watches.record_exit(watch, ExitStatus(7), now)
        if watch.stage is WatchStage.OVER:
            break
        waits.append(watch.due - now)
        assert watches.decide_action(watch, watch.due - 0.1)[1] is None
        now = watch.due
        watch, action = watches.decide_action(watch, now)
        assert action is ProcessAction.START
    assert (waits, watch.verdict.code, watch.restarts) == ([1.0, 2.0], 7, 2)
    assert watch.phase is UnitPhase.EXITED


def test_crashes_that_lie_far_apart_are_forgiven() -> None:
    watch, now = running(), 0.0
    for _ in range(20):
        watch = watches.record_exit(watch, ExitStatus(7), now)
        assert watch.stage is WatchStage.WAITING
        watch, _ = watches.decide_action(watch, watch.due)
        now = watch.due + 101.0


@pytest.mark.parametrize("code", [0, 2])
def test_done_and_wrongly_configured_are_final(code: int) -> None:
    watch = watches.record_exit(running(), ExitStatus(code), 1.0)
    assert (watch.stage, watch.verdict.code) == (WatchStage.OVER, code)


def test_a_lease_that_runs_out_drains_then_kills_and_reports() -> None:
    watch = watches.renew_lease(running(30.0), 5.0, 30.0)
    assert watches.decide_action(watch, 34.9) == (watch, None)
    assert watches.next_due(watch) == 35.0
    watch, action = watches.decide_action(watch, 35.0)
    assert (action, watch.cause) == (ProcessAction.DRAIN, EndCause.SILENCE)
    assert watches.decide_action(watch, 44.9)[1] is None
    watch, action = watches.decide_action(watch, 45.0)
    assert action is ProcessAction.KILL
    assert watches.decide_action(watch, 46.0)[1] is None
    assert watches.decide_action(watch, 47.0)[1] is ProcessAction.KILL
    assert watches.record_exit(watch, ExitStatus(-9), 47.0).verdict.code == EXIT_SILENCE


def test_an_answer_that_was_long_under_way_renews_only_from_its_request() -> None:
    watch = watches.renew_lease(running(10.0), 8.0, 0.0)
    assert (watch.renewed, watch.lease_s) == (8.0, 10.0)
    assert watches.renew_lease(watch, 3.0, 10.0).renewed == 8.0


def test_a_replica_that_only_waits_to_be_started_again_is_over_at_once() -> None:
    watch = watches.record_exit(running(), ExitStatus(1), 0.0)
    assert watches.request_end(watch, EndCause.ASKED, 0.5, 10.0).stage is WatchStage.OVER
    lost, action = watches.decide_action(replace(watch, renewed=-2000.0), 0.5)
    assert (lost.stage, action, lost.verdict.code) == (WatchStage.OVER, None, EXIT_SILENCE)


def test_a_later_cause_only_shortens_what_is_left() -> None:
    watch = watches.request_end(running(), EndCause.ASKED, 0.0, 10.0)
    watch = watches.request_end(watch, EndCause.PREEMPTED, 1.0, 30.0)
    assert (watch.cause, watch.due) == (EndCause.ASKED, 10.0)
    watch = watches.request_end(watch, EndCause.PREEMPTED, 1.0, 2.0)
    assert (watch.cause, watch.due) == (EndCause.ASKED, 3.0)


def test_a_lost_machine_is_reported_until_the_end() -> None:
    watch = watches.request_end(running(), EndCause.PREEMPTED, 0.0, 10.0)
    assert watch.phase is UnitPhase.PREEMPTED
    watch = watches.record_exit(watch, ExitStatus(0), 1.0)
    assert (watch.phase, watch.verdict.code) == (UnitPhase.EXITED, EXIT_PREEMPTED)


def test_a_replica_that_cannot_be_prepared_never_starts() -> None:
    watch = watches.mark_unprepared(WatchState(0.0, 10.0, CONFIG), ExitStatus(2, "no journal"))
    assert watches.decide_action(watches.mark_prepared(watch, 1.0), 1.0)[1] is None
    assert watch.verdict == ExitStatus(2, "no journal")


def test_a_signal_is_coded_as_a_shell_does() -> None:
    assert (ExitStatus(-9).shell_code, ExitStatus(3).shell_code) == (137, 3)
