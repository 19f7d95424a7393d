"""Which event of a run becomes which message. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.launcher.control.budget import WARN_SHARE
from services.launcher.progress import Alarm
from services.launcher.state import Cleanup, Cost, Outcome, RunMode, RunState

_TEXT_CHARACTERS = 1_500
_LOG_CHARACTERS = 2_500


class Kind(StrEnum):
    """What a message is about."""

    STARTED = "started"
    RESUMED = "resumed"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    BUDGET = "budget"
    ALARM = "alarm"
    NOTICE = "notice"
    LEAK_SUSPECTED = "leak_suspected"


@dataclass(frozen=True, slots=True)
class Message:
    """One message for people. `facts` are pairs of a label and a value."""

    kind: Kind
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    text: str = ""
    # The end of a log, as it was written.
    log: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What messages say of a run; amounts are US dollars."""

    run_id: str
    name: str
    backend: str
    mode: RunMode = RunMode.TRAIN
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    # Of one hour as the run was planned; None where nobody knows a price.
    estimate: float | None = None
    cost: Cost = field(default_factory=Cost)
    max_cost: float | None = None
    max_hours: float | None = None
    hours: float = 0.0
    error: str = ""
    outcome: Outcome = Outcome.NONE
    cleanup: Cleanup = Cleanup.PENDING
    cleanup_detail: str = ""
    tracker: str = ""
    # Which tasks it is about, as the spec selects them.
    tasks: str = ""
    # Share of held-out tasks that passed, in the first evaluation and in the newest.
    before: float | None = None
    after: float | None = None
    log: str = ""


def of_state(state: RunState, facts: Facts, *, resumed: bool = False) -> list[Message]:
    """What a change of state says; most say nothing."""
    match state:
        case RunState.PREFLIGHT:
            return [_started(facts, resumed=resumed)]
        case RunState.COMPLETED:
            return [_completed(facts), *_leak(facts)]
        case RunState.FAILED:
            return [_failed(facts), *_leak(facts)]
        case RunState.STOPPED:
            return [_stopped(facts), *_leak(facts)]
        case _:
            return []


def of_spending(facts: Facts) -> dict[str, Message]:
    """What is near its limit or over it, by a key that is the same each time that is said."""
    told: dict[str, Message] = {}
    limits = (
        ("cost", facts.cost.accrued, facts.max_cost, "${:,.2f}", "launcher.max_cost"),
        ("hours", facts.hours, facts.max_hours, "{:.1f} h", "launcher.max_hours"),
    )
    for what, used, limit, form, key in limits:
        if limit is None or used < WARN_SHARE * limit:
            continue
        over = used >= limit
        level = "reached" if over else f"{WARN_SHARE:.0%}"
        title = f"Limit of {what} reached" if over else f"{used / limit:.0%} of the {what} are used"
        text = "The run drains and stops; its work is saved." if over else ""
        amounts = f"{form.format(used)} of {form.format(limit)} ({key})"
        pairs = (("Run", facts.run_id), ("Used", amounts), *_spent(facts))
        told[f"{what}-{level}-{limit:g}"] = Message(Kind.BUDGET, title, pairs, text)
    return told


def of_alarm(run_id: str, alarm: Alarm) -> Message:
    """An alarm of a service, or what is good news."""
    kind = Kind.NOTICE if alarm.severity == "notice" else Kind.ALARM
    name = alarm.rule.replace("_", " ")
    title = f"{kind.capitalize()}: {name}"
    title = title if alarm.scope == "all" else f"{title} of {alarm.scope}"
    text = ". ".join(part for part in (alarm.cause, alarm.fix) if part)
    pairs = (("Run", run_id), ("Step", str(alarm.step)))
    return Message(kind, title, pairs, text[:_TEXT_CHARACTERS])


def _started(facts: Facts, *, resumed: bool) -> Message:
    services = ", ".join(f"{count} {service}" for service, count in sorted(facts.wanted.items()))
    pairs = [
        ("Run", facts.run_id),
        ("Spec", facts.name),
        ("Mode", facts.mode.value.replace("_", " ")),
        ("Backend", facts.backend),
        ("Services", services),
        ("Tasks", facts.tasks),
        ("Cost", _estimate(facts)),
        ("Tracker", facts.tracker),
    ]
    kind, title = (Kind.RESUMED, "Run resumed") if resumed else (Kind.STARTED, "Run started")
    return Message(kind, title, tuple(pair for pair in pairs if pair[1]))


def _estimate(facts: Facts) -> str:
    if facts.estimate is None:
        return ""
    told = f"${facts.estimate:,.2f} an hour"
    if facts.max_hours is not None:
        total = facts.estimate * facts.max_hours
        told = f"{told}, ${total:,.2f} in {facts.max_hours:g} h"
    if facts.max_cost is not None:
        told = f"{told}; stops at ${facts.max_cost:,.2f}"
    return told


def _completed(facts: Facts) -> Message:
    return Message(Kind.COMPLETED, "Run completed", _ending(facts))


def _failed(facts: Facts) -> Message:
    text = facts.error[:_TEXT_CHARACTERS]
    log = facts.log[-_LOG_CHARACTERS:]
    return Message(Kind.FAILED, "Run failed", _ending(facts), text, log)


def _stopped(facts: Facts) -> Message:
    title = {
        Outcome.BUDGET: "Run stopped: its budget is spent",
        Outcome.DEADLINE: "Run stopped: its time is up",
        Outcome.CAPACITY: "Run stopped: nobody has such machines",
    }.get(facts.outcome, "Run cancelled")
    return Message(Kind.STOPPED, title, _ending(facts), facts.error[:_TEXT_CHARACTERS])


def _leak(facts: Facts) -> list[Message]:
    if facts.cleanup is not Cleanup.LEAK_SUSPECTED:
        return []
    pairs = (("Run", facts.run_id), ("Found", facts.cleanup_detail or "nobody could be asked"))
    text = "Something of the run may still cost money: look at the provider's own list, and reap."
    return [Message(Kind.LEAK_SUSPECTED, "Machines may be left running", pairs, text)]


def _ending(facts: Facts) -> tuple[tuple[str, str], ...]:
    pairs = [
        ("Run", facts.run_id),
        ("Outcome", facts.outcome.value),
        ("Held-out pass@1", _before_after(facts)),
        ("Machines", facts.cleanup.value.replace("_", " ")),
        *_spent(facts),
        ("Tracker", facts.tracker),
    ]
    return tuple(pair for pair in pairs if pair[1])


def _spent(facts: Facts) -> list[tuple[str, str]]:
    return [("Spent", f"${facts.cost.accrued:,.2f}")] if facts.cost.accrued else []


def _before_after(facts: Facts) -> str:
    if facts.after is None:
        return ""
    after = f"{facts.after:.1%}"
    return after if facts.before is None else f"{facts.before:.1%} → {after}"
