"""Replicas that end before their run: restarted after a wait, or given up."""

import pytest

from flotilla_launcher.agent_protocol import ReplicaCommand
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.config.sky import ProvisionConfig, SkyConfig
from flotilla_launcher.control import restarts, transitions
from flotilla_launcher.control.actions import DrainReplica, StartReplica
from flotilla_launcher.control.reconcile import command_for, reconcile_run
from flotilla_launcher.state import (
    EXIT_BAD_CONFIG,
    LEARNER,
    PHASE_DONE,
    ROLLOUT,
    ExitStatus,
    Outcome,
    ReplicaState,
    Run,
    RunState,
    Unit,
)
from tests.launcher.control.played_runs import CONFIG, all_started, new_run, running_run


def test_a_crashed_replica_is_restarted_after_a_growing_wait() -> None:
    run = running_run()
    for failures, delay in ((1, 1.0), (2, 2.0)):
        run, notes = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(1), 50.0, CONFIG)
        assert f"restart {failures} of 2 in {delay:g} s" in notes[0].text
        assert reconcile_run(run, 50.0 + delay - 0.1, CONFIG)[1] == []
        run, actions = reconcile_run(run, 50.0 + delay, CONFIG)
        assert actions == [StartReplica((ROLLOUT, 0))]
        assert run.replicas[ROLLOUT, 0].restarts == failures


def test_failures_long_ago_do_not_count() -> None:
    run = running_run()
    for now in (0.0, 1_000.0, 2_000.0, 3_000.0):
        run, _ = restarts.handle_exit(run, (LEARNER, 0), ExitStatus(1), now, CONFIG)
        run, _ = reconcile_run(run, now + 1.0, CONFIG)
        assert run.replicas[LEARNER, 0].state is ReplicaState.STARTING


def test_a_learner_that_keeps_crashing_fails_the_run_with_its_last_lines() -> None:
    run = running_run()
    for now in (0.0, 10.0, 20.0):
        how = ExitStatus(-9, "boom\nout of memory")
        run, notes = restarts.handle_exit(run, (LEARNER, 0), how, now, CONFIG)
        run, _ = reconcile_run(run, now + 5.0, CONFIG)
    assert run.state is RunState.DRAINING
    assert run.target_state is RunState.FAILED
    assert "learner-0 was killed by signal 9; gave up after 3 failures" in run.error
    assert run.error.endswith("boom\nout of memory")
    assert "out of memory" not in notes[0].text, "its error is reported with its end"


def test_of_a_service_that_refuses_only_the_refusal_is_shown() -> None:
    log = '{"event": "a group was dropped"}\nerror: of before\n{"event": "alarm"}'
    how = ExitStatus(EXIT_BAD_CONFIG, f"{log}\nerror: the template\nis wrong")
    run, _ = restarts.handle_exit(running_run(), (LEARNER, 0), how, 0.0, CONFIG)
    assert run.error.endswith("Its last lines:\nerror: the template\nis wrong")
    assert "{" not in run.error
    run, _ = restarts.handle_exit(
        running_run(), (LEARNER, 0), ExitStatus(EXIT_BAD_CONFIG, "usage: ..."), 0.0, CONFIG
    )
    assert run.error.endswith("Its last lines:\nusage: ...")


def test_one_lost_rollout_of_two_does_not_fail_the_run() -> None:
    run = running_run()
    for _ in range(3):
        run, _ = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(1), 0.0, CONFIG)
        run, _ = reconcile_run(run, 8.0, CONFIG)
    assert run.replicas[ROLLOUT, 0].state is ReplicaState.FAILED
    assert run.state is RunState.RUNNING
    assert reconcile_run(run, 9.0, CONFIG)[1] == [], "a failed replica is not replaced for ever"
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 1), 9.0, CONFIG)
    assert actions == [], "scaling down drops the failed one"
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 2), 9.0, CONFIG)
    assert actions == [StartReplica((ROLLOUT, 2))]


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_one_that_was_scaled_away_keeps_no_run_whose_last_replica_is_lost(
    state: ReplicaState,
) -> None:
    run, _ = reconcile_run(transitions.scale_service(running_run(), ROLLOUT, 1), 0.0, CONFIG)
    assert run.replicas[ROLLOUT, 1].state is ReplicaState.DRAINING
    if state is ReplicaState.STOPPED:
        run, _ = restarts.handle_exit(run, (ROLLOUT, 1), ExitStatus(0), 0.0, CONFIG)
    run, _ = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(2, "a bad key"), 0.0, CONFIG)
    assert run.target_state is RunState.FAILED
    assert "a bad key" in run.error


