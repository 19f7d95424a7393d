"""End of a run: drain, release of its machines, search for its remains. Pure."""

from dataclasses import replace

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.state import Cleanup, Outcome, Run, RunState

# Wait between two searches for the remains of a run: the first one, and the longest.
CLEAN_AGAIN_S, CLEAN_AGAIN_MAX_S = 0.5, 30.0


# Why a run ends with its launcher.
LAUNCHER_STOPPED = "its launcher was stopped (SIGTERM or Ctrl-C); resume the run to continue it"


def end_run(run: Run, outcome: Outcome, now: float, config: LauncherConfig, error: str = "") -> Run:
    """Drain the run towards this outcome; a run that is already ending keeps its outcome."""
    if run.is_ending:
        return run
    return _drain_towards(replace(run, error=error), outcome, now + config.drain_s)


def request_stop(run: Run, now: float, grace_s: float, why: str = "") -> Run:
    """End the run by request, for people: `why`. For a draining run, this can only shorten the
    rest."""
    if run.state is RunState.DRAINING:
        return replace(run, drain_by=min(run.drain_by, now + grace_s))
    if run.is_ending:
        return run
    return _drain_towards(replace(run, error=why), Outcome.STOPPED, now + grace_s)


def _drain_towards(run: Run, outcome: Outcome, by: float) -> Run:
    return replace(run, state=RunState.DRAINING, outcome=outcome, drain_by=by)


def begin_teardown(run: Run, now: float, config: LauncherConfig) -> Run:
    """Begin teardown once all replicas are over: release their machines, search for remains."""
    return replace(
        run,
        state=RunState.TEARDOWN,
        cleanup=Cleanup.VERIFYING,
        clean_at=now,
        clean_by=now + config.clean_s,
    )


def record_cleanup(run: Run, gone: bool, detail: str, now: float) -> tuple[Run, list[RunNote]]:
    """Record the result of a search for the run's remains. The run ends once nothing is left,
    or when the time is up."""
    run = replace(run, cleanings=run.cleanings + 1, cleanup_detail=detail)
    goal = run.target_state or RunState.STOPPED
    if gone:
        return replace(run, cleanup=Cleanup.VERIFIED, state=goal), []
    if now >= run.clean_by:
        text = f"a leak is suspected: {detail or 'the search found no answer'}"
        return replace(run, cleanup=Cleanup.LEAK_SUSPECTED, state=goal), [RunNote(text)]
    delay = min(CLEAN_AGAIN_MAX_S, CLEAN_AGAIN_S * 2 ** (run.cleanings - 1))
    return replace(run, clean_at=min(now + delay, run.clean_by)), []


def hurry_run(run: Run, now: float) -> Run:
    """Hurry the end of the run because the launcher must exit: stop draining, and search for
    remains at most once more."""
    run = request_stop(run, now, 0.0, LAUNCHER_STOPPED)
    return replace(run, clean_by=min(run.clean_by, now)) if run.clean_by else run
