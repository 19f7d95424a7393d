"""The run state machine, without processes and without a clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.launcher.config.launcher import LauncherConfig
from services.launcher.control import restarts, run_end, transitions
from services.launcher.control.actions import (
    CleanRun,
    DrainReplica,
    KillReplica,
    RunAction,
    RunNote,
    StartReplica,
)
from services.launcher.control.reconcile import next_reconcile_due, reconcile_run
from services.launcher.state import (
    EXIT_BAD_CONFIG,
    GATEWAY,
    LEARNER,
    ROLLOUT,
    Cleanup,
    ExitStatus,
    LifecyclePolicy,
    Outcome,
    ReplicaState,
    Run,
    RunState,
    Unit,
)

POLICY = LifecyclePolicy(
    max_restarts=2, backoff_s=1.0, backoff_max_s=8.0, start_timeout_s=100, drain_s=10
)
WANTED = {GATEWAY: 1, LEARNER: 1, ROLLOUT: 2}


def new() -> Run:
    return transitions.mark_admitted(Run("demo-1", "demo", WANTED))


def all_started(run: Run, now: float = 0.0) -> Run:
    run, actions = reconcile_run(run, now, POLICY)
    for action in actions:
        if isinstance(action, StartReplica):
            run = transitions.mark_started(
                run, action.key, Unit("u", 100 + action.key[1], now), now, POLICY
            )
    return run


def running(now: float = 0.0) -> Run:
    run = all_started(new(), now)
    for key in run.replicas:
        run = transitions.mark_heartbeat(run, key, "serving", serving=True)
    return reconcile_run(run, now, POLICY)[0]


def test_a_new_run_starts_every_replica_at_once() -> None:
    run, actions = reconcile_run(new(), 0.0, POLICY)
    assert {a.key for a in actions if isinstance(a, StartReplica)} == {
        (GATEWAY, 0),
        (LEARNER, 0),
        (ROLLOUT, 0),
        (ROLLOUT, 1),
    }
    assert run.state is RunState.PROVISIONING
    assert reconcile_run(run, 0.0, POLICY)[1] == []


def test_a_run_is_running_when_each_service_has_a_serving_replica() -> None:
    run = all_started(new())
    run = reconcile_run(run, 0.0, POLICY)[0]
    assert run.state is RunState.STARTING
    for key in ((GATEWAY, 0), (LEARNER, 0)):
        run = transitions.mark_heartbeat(run, key, "serving", serving=True)
    run = transitions.mark_heartbeat(run, (ROLLOUT, 1), "loading", serving=False)
    assert reconcile_run(run, 0.0, POLICY)[0].state is RunState.STARTING
    run = transitions.mark_heartbeat(run, (ROLLOUT, 1), "serving", serving=True)
    assert reconcile_run(run, 0.0, POLICY)[0].state is RunState.RUNNING


def test_a_crashed_replica_is_restarted_after_a_growing_wait() -> None:
    run = running()
    for failures, delay in ((1, 1.0), (2, 2.0)):
        run, notes = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(1), 50.0, POLICY)
        assert f"restart {failures} of 2 in {delay:g} s" in notes[0].text
        assert reconcile_run(run, 50.0 + delay - 0.1, POLICY)[1] == []
        run, actions = reconcile_run(run, 50.0 + delay, POLICY)
        assert actions == [StartReplica((ROLLOUT, 0))]
        assert run.replicas[ROLLOUT, 0].restarts == failures


def test_failures_long_ago_do_not_count() -> None:
    run = running()
    for now in (0.0, 1_000.0, 2_000.0, 3_000.0):
        run, _ = restarts.handle_exit(run, (LEARNER, 0), ExitStatus(1), now, POLICY)
        run, _ = reconcile_run(run, now + 1.0, POLICY)
        assert run.replicas[LEARNER, 0].state is ReplicaState.STARTING


def test_a_learner_that_keeps_crashing_fails_the_run_with_its_last_lines() -> None:
    run = running()
    for now in (0.0, 10.0, 20.0):
        how = ExitStatus(-9, "boom\nout of memory")
        run, notes = restarts.handle_exit(run, (LEARNER, 0), how, now, POLICY)
        run, _ = reconcile_run(run, now + 5.0, POLICY)
    assert run.state is RunState.DRAINING
    assert run.target_state is RunState.FAILED
    assert "learner-0 was killed by signal 9; gave up after 3 failures" in run.error
    assert run.error.endswith("boom\nout of memory")
    assert "out of memory" not in notes[0].text, "its error is told with its end"


def test_of_a_service_that_refuses_only_the_refusal_is_shown() -> None:
    log = '{"event": "a group was dropped"}\nerror: of before\n{"event": "alarm"}'
    how = ExitStatus(EXIT_BAD_CONFIG, f"{log}\nerror: the template\nis wrong")
    run, _ = restarts.handle_exit(running(), (LEARNER, 0), how, 0.0, POLICY)
    assert run.error.endswith("Its last lines:\nerror: the template\nis wrong")
    assert "{" not in run.error
    run, _ = restarts.handle_exit(
        running(), (LEARNER, 0), ExitStatus(EXIT_BAD_CONFIG, "usage: ..."), 0.0, POLICY
    )
    assert run.error.endswith("Its last lines:\nusage: ...")


def test_one_lost_rollout_of_two_does_not_fail_the_run() -> None:
    run = running()
    for _ in range(3):
        run, _ = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(1), 0.0, POLICY)
        run, _ = reconcile_run(run, 8.0, POLICY)
    assert run.replicas[ROLLOUT, 0].state is ReplicaState.FAILED
    assert run.state is RunState.RUNNING
    assert reconcile_run(run, 9.0, POLICY)[1] == [], "a failed replica is not replaced for ever"
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 1), 9.0, POLICY)
    assert actions == [], "scaling down drops the failed one"
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 2), 9.0, POLICY)
    assert actions == [StartReplica((ROLLOUT, 2))]


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_one_that_was_scaled_away_keeps_no_run_whose_last_replica_is_lost(
    state: ReplicaState,
) -> None:
    run, _ = reconcile_run(transitions.scale_service(running(), ROLLOUT, 1), 0.0, POLICY)
    assert run.replicas[ROLLOUT, 1].state is ReplicaState.DRAINING
    if state is ReplicaState.STOPPED:
        run, _ = restarts.handle_exit(run, (ROLLOUT, 1), ExitStatus(0), 0.0, POLICY)
    run, _ = restarts.handle_exit(run, (ROLLOUT, 0), ExitStatus(2, "a bad key"), 0.0, POLICY)
    assert run.target_state is RunState.FAILED
    assert "a bad key" in run.error


def test_a_config_error_is_not_tried_again() -> None:
    run, _ = restarts.handle_exit(
        running(), (LEARNER, 0), ExitStatus(2, "learner.steps: missing"), 0.0, POLICY
    )
    assert run.target_state is RunState.FAILED
    assert "learner.steps: missing" in run.error


def test_a_learner_that_is_done_completes_the_run_rollouts_first() -> None:
    run = transitions.mark_heartbeat(running(), (LEARNER, 0), "done", serving=True)
    run, _ = restarts.handle_exit(run, (LEARNER, 0), ExitStatus(0), 0.0, POLICY)
    run, actions = reconcile_run(run, 0.0, POLICY)
    assert actions == [DrainReplica((ROLLOUT, 0)), DrainReplica((ROLLOUT, 1))]
    for key in ((ROLLOUT, 0), (ROLLOUT, 1)):
        run, _ = restarts.handle_exit(run, key, ExitStatus(0), 1.0, POLICY)
    run, actions = reconcile_run(run, 1.0, POLICY)
    assert actions == [DrainReplica((GATEWAY, 0))]
    run, _ = restarts.handle_exit(run, (GATEWAY, 0), ExitStatus(0), 2.0, POLICY)
    run, actions = reconcile_run(run, 2.0, POLICY)
    assert (run.state, actions) == (RunState.TEARDOWN, [CleanRun()])
    assert run_end.record_cleanup(run, True, "", 2.0)[0].state is RunState.COMPLETED


def test_a_learner_that_exits_before_it_is_done_is_restarted() -> None:
    run, _ = restarts.handle_exit(running(), (LEARNER, 0), ExitStatus(0), 0.0, POLICY)
    assert run.replicas[LEARNER, 0].state is ReplicaState.RESTARTING


def test_a_stop_kills_what_does_not_drain_in_time() -> None:
    run = run_end.request_stop(running(), 0.0, 10.0)
    run, actions = reconcile_run(run, 0.0, POLICY)
    assert set(actions) == {DrainReplica((ROLLOUT, 0)), DrainReplica((ROLLOUT, 1))}
    run, actions = reconcile_run(run, 5.0, POLICY)
    assert set(actions) == {KillReplica((ROLLOUT, 0)), KillReplica((ROLLOUT, 1))}
    assert reconcile_run(run, 5.5, POLICY)[1] == [], "a kill is given time"
    run, actions = reconcile_run(run, 10.0, POLICY)
    assert {DrainReplica((LEARNER, 0)), DrainReplica((GATEWAY, 0))} <= set(actions)
    assert {KillReplica((LEARNER, 0)), KillReplica((GATEWAY, 0)), KillReplica((ROLLOUT, 0))} <= set(
        actions
    )
    for key in run.replicas:
        run, _ = restarts.handle_exit(run, key, ExitStatus(-9), 11.0, POLICY)
    run, actions = reconcile_run(run, 11.0, POLICY)
    assert actions == [CleanRun()]
    assert run.target_state is RunState.STOPPED


def test_the_learner_drains_once_the_rollouts_watchers_say_that_they_ended() -> None:
    run, _ = reconcile_run(run_end.request_stop(running(), 0.0, 60.0), 0.0, POLICY)
    run = transitions.mark_exit_reported(run, (ROLLOUT, 0))
    assert reconcile_run(run, 1.0, POLICY)[1] == []
    run = transitions.mark_exit_reported(run, (ROLLOUT, 1))
    run, actions = reconcile_run(run, 1.0, POLICY)
    assert set(actions) == {DrainReplica((GATEWAY, 0)), DrainReplica((LEARNER, 0))}
    assert run.replicas[(LEARNER, 0)].due == 60.0
    for key in run.replicas:
        run = transitions.mark_exit_reported(run, key)
    run, actions = reconcile_run(run, 2.0, POLICY)
    assert (run.state, actions) == (RunState.DRAINING, []), "their machines are still there"


def test_what_is_drained_in_vain_is_killed_even_if_its_backend_never_said_that_it_started() -> None:
    run, _ = reconcile_run(new(), 0.0, POLICY)
    run = transitions.mark_registered(run, (ROLLOUT, 1), "10.0.0.2:1")
    run, _ = reconcile_run(transitions.scale_service(run, ROLLOUT, 1), 1.0, POLICY)
    assert reconcile_run(run, 10.9, POLICY)[1] == []
    assert reconcile_run(run, 11.0, POLICY)[1] == [KillReplica((ROLLOUT, 1))]


def test_a_second_stop_shortens_the_first() -> None:
    run, _ = reconcile_run(run_end.request_stop(running(), 0.0, 60.0), 0.0, POLICY)
    run, actions = reconcile_run(run_end.request_stop(run, 1.0, 0.0), 1.0, POLICY)
    assert {a.key for a in actions if isinstance(a, KillReplica)} == set(run.replicas)
    assert run_end.request_stop(run, 2.0, 100.0).drain_by == 1.0


def test_a_replica_that_never_serves_is_killed_and_counts_as_failed() -> None:
    run = all_started(new())
    run, actions = reconcile_run(run, 100.0, POLICY)
    assert {a.key for a in actions if isinstance(a, KillReplica)} == set(run.replicas)


def test_scaling_down_drains_the_newest_and_indices_are_never_reused() -> None:
    run, actions = reconcile_run(transitions.scale_service(running(), ROLLOUT, 1), 0.0, POLICY)
    assert actions == [DrainReplica((ROLLOUT, 1))]
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 2), 0.0, POLICY)
    assert actions == [StartReplica((ROLLOUT, 2))]


def test_a_word_from_a_replica_of_nobody_changes_nothing() -> None:
    run = running()
    assert transitions.mark_heartbeat(run, (ROLLOUT, 9), "serving", serving=True) == run
    assert transitions.mark_registered(run, (ROLLOUT, 9), "127.0.0.1:1") == run


def test_nobody_having_a_machine_is_asked_again_and_then_the_outcome() -> None:
    policy = LifecyclePolicy(attempts=3, attempt_backoff_s=120.0, max_restarts=0)
    run, _ = reconcile_run(new(), 0.0, policy)
    now = 0.0
    for number, delay in ((1, 120.0), (2, 240.0)):
        assert run.replicas[LEARNER, 0].attempt == number
        run, notes = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, policy)
        assert f"in attempt {number} of 3: sold out; next in {delay:g} s" in notes[0].text
        assert reconcile_run(run, now + delay - 1, policy)[1] == []
        now += delay
        run, actions = reconcile_run(run, now, policy)
        assert actions == [StartReplica((LEARNER, 0))]
        assert run.replicas[LEARNER, 0].restarts == 0, "it never ran"
    run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, policy)
    assert (run.outcome, run.target_state) == (Outcome.CAPACITY, RunState.FAILED)
    assert "sold out" in run.error


def test_by_default_a_machine_is_asked_for_four_times_with_2_4_and_8_minutes_between() -> None:
    policy = LauncherConfig().to_policy()
    run, now = reconcile_run(new(), 0.0, policy)[0], 0.0
    for delay in (120.0, 240.0, 480.0):
        run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, policy)
        assert run.replicas[LEARNER, 0].due - now == delay
        now += delay
        run, actions = reconcile_run(run, now, policy)
        assert actions == [StartReplica((LEARNER, 0))]
    run, _ = restarts.handle_no_capacity(run, (LEARNER, 0), "sold out", now, policy)
    assert (policy.attempts, run.outcome) == (4, Outcome.CAPACITY)


def test_a_rollout_too_many_that_nobody_has_a_machine_for_does_not_fail_the_run() -> None:
    policy = LifecyclePolicy(attempts=1)
    run, _ = reconcile_run(transitions.scale_service(running(), ROLLOUT, 3), 0.0, policy)
    run, _ = restarts.handle_no_capacity(run, (ROLLOUT, 2), "sold out", 0.0, policy)
    assert run.replicas[ROLLOUT, 2].state is ReplicaState.FAILED
    assert run.state is RunState.RUNNING


def test_a_run_has_ended_only_with_evidence_or_with_a_suspicion() -> None:
    run = run_end.begin_teardown(
        run_end.request_stop(running(), 0.0, 0.0), 0.0, LifecyclePolicy(clean_s=3.0)
    )
    now, looks = 0.0, 0
    while not run.state.has_ended:
        run, actions = reconcile_run(run, now, POLICY)
        if actions:
            looks += 1
            run, _ = run_end.record_cleanup(run, False, "cluster x is up", now)
        assert run.cleanup is not Cleanup.VERIFIED
        now += 0.25
    assert looks == 4, "after 0, 0.5, 1.5 s, and when the time was up"
    assert (run.cleanup, run.cleanup_detail) == (Cleanup.LEAK_SUSPECTED, "cluster x is up")
    run = run_end.begin_teardown(run_end.request_stop(running(), 0.0, 0.0), 0.0, POLICY)
    run, _ = run_end.record_cleanup(run, True, "nothing is left", 0.0)
    assert (run.state, run.cleanup) == (RunState.STOPPED, Cleanup.VERIFIED)


def test_what_cannot_be_asked_is_not_late() -> None:
    run = all_started(new())
    away = replace(run, unreachable="nobody answers")
    assert reconcile_run(away, 1000.0, POLICY)[1] == []
    assert len(reconcile_run(run, 1000.0, POLICY)[1]) == 4


FACTS = st.sampled_from(["tick", "crash", "done", "beat", "scale", "stop", "stop-now"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FACTS, st.integers(0, 6), st.floats(0, 30)), max_size=60))
def test_whatever_happens_a_stopped_run_ends_with_nothing_running(
    happenings: list[tuple[str, int, float]],
) -> None:
    run, now = new(), 0.0
    for fact, number, passed in happenings:
        now += passed
        run = _happen(run, fact, number, now)
        run, actions = reconcile_run(run, now, POLICY)
        for action in actions:
            run = _obey(run, action, now)
        due = next_reconcile_due(run, now)
        assert due is None or due > now
    run = run_end.request_stop(run, now, 5.0)
    for _ in range(20):
        now += 1.0
        run, actions = reconcile_run(run, now, POLICY)
        for action in actions:
            run = _obey(run, action, now)
    assert run.state.has_ended
    assert all(replica.unit is None for replica in run.replicas.values())


def _happen(run: Run, fact: str, number: int, now: float) -> Run:
    live = sorted(key for key, replica in run.replicas.items() if replica.unit)
    if fact == "scale" and not run.state.has_ended:
        return transitions.scale_service(run, ROLLOUT, 1 + number)
    if fact in ("stop", "stop-now"):
        return run_end.request_stop(run, now, 5.0 if fact == "stop" else 0.0)
    if not live:
        return run
    key = live[number % len(live)]
    if fact == "beat":
        return transitions.mark_heartbeat(run, key, "serving", serving=True)
    if fact == "done" and key[0] == LEARNER:
        run = transitions.mark_heartbeat(run, key, "done", serving=True)
        return restarts.handle_exit(run, key, ExitStatus(0), now, POLICY)[0]
    if fact == "crash":
        return restarts.handle_exit(run, key, ExitStatus(1), now, POLICY)[0]
    return run


def _obey(run: Run, action: RunAction, now: float) -> Run:
    match action:
        case StartReplica(key):
            return transitions.mark_started(run, key, Unit("u", 1, now), now, POLICY)
        case KillReplica(key) if run.replicas[key].unit is not None:
            return restarts.handle_exit(run, key, ExitStatus(-9), now, POLICY)[0]
        case CleanRun():
            return run_end.record_cleanup(run, True, "", now)[0]
        case DrainReplica() | KillReplica() | RunNote():
            return run


def test_a_setup_that_fails_has_machines_of_its_own_and_uses_up_no_restart() -> None:
    policy = replace(POLICY, max_restarts=0, setups=3)
    unready = ExitStatus(1, "no space left", unready=True)
    run = all_started(new())
    for number in (1, 2):
        run, notes = restarts.handle_exit(run, (LEARNER, 0), unready, 10.0 * number, policy)
        assert f"setup failed on machine {number} of 3: no space left" in notes[0].text
        run, actions = reconcile_run(run, 10.0 * number + 5, policy)
        assert StartReplica((LEARNER, 0)) in actions
        run = transitions.mark_started(run, (LEARNER, 0), Unit("u"), 10.0 * number + 6, policy)
    assert run.replicas[LEARNER, 0].restarts == 0
    served = transitions.mark_heartbeat(run, (LEARNER, 0), "serving", serving=True)
    assert served.replicas[LEARNER, 0].setups == 0
    run, _ = restarts.handle_exit(run, (LEARNER, 0), unready, 30.0, policy)
    assert (run.outcome, run.state) == (Outcome.FAILED, RunState.DRAINING)
    assert "setup failed on machine 3 of 3" in run.error
