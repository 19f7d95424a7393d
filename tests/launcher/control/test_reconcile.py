"""Actual against desired replicas, without processes and without a clock."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_launcher.control import restarts, run_end, transitions
from flotilla_launcher.control.actions import (
    CleanRun,
    DrainReplica,
    KillReplica,
    RunAction,
    StartReplica,
)
from flotilla_launcher.control.reconcile import next_reconcile_due, reconcile_run
from flotilla_launcher.state import (
    GATEWAY,
    LEARNER,
    ROLLOUT,
    ExitStatus,
    Run,
    RunState,
    Unit,
)
from tests.launcher.control.played_runs import CONFIG, all_started, new_run, running_run
from tests.support.examples import examples


def test_a_new_run_starts_every_replica_at_once() -> None:
    run, actions = reconcile_run(new_run(), 0.0, CONFIG)
    assert {a.key for a in actions if isinstance(a, StartReplica)} == {
        (GATEWAY, 0),
        (LEARNER, 0),
        (ROLLOUT, 0),
        (ROLLOUT, 1),
    }
    assert run.state is RunState.PROVISIONING
    assert reconcile_run(run, 0.0, CONFIG)[1] == []


def test_a_run_is_running_when_each_service_has_a_serving_replica() -> None:
    run = all_started(new_run())
    run = reconcile_run(run, 0.0, CONFIG)[0]
    assert run.state is RunState.STARTING
    for key in ((GATEWAY, 0), (LEARNER, 0)):
        run = transitions.mark_heartbeat(run, key, "serving", serving=True)
    run = transitions.mark_heartbeat(run, (ROLLOUT, 1), "loading", serving=False)
    assert reconcile_run(run, 0.0, CONFIG)[0].state is RunState.STARTING
    run = transitions.mark_heartbeat(run, (ROLLOUT, 1), "serving", serving=True)
    assert reconcile_run(run, 0.0, CONFIG)[0].state is RunState.RUNNING


LATE = (GATEWAY, ROLLOUT)


def started_keys(actions: list[RunAction]) -> set[tuple[str, int]]:
    return {action.key for action in actions if isinstance(action, StartReplica)}


def test_late_services_start_when_the_learners_policy_is_about_to_be_sampled() -> None:
    run = all_started(replace(new_run(), late=LATE))
    assert set(run.replicas) == {(LEARNER, 0)}
    for phase in ("loading", "imitating", "draining", "failed", "no_capacity"):
        run = transitions.mark_heartbeat(run, (LEARNER, 0), phase, serving=True)
        run, actions = reconcile_run(run, 1.0, CONFIG)
        assert actions == [], phase
        # What is awaited does not keep the run from being under way.
        assert run.state is RunState.RUNNING
    for phase in ("publishing", "evaluating", "sampling", "training", "done"):
        ready = transitions.mark_heartbeat(run, (LEARNER, 0), phase, serving=True)
        ready, actions = reconcile_run(ready, 2.0, CONFIG)
        assert started_keys(actions) == {(GATEWAY, 0), (ROLLOUT, 0), (ROLLOUT, 1)}, phase
        assert ready.state is RunState.RUNNING
        assert reconcile_run(ready, 3.0, CONFIG)[1] == []


def test_late_services_that_were_started_stay_while_the_learner_loads_again() -> None:
    run = all_started(replace(new_run(), late=LATE))
    run = transitions.mark_heartbeat(run, (LEARNER, 0), "sampling", serving=True)
    run = all_started(run)
    run = transitions.mark_heartbeat(run, (LEARNER, 0), "loading", serving=False)
    again, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 3), 5.0, CONFIG)
    assert started_keys(actions) == {(ROLLOUT, 2)}
    assert not any(isinstance(action, DrainReplica) for action in actions)
    assert len(again.replicas_of(ROLLOUT)) == 3


def test_a_run_that_is_stopped_while_it_awaits_services_ends() -> None:
    run = all_started(replace(new_run(), late=LATE))
    run = run_end.request_stop(run, 1.0, 30.0, "stopped on request")
    run, actions = reconcile_run(run, 1.0, CONFIG)
    assert actions == [DrainReplica((LEARNER, 0))]
    run, _ = restarts.handle_exit(run, (LEARNER, 0), ExitStatus(0), 2.0, CONFIG)
    run, actions = reconcile_run(run, 2.0, CONFIG)
    assert actions == [CleanRun()] and run.state is RunState.TEARDOWN


def test_what_is_drained_in_vain_is_killed_even_if_its_start_was_never_reported() -> None:
    run, _ = reconcile_run(new_run(), 0.0, CONFIG)
    run = transitions.mark_registered(run, (ROLLOUT, 1), "10.0.0.2:1")
    run, _ = reconcile_run(transitions.scale_service(run, ROLLOUT, 1), 1.0, CONFIG)
    assert reconcile_run(run, 10.9, CONFIG)[1] == []
    assert reconcile_run(run, 11.0, CONFIG)[1] == [KillReplica((ROLLOUT, 1))]


def test_a_replica_that_never_serves_is_killed_and_counts_as_failed() -> None:
    run = all_started(new_run())
    run, actions = reconcile_run(run, 100.0, CONFIG)
    assert {a.key for a in actions if isinstance(a, KillReplica)} == set(run.replicas)


def test_scaling_down_drains_the_newest_and_indices_are_never_reused() -> None:
    run, actions = reconcile_run(transitions.scale_service(running_run(), ROLLOUT, 1), 0.0, CONFIG)
    assert actions == [DrainReplica((ROLLOUT, 1))]
    run, actions = reconcile_run(transitions.scale_service(run, ROLLOUT, 2), 0.0, CONFIG)
    assert actions == [StartReplica((ROLLOUT, 2))]


def test_what_is_unreachable_is_not_late() -> None:
    run = all_started(new_run())
    away = replace(run, unreachable="no answer")
    assert reconcile_run(away, 1000.0, CONFIG)[1] == []
    assert len(reconcile_run(run, 1000.0, CONFIG)[1]) == 4


FACTS = st.sampled_from(["tick", "crash", "done", "beat", "scale", "stop", "stop-now"])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(FACTS, st.integers(0, 6), st.floats(0, 30)), max_size=60))
def test_whatever_happens_a_stopped_run_ends_with_nothing_running(
    happenings: list[tuple[str, int, float]],
) -> None:
    run, now = new_run(), 0.0
    for fact, number, passed in happenings:
        now += passed
        run = _happen(run, fact, number, now)
        run, actions = reconcile_run(run, now, CONFIG)
        for action in actions:
            run = _obey(run, action, now)
        due = next_reconcile_due(run, now)
        assert due is None or due > now
    run = run_end.request_stop(run, now, 5.0)
    for _ in range(20):
        now += 1.0
        run, actions = reconcile_run(run, now, CONFIG)
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
        return restarts.handle_exit(run, key, ExitStatus(0), now, CONFIG)[0]
    if fact == "crash":
        return restarts.handle_exit(run, key, ExitStatus(1), now, CONFIG)[0]
    return run


def _obey(run: Run, action: RunAction, now: float) -> Run:
    match action:
        case StartReplica(key):
            return transitions.mark_started(run, key, Unit("u", 1, now), now, CONFIG)
        case KillReplica(key) if run.replicas[key].unit is not None:
            return restarts.handle_exit(run, key, ExitStatus(-9), now, CONFIG)[0]
        case CleanRun():
            return run_end.record_cleanup(run, True, "", now)[0]
        case DrainReplica() | KillReplica():
            return run
