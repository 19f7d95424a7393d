"""What can happen to a run, and what that changes. Pure; the clock is an argument."""

from dataclasses import replace

from services.launcher.state import (
    EXIT_BAD_CONFIG,
    KILL_AGAIN_S,
    LEARNER,
    PHASE_DONE,
    Cleanup,
    Exit,
    Key,
    Note,
    Outcome,
    Policy,
    Replica,
    ReplicaState,
    Run,
    RunState,
    Unit,
)

# Between two looks for what an ended run has left: at first, and at last.
CLEAN_AGAIN_S, CLEAN_AGAIN_MAX_S = 0.5, 30.0
# A replica's phase while nobody has a machine for it.
PHASE_NO_CAPACITY = "no_capacity"

# How a service that refuses begins what it has to say (`services.common.service_main`).
_REFUSAL = "\nerror: "


def passed(run: Run) -> Run:
    """Nothing speaks against the start."""
    return replace(run, state=RunState.PROVISIONING) if run.state is RunState.PREFLIGHT else run


def started(run: Run, key: Key, unit: Unit, now: float, policy: Policy) -> Run:
    """The backend has started this replica; only now it can be late."""
    replica = replace(run.replicas[key], unit=unit, attempt=1)
    if replica.state is ReplicaState.STARTING:
        replica = replace(replica, due=now + policy.start_timeout_s)
    return run.put([replica])


def taken_over(run: Run, now: float, grace_s: float) -> Run:
    """Another launcher goes on with this run. What began to serve while none was there is not late:
    it has so long to say so."""
    waiting = [r for r in run.replicas.values() if r.state is ReplicaState.STARTING and r.live]
    return run.put([replace(r, due=max(r.due, now + grace_s)) for r in waiting])


def no_capacity(
    run: Run, key: Key, error: str, now: float, policy: Policy
) -> tuple[Run, list[Note]]:
    """Nobody has a machine for this replica: ask again later, but not for ever."""
    replica = run.replicas[key]
    if replica.state is ReplicaState.DRAINING or run.ending:
        return run.put([replace(replica, state=ReplicaState.STOPPED)]), []
    number = replica.attempt
    cause = f"{replica.label} found no machine in attempt {number} of {policy.attempts}: {error}"
    if number < policy.attempts:
        delay = policy.attempt_backoff(number)
        replica = replace(
            replica,
            state=ReplicaState.RESTARTING,
            phase=PHASE_NO_CAPACITY,
            attempt=number + 1,
            due=now + delay,
        )
        return run.put([replica]), [Note(f"{cause}; next in {delay:g} s")]
    return _given_up(run, replica, Outcome.CAPACITY, now, policy, cause)


def registered(run: Run, key: Key, address: str, metrics_address: str = "") -> Run:
    """This replica has announced where it serves. Unknown replicas are none of the run's."""
    if key not in run.replicas:
        return run
    known = run.replicas[key]
    at = replace(known, address=address, metrics_address=metrics_address, exited=False)
    return run.put([at])


def beat(run: Run, key: Key, phase: str, serving: bool) -> Run:
    """This replica says that it is alive; serving for the first time ends its start."""
    replica = run.replicas.get(key)
    if replica is None:
        return run
    replica = replace(replica, phase=phase)
    if serving and replica.state is ReplicaState.STARTING:
        replica = replace(replica, state=ReplicaState.RUNNING, setups=0, due=0.0)
    return run.put([replica])


def priced(run: Run, key: Key, price: float | None) -> tuple[Run, list[Note]]:
    """This replica is on machines that cost so much an hour; None: nobody knows."""
    replica = run.replicas.get(key)
    gone = replica is None or replica.state.over or replica.state is ReplicaState.RESTARTING
    if replica is None or gone or replica.price == price:
        return run, []
    run = run.put([replace(replica, price=price)])
    return run, [] if price is None else [Note(f"{replica.label} costs ${price:,.2f} an hour")]


def reported_exit(run: Run, key: Key) -> Run:
    """This replica's watcher has said that it ended for good, and how is told when it is gone."""
    if key not in run.replicas:
        return run
    return run.put([replace(run.replicas[key], exited=True)])


def exited(run: Run, key: Key, how: Exit, now: float, policy: Policy) -> tuple[Run, list[Note]]:
    """This replica's process is gone: by request, at its goal, or by a failure."""
    replica = run.replicas[key]
    replica = replace(
        replica,
        unit=None,
        price=None,
        address="",
        metrics_address="",
        exited=False,
        killed=-KILL_AGAIN_S,
    )
    if replica.state is ReplicaState.DRAINING or run.ending:
        notes = [Note(f"{replica.label} {describe_exit(how)} while draining")] if how.code else []
        return run.put([replace(replica, state=ReplicaState.STOPPED)]), notes
    if replica.service == LEARNER and not how.code and replica.phase == PHASE_DONE:
        run = run.put([replace(replica, state=ReplicaState.STOPPED)])
        return end(run, Outcome.COMPLETED, now, policy), []
    return _failed(run, replica, how, now, policy)


