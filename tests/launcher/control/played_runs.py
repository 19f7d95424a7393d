"""Runs of four replicas as the pure core sees them, in states set by hand."""

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import transitions
from flotilla_launcher.control.actions import StartReplica
from flotilla_launcher.control.reconcile import reconcile_run
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, Run, Unit

CONFIG = LauncherConfig(
    max_restarts=2, backoff_s=1.0, backoff_max_s=8.0, start_timeout_s=100, drain_s=10
)
WANTED = {GATEWAY: 1, LEARNER: 1, ROLLOUT: 2}


def new_run() -> Run:
    return transitions.mark_admitted(Run("demo-1", "demo", WANTED))


def all_started(run: Run, now: float = 0.0) -> Run:
    run, actions = reconcile_run(run, now, CONFIG)
    for action in actions:
        if isinstance(action, StartReplica):
            run = transitions.mark_started(
                run, action.key, Unit("u", 100 + action.key[1], now), now, CONFIG
            )
    return run


def running_run(now: float = 0.0) -> Run:
    run = all_started(new_run(), now)
    for key in run.replicas:
        run = transitions.mark_heartbeat(run, key, "serving", serving=True)
    return reconcile_run(run, now, CONFIG)[0]
