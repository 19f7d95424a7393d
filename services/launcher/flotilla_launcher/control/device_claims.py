"""Devices that a run needs on the machine of its launcher. Pure."""

from flotilla_launcher.backends.ports import DeviceClaim
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.state import ReplicaState, Run


def make_claim(
    run: Run, config: LauncherConfig, submitted: float, *, waits: bool = True
) -> DeviceClaim:
    """Make the claim of a run to the devices of its wanted replicas, and of those that drain."""
    count = 0
    for service, each in config.gpu_counts().items():
        present = [r for r in run.replicas_of(service) if r.state is not ReplicaState.STOPPED]
        kept = [r for r in present if r.state is not ReplicaState.DRAINING]
        lacking = max(0, run.wanted.get(service, 0) - len(kept))
        count += each * (len(present) + lacking)
    return DeviceClaim(run.run_id, count, run.priority, submitted, waits)