def _failed(
    run: Run, replica: Replica, how: Exit, now: float, policy: Policy
) -> tuple[Run, list[Note]]:
    if how.preempted:
        return _begin_elsewhere(run, replica, now, policy)
    if how.unready:
        return _set_up_elsewhere(run, replica, how.tail, now, policy)
    recent = [at for at in replica.failures if now - at < policy.restart_window_s]
    failures = (*recent, now)
    replica = replace(replica, failures=failures)
    cause = f"{replica.label} {describe_exit(how)}"
    if how.code != EXIT_BAD_CONFIG and len(failures) <= policy.max_restarts:
        delay = policy.backoff(len(failures))
        replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
        text = f"{cause}; restart {len(failures)} of {policy.max_restarts} in {delay:g} s"
        return run.put([replica]), [Note(text)]
    verdict = f"{cause}; gave up after {len(failures)} failures"
    tail = f". Its last lines:\n{_last_words(how)}" if how.tail and how.began else ""
    outcome = Outcome.REFUSED if how.code == EXIT_BAD_CONFIG else Outcome.FAILED
    return _given_up(run, replica, outcome, now, policy, verdict, tail)


def _last_words(how: Exit) -> str:
    """Whoever refuses says why in the end, and nobody need read the log before that."""
    at = f"\n{how.tail}".rfind(_REFUSAL) if how.code == EXIT_BAD_CONFIG else -1
    return how.tail[max(0, at) :]


def _given_up(
    run: Run,
    replica: Replica,
    outcome: Outcome,
    now: float,
    policy: Policy,
    verdict: str,
    tail: str = "",
) -> tuple[Run, list[Note]]:
    """The run goes on without this replica, if another one of its service is to stay. What it said
    last, its `tail`, is told once: now, or as the run's error with its end."""
    run = run.put([replace(replica, state=ReplicaState.FAILED)])
    gone = (ReplicaState.FAILED, ReplicaState.DRAINING, ReplicaState.STOPPED)
    if not all(other.state in gone for other in run.of(replica.service)):
        return run, [Note(verdict + tail)]
    return end(run, outcome, now, policy, verdict + tail), [Note(verdict)]


def _set_up_elsewhere(
    run: Run, replica: Replica, why: str, now: float, policy: Policy
) -> tuple[Run, list[Note]]:
    """A machine may be broken; if several are, it is what they are to be set up with."""
    number = replica.setups + 1
    replica = replace(replica, setups=number)
    cause = f"{replica.label}: setup failed on machine {number} of {policy.setups}: {why}"
    if number >= policy.setups:
        verdict = f"{cause}; see launcher.sky.setup, and SkyPilot's log of it"
        return _given_up(run, replica, Outcome.FAILED, now, policy, verdict)
    delay = policy.backoff(number)
    replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
    return run.put([replica]), [Note(f"{cause}; another in {delay:g} s")]


def _begin_elsewhere(
    run: Run, replica: Replica, now: float, policy: Policy
) -> tuple[Run, list[Note]]:
    """However often machines are taken away, a run goes on for as long as it may."""
    delay = policy.backoff(1)
    text = f"{replica.label} has no machine any more; it asks for another in {delay:g} s"
    replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
    return run.put([replica]), [Note(text)]


def describe_exit(how: Exit) -> str:
    """`exited with code 3`, `was killed by signal 9` or `could not be started: WHY`."""
    if not how.began:
        return f"could not be started: {how.tail}"
    if how.code is None:
        return "ended unseen"
    if how.code < 0:
        return f"was killed by signal {-how.code}"
    return f"exited with code {how.code}"


def end(run: Run, outcome: Outcome, now: float, policy: Policy, error: str = "") -> Run:
    """Drain the run towards this outcome; a run that is ending keeps the one it has."""
    if run.ending:
        return run
    return _drain_towards(replace(run, error=error), outcome, now + policy.drain_s)


def stop(run: Run, now: float, grace_s: float) -> Run:
    """End the run by request. On a draining run this can only shorten what is left."""
    if run.state is RunState.DRAINING:
        return replace(run, drain_by=min(run.drain_by, now + grace_s))
    if run.ending:
        return run
    return _drain_towards(run, Outcome.STOPPED, now + grace_s)


def _drain_towards(run: Run, outcome: Outcome, by: float) -> Run:
    return replace(run, state=RunState.DRAINING, outcome=outcome, drain_by=by)


def torn_down(run: Run, now: float, policy: Policy) -> Run:
    """All replicas are over: what they ran on is given back, and looked for."""
    return replace(
        run,
        state=RunState.TEARDOWN,
        cleanup=Cleanup.VERIFYING,
        clean_at=now,
        clean_by=now + policy.clean_s,
    )


def cleaned(run: Run, gone: bool, detail: str, now: float) -> tuple[Run, list[Note]]:
    """What a look for the run's remains has shown. The run has ended once nothing is left, or when
    too much time has passed."""
    run = replace(run, cleanings=run.cleanings + 1, cleanup_detail=detail)
    goal = run.goal or RunState.STOPPED
    if gone:
        return replace(run, cleanup=Cleanup.VERIFIED, state=goal), []
    if now >= run.clean_by:
        text = f"a leak is suspected: {detail or 'nobody could be asked'}"
        return replace(run, cleanup=Cleanup.LEAK_SUSPECTED, state=goal), [Note(text)]
    delay = min(CLEAN_AGAIN_MAX_S, CLEAN_AGAIN_S * 2 ** (run.cleanings - 1))
    return replace(run, clean_at=min(now + delay, run.clean_by)), []


def hurried(run: Run, now: float) -> Run:
    """The launcher must go: drain no longer, and look for remains once more at most."""
    run = stop(run, now, 0.0)
    return replace(run, clean_by=min(run.clean_by, now)) if run.clean_by else run


def unreachable(run: Run, why: str) -> Run:
    """The backend cannot be asked; it can again when `why` is empty."""
    return replace(run, unreachable=why)


def scale(run: Run, service: str, replicas: int) -> Run:
    """Wish for this many replicas of a service."""
    return replace(run, wanted={**run.wanted, service: replicas})
