"""The watcher's decisions, with the clock in hand."""

from dataclasses import replace

import pytest

from flotilla_launcher.agent import decisions as watches
from flotilla_launcher.agent.decisions import (
    EXIT_SILENCE,
    EndCause,
    ProcessAction,
    WatchStage,
    WatchState,
)
from flotilla_launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase
from flotilla_launcher.state import ExitStatus

DRAIN_S = 10.0


def running(lease_s: float = 1000.0) -> WatchState:
    watch, action = watches.decide_action(
        watches.mark_prepared(WatchState(0.0, lease_s, DRAIN_S)), 0.0
    )
    assert action is ProcessAction.START
    return watch


@pytest.mark.parametrize("code", [0, 2, 7, -9])
def test_an_end_of_whatever_kind_is_reported_and_only_a_command_starts_it_again(code: int) -> None:
    watch = watches.record_exit(running(), ExitStatus(code))
    assert (watch.phase, watch.verdict.code) == (UnitPhase.WAITING, code)
    assert watches.decide_action(watch, 999.0) == (watch, None)
    again = watches.grant_start(watch)
    # The answer to the report may be lost, and the command is given again.
    assert watches.grant_start(again) == again
    again, action = watches.decide_action(again, 999.0)
    assert (action, again.restarts) == (ProcessAction.START, 1)
    assert watches.grant_start(again) == again
    assert again.phase is UnitPhase.RUNNING


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
    assert watches.record_exit(watch, ExitStatus(-9)).verdict.code == EXIT_SILENCE


def test_an_answer_that_was_long_under_way_renews_only_from_its_request() -> None:
    watch = watches.renew_lease(running(10.0), 8.0, 0.0)
    assert (watch.renewed, watch.lease_s) == (8.0, 10.0)
    assert watches.renew_lease(watch, 3.0, 10.0).renewed == 8.0


def test_a_replica_that_only_waits_to_be_started_again_is_over_at_once() -> None:
    watch = watches.record_exit(running(), ExitStatus(1))
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
    watch = watches.record_exit(watch, ExitStatus(0))
    assert (watch.phase, watch.verdict.code) == (UnitPhase.EXITED, EXIT_PREEMPTED)


def test_a_machine_that_cannot_be_prepared_is_prepared_again_on_command() -> None:
    watch = watches.mark_unprepared(WatchState(0.0, 10.0, DRAIN_S), ExitStatus(2, "no journal"))
    assert watches.decide_action(watches.mark_prepared(watch), 1.0)[1] is None
    assert (watch.phase, watch.verdict) == (UnitPhase.WAITING, ExitStatus(2, "no journal"))
    again = watches.grant_start(watch)
    assert (again.phase, again.restarts) == (UnitPhase.SETUP, 1)
    assert watches.decide_action(again, 1.0) == (again, None)
    assert watches.decide_action(watches.mark_prepared(again), 1.0)[1] is ProcessAction.START


def test_a_signal_is_coded_as_a_shell_does() -> None:
    assert (ExitStatus(-9).shell_code, ExitStatus(3).shell_code) == (137, 3)