def test_a_config_error_is_not_tried_again() -> None:
    run, _ = restarts.handle_exit(
        running_run(), (LEARNER, 0), ExitStatus(2, "learner.steps: missing"), 0.0, CONFIG
    )
    assert run.target_state is RunState.FAILED
    assert "learner.steps: missing" in run.error


def test_a_learner_that_exits_before_it_is_done_is_restarted() -> None:
    run, _ = restarts.handle_exit(running_run(), (LEARNER, 0), ExitStatus(0), 0.0, CONFIG)
    assert run.replicas[LEARNER, 0].state is ReplicaState.RESTARTING


def test_a_missing_machine_is_tried_again_and_then_the_outcome() -> None:
    sky = SkyConfig(provision=ProvisionConfig(attempts=3, backoff_s=120.0))
    config = LauncherConfig(sky=sky, max_restarts=0)
    run, _ = reconcile_run(new_run(), 0.0, config)
    now = 0.0
    for number, delay in ((1, 120.0), (2, 240.0)):
        assert run.replicas[LEARNER, 0].attempt == number
        run, notes = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, config)
        assert f"in attempt {number} of 3: sold out; next in {delay:g} s" in notes[0].text
        assert reconcile_run(run, now + delay - 1, config)[1] == []
        now += delay
        run, actions = reconcile_run(run, now, config)
        assert actions == [StartReplica((LEARNER, 0))]
        assert run.replicas[LEARNER, 0].restarts == 0, "it never ran"
    run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, config)
    assert (run.outcome, run.target_state) == (Outcome.CAPACITY, RunState.FAILED)
    assert "sold out" in run.error


def test_by_default_a_machine_is_requested_four_times_with_2_4_and_8_minutes_between() -> None:
    config = LauncherConfig()
    run, now = reconcile_run(new_run(), 0.0, config)[0], 0.0
    for delay in (120.0, 240.0, 480.0):
        run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, config)
        assert run.replicas[LEARNER, 0].due - now == delay
        now += delay
        run, actions = reconcile_run(run, now, config)
        assert actions == [StartReplica((LEARNER, 0))]
    run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, config)
    assert (config.sky.provision.attempts, run.outcome) == (4, Outcome.CAPACITY)


def test_an_excess_rollout_without_a_machine_does_not_fail_the_run() -> None:
    config = LauncherConfig(sky=SkyConfig(provision=ProvisionConfig(attempts=1)))
    run, _ = reconcile_run(transitions.scale_service(running_run(), ROLLOUT, 3), 0.0, config)
    run, _ = restarts.handle_no_capacity(run, (ROLLOUT, 2), "sold out", 0.0, config)
    assert run.replicas[ROLLOUT, 2].state is ReplicaState.FAILED
    assert run.state is RunState.RUNNING


def test_a_setup_that_fails_has_machines_of_its_own_and_uses_up_no_restart() -> None:
    sky = SkyConfig(provision=ProvisionConfig(setups=3))
    config = CONFIG.model_copy(update={"max_restarts": 0, "sky": sky})
    unready = ExitStatus(1, "no space left", unready=True)
    run = all_started(new_run())
    for number in (1, 2):
        run, notes = restarts.handle_exit(run, (LEARNER, 0), unready, 10.0 * number, config)
        assert f"setup failed on machine {number} of 3: no space left" in notes[0].text
        run, actions = reconcile_run(run, 10.0 * number + 5, config)
        assert StartReplica((LEARNER, 0)) in actions
        run = transitions.mark_started(run, (LEARNER, 0), Unit("u"), 10.0 * number + 6, config)
    assert run.replicas[LEARNER, 0].restarts == 0
    served = transitions.mark_heartbeat(run, (LEARNER, 0), "serving", serving=True)
    assert served.replicas[LEARNER, 0].setups == 0
    run, _ = restarts.handle_exit(run, (LEARNER, 0), unready, 30.0, config)
    assert (run.outcome, run.state) == (Outcome.FAILED, RunState.DRAINING)
    assert "setup failed on machine 3 of 3" in run.error


