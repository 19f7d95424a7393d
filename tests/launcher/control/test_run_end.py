"""A run that is done or stopped: the order of its ends, and when it counts as ended."""

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import restarts, run_end, transitions
from flotilla_launcher.control.actions import (
    CleanRun,
    DrainReplica,
    KillReplica,
)
from flotilla_launcher.control.reconcile import reconcile_run
from flotilla_launcher.state import (
    GATEWAY,
    LEARNER,
    ROLLOUT,
    Cleanup,
    ExitStatus,
    RunState,
)
from tests.launcher.control.played_runs import CONFIG, running_run


def test_a_learner_that_is_done_completes_the_run_rollouts_first() -> None:
    run = transitions.mark_heartbeat(running_run(), (LEARNER, 0), "done", serving=True)
    run, _ = restarts.handle_exit(run, (LEARNER, 0), ExitStatus(0), 0.0, CONFIG)
    run, actions = reconcile_run(run, 0.0, CONFIG)
    assert actions == [DrainReplica((ROLLOUT, 0)), DrainReplica((ROLLOUT, 1))]
    for key in ((ROLLOUT, 0), (ROLLOUT, 1)):
        run, _ = restarts.handle_exit(run, key, ExitStatus(0), 1.0, CONFIG)
    run, actions = reconcile_run(run, 1.0, CONFIG)
    assert actions == [DrainReplica((GATEWAY, 0))]
    run, _ = restarts.handle_exit(run, (GATEWAY, 0), ExitStatus(0), 2.0, CONFIG)
    run, actions = reconcile_run(run, 2.0, CONFIG)
    assert (run.state, actions) == (RunState.TEARDOWN, [CleanRun()])
    assert run_end.record_cleanup(run, True, "", 2.0)[0].state is RunState.COMPLETED


def test_a_stop_kills_what_does_not_drain_in_time() -> None:
    run = run_end.request_stop(running_run(), 0.0, 10.0)
    run, actions = reconcile_run(run, 0.0, CONFIG)
    assert set(actions) == {DrainReplica((ROLLOUT, 0)), DrainReplica((ROLLOUT, 1))}
    run, actions = reconcile_run(run, 5.0, CONFIG)
    assert set(actions) == {KillReplica((ROLLOUT, 0)), KillReplica((ROLLOUT, 1))}
    assert reconcile_run(run, 5.5, CONFIG)[1] == [], "a kill is given time"
    run, actions = reconcile_run(run, 10.0, CONFIG)
    assert {DrainReplica((LEARNER, 0)), DrainReplica((GATEWAY, 0))} <= set(actions)
    assert {KillReplica((LEARNER, 0)), KillReplica((GATEWAY, 0)), KillReplica((ROLLOUT, 0))} <= set(
        actions
    )
    for key in run.replicas:
        run, _ = restarts.handle_exit(run, key, ExitStatus(-9), 11.0, CONFIG)
    run, actions = reconcile_run(run, 11.0, CONFIG)
    assert actions == [CleanRun()]
    assert run.target_state is RunState.STOPPED


def test_the_learner_drains_once_the_rollouts_watchers_report_their_end() -> None:
    run, _ = reconcile_run(run_end.request_stop(running_run(), 0.0, 60.0), 0.0, CONFIG)
    run = transitions.mark_exit_reported(run, (ROLLOUT, 0))
    assert reconcile_run(run, 1.0, CONFIG)[1] == []
    run = transitions.mark_exit_reported(run, (ROLLOUT, 1))
    run, actions = reconcile_run(run, 1.0, CONFIG)
    assert set(actions) == {DrainReplica((GATEWAY, 0)), DrainReplica((LEARNER, 0))}
    assert run.replicas[(LEARNER, 0)].due == 60.0
    for key in run.replicas:
        run = transitions.mark_exit_reported(run, key)
    run, actions = reconcile_run(run, 2.0, CONFIG)
    assert (run.state, actions) == (RunState.DRAINING, []), "their machines are still there"


def test_a_second_stop_shortens_the_first() -> None:
    run, _ = reconcile_run(run_end.request_stop(running_run(), 0.0, 60.0), 0.0, CONFIG)
    run, actions = reconcile_run(run_end.request_stop(run, 1.0, 0.0), 1.0, CONFIG)
    assert {a.key for a in actions if isinstance(a, KillReplica)} == set(run.replicas)
    assert run_end.request_stop(run, 2.0, 100.0).drain_by == 1.0


def test_a_run_has_ended_only_with_evidence_or_with_a_suspicion() -> None:
    run = run_end.begin_teardown(
        run_end.request_stop(running_run(), 0.0, 0.0), 0.0, LauncherConfig(clean_s=3.0)
    )
    now, looks = 0.0, 0
    while not run.state.has_ended:
        run, actions = reconcile_run(run, now, CONFIG)
        if actions:
            looks += 1
            run, _ = run_end.record_cleanup(run, False, "cluster x is up", now)
        assert run.cleanup is not Cleanup.VERIFIED
        now += 0.25
    assert looks == 4, "after 0, 0.5, 1.5 s, and when the time was up"
    assert (run.cleanup, run.cleanup_detail) == (Cleanup.LEAK_SUSPECTED, "cluster x is up")
    run = run_end.begin_teardown(run_end.request_stop(running_run(), 0.0, 0.0), 0.0, CONFIG)
    run, _ = run_end.record_cleanup(run, True, "nothing is left", 0.0)
    assert (run.state, run.cleanup) == (RunState.STOPPED, Cleanup.VERIFIED)
