"""End of a run: it drains, its machines are given back, and its remains are looked for. Pure."""

from dataclasses import replace

from services.launcher.control.actions import RunNote
from services.launcher.state import Cleanup, LifecyclePolicy, Outcome, Run, RunState

# Between two looks for what an ended run has left: at first, and at last.
CLEAN_AGAIN_S, CLEAN_AGAIN_MAX_S = 0.5, 30.0


def end_run(
    run: Run, outcome: Outcome, now: float, policy: LifecyclePolicy, error: str = ""
) -> Run:
    """Drain the run towards this outcome; a run that is ending keeps the one it has."""
    if run.is_ending:
        return run
    return _drain_towards(replace(run, error=error), outcome, now + policy.drain_s)


def request_stop(run: Run, now: float, grace_s: float) -> Run:
    """End the run by request. On a draining run this can only shorten what is left."""
    if run.state is RunState.DRAINING:
        return replace(run, drain_by=min(run.drain_by, now + grace_s))
    if run.is_ending:
        return run
    return _drain_towards(run, Outcome.STOPPED, now + grace_s)


def _drain_towards(run: Run, outcome: Outcome, by: float) -> Run:
    return replace(run, state=RunState.DRAINING, outcome=outcome, drain_by=by)


def begin_teardown(run: Run, now: float, policy: LifecyclePolicy) -> Run:
    """Begin teardown, as all replicas are over: their machines are given back, and their
    remains looked for."""
    return replace(
        run,
        state=RunState.TEARDOWN,
        cleanup=Cleanup.VERIFYING,
        clean_at=now,
        clean_by=now + policy.clean_s,
    )


def record_cleanup(run: Run, gone: bool, detail: str, now: float) -> tuple[Run, list[RunNote]]:
    """Record the result of a look for the run's remains. The run has ended once nothing is
    left, or when too much time has passed."""
    run = replace(run, cleanings=run.cleanings + 1, cleanup_detail=detail)
    goal = run.target_state or RunState.STOPPED
    if gone:
        return replace(run, cleanup=Cleanup.VERIFIED, state=goal), []
    if now >= run.clean_by:
        text = f"a leak is suspected: {detail or 'nobody could be asked'}"
        return replace(run, cleanup=Cleanup.LEAK_SUSPECTED, state=goal), [RunNote(text)]
    delay = min(CLEAN_AGAIN_MAX_S, CLEAN_AGAIN_S * 2 ** (run.cleanings - 1))
    return replace(run, clean_at=min(now + delay, run.clean_by)), []


def hurry_run(run: Run, now: float) -> Run:
    """Hurry the end of the run, as the launcher must exit: drain no longer, and look for
    remains once more at most."""
    run = request_stop(run, now, 0.0)
    return replace(run, clean_by=min(run.clean_by, now)) if run.clean_by else run