def _ended(run: Run, number: int, how: ExitStatus, now: float) -> Run:
    """The watcher of rollout-0 reports that its process has ended."""
    return restarts.handle_process_end(run, (ROLLOUT, 0), f"a {number}", how, now, CONFIG)[0]


def test_a_process_is_started_again_on_its_machine_by_the_command_in_a_reply() -> None:
    run, key = running_run(), (ROLLOUT, 0)
    unit = run.replicas[key].unit
    for failures, delay in ((1, 1.0), (2, 2.0)):
        run = _ended(run, failures, ExitStatus(1), 50.0)
        replica = run.replicas[key]
        assert (replica.state, replica.unit) == (ReplicaState.RESTARTING, unit)
        assert command_for(run, key, 50.0, f"a {failures}") is ReplicaCommand.NONE
        # A report is repeated until it is answered with a command: it counts once.
        assert _ended(run, failures, ExitStatus(1), 50.5) == run
        run, actions = reconcile_run(run, 50.0 + delay, CONFIG)
        assert actions == [], "no other machine is requested"
        assert command_for(run, key, 60.0, f"a {failures}") is ReplicaCommand.START
        assert command_for(run, key, 60.0) is ReplicaCommand.NONE, "it runs already"
        assert (run.replicas[key].restarts, run.replicas[key].unit) == (failures, unit)
    run = _ended(run, 3, ExitStatus(1), 60.0)
    assert (run.replicas[key].state, run.replicas[key].unit) == (ReplicaState.FAILED, unit)
    assert command_for(run, key, 60.0, "a 3") is ReplicaCommand.STOP
    # Its machine goes later, which is no further failure.
    run, notes = restarts.handle_exit(run, key, ExitStatus(1), 70.0, CONFIG)
    assert (run.replicas[key].state, run.replicas[key].unit) == (ReplicaState.FAILED, None)
    assert notes == [] and run.state is RunState.RUNNING


def test_a_machine_that_is_lost_while_a_process_is_to_start_again_is_replaced() -> None:
    run = _ended(running_run(), 1, ExitStatus(1), 50.0)
    how = ExitStatus(1, "its machine is gone", preempted=True)
    run, _ = restarts.handle_exit(run, (ROLLOUT, 0), how, 50.5, CONFIG)
    assert len(run.replicas[ROLLOUT, 0].failures) == 1
    run, actions = reconcile_run(run, 60.0, CONFIG)
    assert actions == [StartReplica((ROLLOUT, 0))]


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_ends_while_it_drains_stops_with_its_machine(code: int) -> None:
    run, _ = reconcile_run(transitions.scale_service(running_run(), ROLLOUT, 1), 0.0, CONFIG)
    key = (ROLLOUT, 1)
    assert run.replicas[key].state is ReplicaState.DRAINING
    run, _ = restarts.handle_process_end(run, key, "a 0", ExitStatus(code), 1.0, CONFIG)
    assert run.replicas[key].state is ReplicaState.STOPPED
    assert command_for(run, key, 1.0, "a 0") is ReplicaCommand.STOP


def test_a_process_that_waits_for_its_restart_stops_at_once_when_it_is_not_wanted() -> None:
    run = _ended(running_run(), 1, ExitStatus(1), 50.0)
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 0), 50.1, CONFIG)
    assert actions == [DrainReplica((ROLLOUT, 1))]
    assert run.replicas[ROLLOUT, 0].state is ReplicaState.STOPPED
    assert command_for(run, (ROLLOUT, 0), 50.2, "a 1") is ReplicaCommand.STOP


def test_a_learner_that_is_done_ends_its_run_before_its_machine_is_gone() -> None:
    run = transitions.mark_heartbeat(running_run(), (LEARNER, 0), PHASE_DONE, serving=True)
    run, _ = restarts.handle_process_end(run, (LEARNER, 0), "a 0", ExitStatus(0), 1.0, CONFIG)
    assert (run.state, run.outcome) == (RunState.DRAINING, Outcome.COMPLETED)
    assert command_for(run, (LEARNER, 0), 1.0, "a 0") is ReplicaCommand.STOP
