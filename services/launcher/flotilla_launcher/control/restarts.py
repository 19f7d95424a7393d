"""Consequences of a replica's end: a restart after a pause, another machine, or giving up.
Pure."""

from collections.abc import Sequence
from dataclasses import replace

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.control.run_end import end_run
from flotilla_launcher.state import (
    EXIT_BAD_CONFIG,
    KILL_AGAIN_S,
    LEARNER,
    PHASE_DONE,
    ExitStatus,
    Outcome,
    Replica,
    ReplicaKey,
    ReplicaState,
    Run,
)

# A replica's phase while no machine is available for it.
PHASE_NO_CAPACITY = "no_capacity"
# Prefix of a refusing service's error message (`flotilla_common.process.service_main`).
_REFUSAL = "\nerror: "


def handle_no_capacity(
    run: Run, key: ReplicaKey, error: str, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    """Handle the lack of a machine for this replica: request one again later, up to
    `launcher.sky.provision.attempts` times."""
    replica = run.replicas[key]
    if replica.state is ReplicaState.DRAINING or run.is_ending:
        return run.with_replicas([replace(replica, state=ReplicaState.STOPPED)]), []
    number, provision = replica.attempt, config.sky.provision
    cause = f"{replica.label} found no machine in attempt {number} of {provision.attempts}: {error}"
    if number < provision.attempts:
        delay = provision.attempt_delay_s(number)
        replica = replace(
            replica,
            state=ReplicaState.RESTARTING,
            phase=PHASE_NO_CAPACITY,
            attempt=number + 1,
            due=now + delay,
        )
        return run.with_replicas([replica]), [RunNote(f"{cause}; next in {delay:g} s")]
    return _give_up_replica(run, replica, Outcome.CAPACITY, now, config, cause)


def handle_exit(
    run: Run, key: ReplicaKey, how: ExitStatus, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    """Handle the end of this replica and its machine: by request, at its goal, or by a failure."""
    replica = _without_unit(run.replicas[key])
    if replica.state.is_over:
        return run.with_replicas([replica]), []
    return _conclude_end(run, replica, how, now, config)


def handle_process_end(
    run: Run, key: ReplicaKey, ended: str, how: ExitStatus, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    """Handle the end of this replica's process, as its watcher reports it once or repeatedly. The
    machine stays for a restart, or until the watcher has the answer that there is none."""
    replica = run.replicas[key]
    if replica.state.is_over or replica.ended == ended:
        return run, []
    replica = replace(replica, ended=ended, address="", metrics_address="")
    return _conclude_end(run, replica, how, now, config)


def _conclude_end(
    run: Run, replica: Replica, how: ExitStatus, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    if replica.state is ReplicaState.DRAINING or run.is_ending:
        notes = (
            [RunNote(f"{replica.label} {describe_exit(how)} while draining")] if how.code else []
        )
        return run.with_replicas([replace(replica, state=ReplicaState.STOPPED)]), notes
    if replica.service == LEARNER and not how.code and replica.phase == PHASE_DONE:
        run = run.with_replicas([replace(replica, state=ReplicaState.STOPPED)])
        return end_run(run, Outcome.COMPLETED, now, config), []
    return _restart_or_give_up(run, replica, how, now, config)


def _without_unit(replica: Replica) -> Replica:
    return replace(
        replica,
        unit=None,
        price=None,
        address="",
        metrics_address="",
        ended="",
        exited=False,
        killed=-KILL_AGAIN_S,
    )


def _restart_or_give_up(
    run: Run, replica: Replica, how: ExitStatus, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    if how.preempted:
        return _retry_after_preemption(run, replica, now, config)
    if how.unready:
        return _retry_after_failed_setup(run, replica, how.tail, now, config)
    failures, delay = count_failure(replica.failures, how, now, config)
    replica = replace(replica, failures=failures)
    cause = f"{replica.label} {describe_exit(how)}"
    if delay is not None:
        replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
        text = f"{cause}; restart {len(failures)} of {config.max_restarts} in {delay:g} s"
        return run.with_replicas([replica]), [RunNote(text)]
    plural = "" if len(failures) == 1 else "s"
    verdict = f"{cause}; gave up after {len(failures)} failure{plural}"
    tail = f". Its last lines:\n{_last_words(how)}" if how.tail and how.began else ""
    outcome = Outcome.REFUSED if how.code == EXIT_BAD_CONFIG else Outcome.FAILED
    return _give_up_replica(run, replica, outcome, now, config, verdict, tail)


def count_failure(
    before: Sequence[float], how: ExitStatus, now: float, config: LauncherConfig
) -> tuple[tuple[float, ...], float | None]:
    """Return the times of recent failures, this one included, and the seconds until the restart;
    None if there is none."""
    failures = (*(at for at in before if now - at < config.restart_window_s), now)
    if how.code == EXIT_BAD_CONFIG or len(failures) > config.max_restarts:
        return failures, None
    return failures, _restart_delay_s(len(failures), config)


def _restart_delay_s(failures: int, config: LauncherConfig) -> float:
    return min(config.backoff_max_s, config.backoff_s * 2 ** (failures - 1))


def _last_words(how: ExitStatus) -> str:
    """Return the last lines of an exit. For a refusing service, return only its error message
    at the end."""
    at = f"\n{how.tail}".rfind(_REFUSAL) if how.code == EXIT_BAD_CONFIG else -1
    return how.tail[max(0, at) :]


def _give_up_replica(
    run: Run,
    replica: Replica,
    outcome: Outcome,
    now: float,
    config: LauncherConfig,
    verdict: str,
    tail: str = "",
) -> tuple[Run, list[RunNote]]:
    """Give up a replica; the run continues without it if another one of its service remains.
    The `tail` of its output is reported once: in a note, or as the run's error."""
    run = run.with_replicas([replace(replica, state=ReplicaState.FAILED)])
    gone = (ReplicaState.FAILED, ReplicaState.DRAINING, ReplicaState.STOPPED)
    if not all(other.state in gone for other in run.replicas_of(replica.service)):
        return run, [RunNote(verdict + tail)]
    return end_run(run, outcome, now, config, verdict + tail), [RunNote(verdict)]


def _retry_after_failed_setup(
    run: Run, replica: Replica, why: str, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    """Retry a failed setup on another machine. One machine may be broken; if several fail,
    the setup itself is."""
    number, most = replica.setups + 1, config.sky.provision.setups
    replica = replace(replica, setups=number)
    cause = f"{replica.label}: setup failed on machine {number} of {most}: {why}"
    if number >= most:
        verdict = f"{cause}; check launcher.sky.setup and SkyPilot's log"
        return _give_up_replica(run, replica, Outcome.FAILED, now, config, verdict)
    delay = _restart_delay_s(number, config)
    replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
    return run.with_replicas([replica]), [RunNote(f"{cause}; another in {delay:g} s")]


def _retry_after_preemption(
    run: Run, replica: Replica, now: float, config: LauncherConfig
) -> tuple[Run, list[RunNote]]:
    """Request another machine in place of a preempted one. Preemptions never make a run give
    up."""
    delay = _restart_delay_s(1, config)
    text = f"{replica.label} has lost its machine; the next request is in {delay:g} s"
    replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
    return run.with_replicas([replica]), [RunNote(text)]


def describe_exit(how: ExitStatus) -> str:
    """Describe an exit: `exited with code 3`, `was killed by signal 9` or `could not be
    started: WHY`."""
    if not how.began:
        return f"could not be started: {how.tail}"
    if how.code is None:
        return "ended with an unknown exit code"
    if how.code < 0:
        return f"was killed by signal {-how.code}"
    return f"exited with code {how.code}"
