"""Reports of replicas, noted in the record of their run."""

from flotilla_launcher.control import transitions
from flotilla_launcher.state import ROLLOUT
from tests.launcher.control.played_runs import running_run


def test_a_report_of_an_unknown_replica_changes_nothing() -> None:
    run = running_run()
    assert transitions.mark_heartbeat(run, (ROLLOUT, 9), "serving", serving=True) == run
    assert transitions.mark_registered(run, (ROLLOUT, 9), "127.0.0.1:1") == run
